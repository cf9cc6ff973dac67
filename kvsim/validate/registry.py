"""Registry of real implementations, with settings that take effect in small runs.

A session lists its units by it: PyTorch is not imported unless a class or settings are asked for.
"""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from inspect import isclass
from pathlib import Path
from pkgutil import iter_modules
from types import MappingProxyType
from typing import TypeVar

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.techniques import TECHNIQUES
from kvsim.techniques.axes.base import Part
from kvsim.techniques.axes.drafting import Selfdraft

Piece = TypeVar("Piece")

COMPOSITIONS: Mapping[str, tuple[str, ...]] = {
    "full": ("",),
    "offload": ("", "schedule=column,parts={batch}"),  # by rows, and by columns
    # everything on the host, and half of it: whole heads of a batch can be halved more often
    "flexgen": ("parts={batch}", "weights_gpu=50,cache_gpu=50,parts=1"),
    "fastdecode": ("parts=1", "parts={several}"),  # the batch in one part, and a part per sequence
    "pyramidkv": ("budget={pyramid},window=4,beta=2",),
}
"""Presets that run as parts alone, without a file of their own, and their small settings."""

IMPLEMENTATIONS = tuple(
    name
    for files in [{m.name for m in iter_modules([str(Path(__file__).parent / "techniques")])}]
    for name in TECHNIQUES
    if name in COMPOSITIONS or name.replace("-", "_") in files
)
"""Presets that can be run."""

FILES_OF_PARTS: Mapping[str, str] = MappingProxyType(
    {
        "all": "parts.selection",
        "fp16": "parts.rows",
        "grouped": "parts.rows",
        "gpu": "parts.place",
        "place": "parts.place",
        "values": "techniques.kcache",
        "pairs": "techniques.specache",
        "late-kivi": "techniques.specache",
        "guessed": "techniques.infinigen",
        "hierarchical": "techniques.quantspec",
        "landmarks": "techniques.shadowkv",
        "lowrank": "techniques.shadowkv",
    }
)
"""Files of parts by their names; ``techniques/some_name.py`` holds the class of ``some-name``."""

SELF_DRAFTING: Mapping[str, str] = MappingProxyType(
    {"upper": "quantspec", "all": "quantspec", "streamingllm": "magicdec", "snapkv": "magicdec"}
)
"""Whose drafts a model's own layers make, by what these read."""


@frozen
class SmallRun:
    """Size of a small run in which techniques are checked, with settings that take effect in it."""

    batch: int  # number of sequences
    prompt: int  # prompt length [tokens]
    group: int  # elements that share a scale; divides the head dimension
    weight_bits: int  # 4 if the model's widths allow it, else 16
    kv_heads: int = 2  # KV heads of the model

    @property
    def sizes(self) -> dict[str, str]:
        """Return the names that settings may use in braces, with their values in this run.

        ``several`` exists only in a batch of several sequences, ``alone`` (half of the prompt) only
        with one, ``one_head`` (the share of one KV head) only with several heads.
        """
        quarter, half = max(1, self.prompt // 4), self.prompt // 2
        found: dict[str, object] = {
            "batch": self.batch,
            "group": self.group,
            "two_groups": 2 * self.group,
            "weight_bits": self.weight_bits,
            "quarter": quarter,
            "half": 2 * quarter,
            "least": max(4, quarter),
            "split": half,
            "pages": 4 * max(1, self.prompt // 8),  # half of the prompt in pages of four tokens
            "pyramid": 4 * max(2, self.prompt // 16),  # from three eighths down to an eighth
        }
        found |= {"several": self.batch} if self.batch > 1 else {"alone": half}
        found |= {"one_head": f"{1 / self.kv_heads:.12g}"} if self.kv_heads > 1 else {}
        return {name: str(size) for name, size in found.items()}


def small_settings(name: str, run: SmallRun) -> list[str]:
    """List settings with which a preset takes effect in a small run.

    Parameters
    ----------
    name
        Name of the preset, whose file has the constant ``SMALL_SETTINGS``.
    run
        Size of the run, which replaces names in braces; settings with names that it lacks are left
        out.

    Returns
    -------
    list of str
        Settings in notation, without the technique's name; empty if none fit.
    """
    if name in COMPOSITIONS:
        texts = COMPOSITIONS[name]
    else:
        module = import_module(f"kvsim.validate.techniques.{name.replace('-', '_')}")
        texts = module.SMALL_SETTINGS
    found = []
    for text in texts:
        try:
            found.append(text.format_map(run.sizes))
        except KeyError:
            continue
    return found


def find_part(base: type[Piece], part: Part, name: str = "") -> type[Piece]:
    """Find the class that implements a part.

    Parameters
    ----------
    base
        Base class that the result must have.
    name
        Name in notation, such as ``late-kivi`` for the class ``LateKivi``; by default the part's.

    Raises
    ------
    InputError
        If there is no such class.
    """
    if isinstance(part, Selfdraft):
        name = SELF_DRAFTING[part.reads]
    name = name or part.name
    file = name.replace("-", "_").replace(" ", "_")
    module = f"kvsim.validate.{FILES_OF_PARTS.get(name, f'techniques.{file}')}"
    wanted = file.replace("_", "")
    if find_spec(module) is not None:
        for key, kind in vars(import_module(module)).items():
            if key.lower() == wanted and isclass(kind) and issubclass(kind, base):
                return kind
    raise InputError(
        f"{part.name}: this {part.axis} has no real implementation; it can only be simulated"
    )
