"""The flags that kvsim emits (``flags.csv``), each with the documentation it was read in.

A flag that is not in the table cannot be emitted. The documentation is that of the engines' own
repositories at the commit named.
"""

import csv
from collections.abc import Iterable
from functools import cache
from importlib.resources import files

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.techniques.axes.base import Term


@frozen
class EngineManual:
    """An engine, and where its flags are documented.

    Attributes
    ----------
    title
        Name of the engine in text.
    version
        Releases that the flags belong to.
    source
        Repository that holds the documentation.
    """

    title: str
    version: str
    source: str


MANUALS = {
    "vllm": EngineManual(
        "vLLM", "0.19 and later, documentation of 2026", "github.com/vllm-project/vllm"
    ),
    "sglang": EngineManual("SGLang", "documentation of 2026", "github.com/sgl-project/sglang"),
    "trtllm": EngineManual(
        "TensorRT-LLM", "1.3 and later, documentation of 2026", "github.com/NVIDIA/TensorRT-LLM"
    ),
    "lmcache": EngineManual(
        "LMCache under vLLM", "documentation of 2026", "github.com/LMCache/LMCache"
    ),
    "k8s": EngineManual("Kubernetes with vLLM", "apps/v1 and v1", "github.com/kubernetes/website"),
    "hf": EngineManual(
        "Hugging Face generate",
        "transformers 4.56 and later",
        "github.com/huggingface/transformers",
    ),
    "llamacpp": EngineManual(
        "llama.cpp server", "documentation of 2026", "github.com/ggml-org/llama.cpp"
    ),
}


@frozen
class Flag:
    """One setting of an engine.

    Attributes
    ----------
    name
        Option of the command line, argument of a call, or key of a file, as it is written.
    meaning
        Meaning of the flag.
    source
        Page or file of the documentation, at its commit.
    """

    name: str
    meaning: str
    source: str


@cache
def read_flags() -> dict[str, dict[str, Flag]]:
    """Return the known flags of every engine, by name."""
    found: dict[str, dict[str, Flag]] = {engine: {} for engine in MANUALS}
    text = (files("kvsim.emit") / "flags.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        flag = Flag(row["name"], row["meaning"], row["source"])
        found[row["engine"]][flag.name] = flag
    return found


def find_flag(engine: str, name: str) -> Flag:
    """Return a flag of an engine.

    Parameters
    ----------
    engine
        Key of the engine.
    name
        Name of the flag, with its dashes.

    Returns
    -------
    Flag
        Flag with its meaning and source.

    Raises
    ------
    InputError
        If the table lacks it.
    """
    known = read_flags()[engine].get(name)
    if known is None:
        raise InputError(f"{engine} has no flag {name} in kvsim's list; add it with its source")
    return known


VLLM_TURBOQUANT = {
    (8, 4): "turboquant_k8v4",
    (4, 4): "turboquant_4bit_nc",
    (3, 4): "turboquant_k3v4_nc",
    (3, 3): "turboquant_3bit_nc",
}
"""vLLM's formats by the bits of keys and values."""


def turboquant(terms: Iterable[Term]) -> str:
    """Return vLLM's name of a TurboQuant format; empty if vLLM lacks these bits.

    Parameters
    ----------
    terms
        Terms of a technique.

    Returns
    -------
    str
        Value of ``--kv-cache-dtype``.
    """
    term = next((x for x in terms if x.name == "turboquant"), None)
    if term is None:
        return ""
    keys, values = term.settings["bits"], term.settings["value_bits"]
    return VLLM_TURBOQUANT.get((keys, keys if values == "same" else values), "")
