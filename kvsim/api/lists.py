"""What is known: models, GPUs, techniques and software stacks, with their sources."""

from kvsim.options import Inputs, takes_options


@takes_options("models", "name")
def models(inputs: Inputs) -> object:
    """List the models of the catalogue, or look one up.

    Returns
    -------
    list of dict, or dict
        All models, or the one that ``name`` gives.

    Examples
    --------
    >>> models("meta-llama/Llama-3.1-8B-Instruct")["layers"]
    32
    """
    return _find("models", inputs.name)


@takes_options("gpus", "name")
def gpus(inputs: Inputs) -> object:
    """List the hardware profiles, or look one up with its sources.

    Returns
    -------
    list of dict, or dict
        All profiles, or the one that ``name`` gives.

    Examples
    --------
    >>> gpus("NVIDIA L40S")["title"]
    'NVIDIA L40S 48 GB'
    """
    return _find("gpus", inputs.name)


@takes_options("techniques", "name")
def techniques(inputs: Inputs) -> object:
    """List the techniques, or look one up with its settings and paper.

    Returns
    -------
    list of dict, or dict
        All techniques, or the one that ``name`` gives.

    Examples
    --------
    >>> techniques("kivi")["lossless"]
    False
    """
    return _find("techniques", inputs.name)


@takes_options("stacks", "name")
def stacks(inputs: Inputs) -> object:
    """List the software stacks, or look one up with its known error.

    Returns
    -------
    list of dict, or dict
        All stacks, or the one that ``name`` gives.

    Examples
    --------
    >>> stacks("vllm")["basis"]
    'carried over'
    """
    return _find("stacks", inputs.name)


def _find(kind: str, name: str) -> object:
    from kvsim.report import lists

    if kind == "techniques":
        from kvsim.techniques.registry import load_installed

        load_installed()
    return lists.find(kind, name)
