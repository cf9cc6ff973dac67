"""The basis of a prediction: how its numbers were obtained, and the error known for it."""

from kvsim.machines.deployment import Deployment


def basis(deployment: Deployment) -> dict[str, str]:
    """Find the weakest basis of a prediction, and the error known for it.

    ``calibrated``: hardware measured, stack fitted to runs. ``carried over``: a stack whose
    numbers were measured on other cards or read from its code. ``datasheet``: peak rates.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
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
        "chosen": chosen(deployment),
        "error": deployment.stack.error,
    }


def chosen(deployment: Deployment) -> str:
    """Explain which of an engine's numbers a deployment uses.

    Parameters
    ----------
    deployment
        Model, machine and software stack.

    Returns
    -------
    str
        Empty where one stack serves all cards.
    """
    stack, gpu = deployment.stack, deployment.hardware.name
    card = stack.name.partition("@")[2]
    if card == gpu:
        return f"fitted to kernels measured on {gpu}"
    if gpu in stack.near:
        return (
            f"no kernel was measured on {gpu}; numbers are those of {card}, the closest "
            "measured card"
        )
    if card:
        return f"fitted to kernels measured on {card}, not on {gpu}"
    if stack.cards:
        return (
            f"no kernel was measured on {gpu} or a similar card; numbers are typical of the "
            "measured cards"
        )
    return ""
