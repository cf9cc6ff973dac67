"""What is known: models, GPUs, techniques and software stacks, with their sources."""

from typing import Any

from kvsim.options import Inputs, takes_options


@takes_options("models", "name")
def models(inputs: Inputs) -> Any:
    """The models of the catalogue as rows, or one of them."""
    return _find("models", inputs.name)


@takes_options("gpus", "name")
def gpus(inputs: Inputs) -> Any:
    """The hardware profiles as rows, or one of them with its sources."""
    return _find("gpus", inputs.name)


@takes_options("techniques", "name")
def techniques(inputs: Inputs) -> Any:
    """The techniques as rows, or one of them with its settings and paper."""
    return _find("techniques", inputs.name)


@takes_options("stacks", "name")
def stacks(inputs: Inputs) -> Any:
    """The software stacks as rows, or one of them with its known error."""
    return _find("stacks", inputs.name)


def _find(kind: str, name: str) -> Any:
    from kvsim.report import lists

    return lists.find(kind, name)
