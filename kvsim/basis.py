"""How much a prediction may be trusted, and on what grounds."""

from kvsim.deployment import Deployment


def basis(d: Deployment) -> dict[str, str]:
    """The weakest of the grounds that a prediction stands on, and the error known for it.

    ``calibrated``: hardware measured, stack fitted to runs. ``carried over``: a stack whose
    numbers were measured on other cards or read from its code. ``datasheet``: peak rates.
    """
    fitted = d.stack.basis == "calibrated" and d.hardware.basis == "measured"
    kind = "carried over" if d.stack.basis == "calibrated" and not fitted else d.stack.basis
    return {
        "kind": kind,
        "hardware": f"{d.hardware.name} ({d.hardware.basis})",
        "stack": f"{d.stack.name} ({d.stack.basis})",
        "error": d.stack.error,
    }
