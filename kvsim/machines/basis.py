"""How much a prediction may be trusted, and on what grounds."""

from kvsim.machines.deployment import Deployment


def basis(deployment: Deployment) -> dict[str, str]:
    """The weakest of the grounds that a prediction stands on, and the error known for it.

    ``calibrated``: hardware measured, stack fitted to runs. ``carried over``: a stack whose
    numbers were measured on other cards or read from its code. ``datasheet``: peak rates.
    """
    stack, hardware = deployment.stack, deployment.hardware
    fitted = stack.basis == "calibrated" and hardware.basis == "measured"
    fitted &= stack.device in ("", hardware.device)  # not one machine's software on another
    kind = "carried over" if stack.basis == "calibrated" and not fitted else stack.basis
    where = f"on {hardware.device} at {hardware.date}" if fitted and hardware.device else ""
    return {
        "kind": kind,
        "calibrated": where,
        "hardware": f"{deployment.hardware.name} ({deployment.hardware.basis})",
        "stack": f"{deployment.stack.name} ({deployment.stack.basis})",
        "error": deployment.stack.error,
    }
