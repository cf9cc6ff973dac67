"""Which techniques run for real, and settings under which each acts in a small run.

A session lists its units by it: PyTorch is not imported unless settings are asked for.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from kvsim.frozen import frozen
from kvsim.techniques import TECHNIQUES


@frozen
class SmallRun:
    """A run that a check does; techniques choose settings that act in it."""

    batch: int  # [sequences]
    prompt: int  # [tokens]
    group: int  # numbers that share a scale, a divisor of the head dimension
    weight_bits: int  # 4 where the model's widths allow it, otherwise 16
    kv_heads: int = 2  # of the model

    @property
    def quarter(self) -> int:
        """A quarter of the prompt. [tokens]"""
        return max(1, self.prompt // 4)

    @property
    def pages(self) -> int:
        """Half of the prompt in pages of four. [tokens]"""
        return 4 * max(1, self.prompt // 8)


COMPOSITIONS: Mapping[str, Callable[[SmallRun], list[str]]] = {
    "full": lambda run: [""],
    # by rows, and by columns with a part per sequence
    "offload": lambda run: ["", f"schedule=column,parts={run.batch}"],
    # everything on the host, and half of it: whole heads of a batch can be halved more often
    "flexgen": lambda run: [f"parts={run.batch}", "weights_gpu=50,cache_gpu=50,parts=1"],
    # the batch in one part, and a part per sequence
    "fastdecode": lambda run: ["parts=1", f"parts={run.batch}"] if run.batch > 1 else ["parts=1"],
    # budgets from three eighths of the prompt down to an eighth
    "pyramidkv": lambda run: [f"budget={4 * max(2, run.prompt // 16)},window=4,beta=2"],
}
"""Presets that run as parts alone, without a file of their own, and their small settings."""

FILES = {module.name for module in iter_modules([str(Path(__file__).parent / "techniques")])}

IMPLEMENTATIONS = tuple(
    name for name in TECHNIQUES if name in COMPOSITIONS or name.replace("-", "_") in FILES
)
"""Presets that can be run."""


def small_settings(name: str, run: SmallRun) -> list[str]:
    """List settings under which a preset acts in a small run.

    Parameters
    ----------
    name
        The preset. The file of its real implementation says them, in a function of this name.
    run
        Batch, prompt and widths of the model.

    Returns
    -------
    list of str
        Settings as the notation writes them, without the technique's name; empty where none suit.
    """
    if name in COMPOSITIONS:
        return COMPOSITIONS[name](run)
    module = import_module(f"kvsim.validate.techniques.{name.replace('-', '_')}")
    settings: list[str] = module.small_settings(run)
    return settings
