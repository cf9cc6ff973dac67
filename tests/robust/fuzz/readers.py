"""The functions of kvsim that read a format, each given the path of one input."""

import json
import re
from pathlib import Path

from tests.robust.fuzz.binary import TINY
from tests.robust.fuzz.examples import SCRAPES

NO_TENSORS = b"\x02\0\0\0\0\0\0\0{}"
"""A sound safetensors file without any."""


def config(path: Path) -> None:
    from kvsim.models.configs import load_model

    load_model(str(path))


def hardware(path: Path) -> None:
    from kvsim.machines.profiles import load_hardware

    load_hardware(path)


def stack(path: Path) -> None:
    from kvsim.machines.profiles import load_stack

    load_stack(path)


def trace(path: Path) -> None:
    from kvsim.traces.read import load
    from kvsim.traces.statistics import describe

    describe(load(str(path)).requests)


def chats(path: Path) -> None:
    from kvsim.traces.read import ReadOptions, load

    load(str(path), ReadOptions(chars_per_token=4.0))


def run(path: Path) -> None:
    from kvsim.evidence.logs import read_run

    read_run(path)


def attention(path: Path) -> None:
    from kvsim.quality.measured import runs_of
    from kvsim.traces.attention import load

    runs_of(load(path))


def notation(path: Path) -> None:
    from kvsim.errors import InputError
    from kvsim.techniques.notation import parse_several

    text = path.read_bytes().decode("utf-8", "replace")
    if not text.strip():
        raise InputError("nothing to parse")
    parse_several(text)


def plan(path: Path) -> None:
    from kvsim.techniques import parse

    parse(str(path))


def samples(path: Path) -> None:
    from kvsim.evidence.machine.samples import read_samples

    read_samples(path)


def sweep(path: Path) -> None:
    from kvsim.sweeps import chunks
    from kvsim.sweeps.spec import read

    spec = read(path)
    chunks.check(spec)
    chunks.count(spec)


def published(path: Path) -> None:
    from kvsim.evidence.published import read

    read(str(path))


def operators(path: Path) -> None:
    from kvsim.evidence.ops.rows import pairs, read_ops
    from kvsim.machines.profiles import load_hardware

    pairs([path])
    read_ops([path], "vllm", load_hardware("t4"))


def load_tests(path: Path) -> None:
    from kvsim.evidence.loadtests import read_load_tests

    read_load_tests(path, "vllm")


def metrics(path: Path) -> None:
    """A text of /metrics behind one in which nothing was counted yet."""
    from kvsim.files import METRICS, read_text
    from kvsim.traces.production import draw_requests, read_scrapes

    begin = re.sub(r"\d+$", "0", SCRAPES[0], flags=re.MULTILINE)
    where = [str(path)] * 2
    draw_requests(read_scrapes([begin, read_text(path, METRICS)], where, 60.0), where[0], 0)


def gguf(path: Path) -> None:
    """Configuration, tokeniser and weights."""
    import torch

    from kvsim.validate.model.checkpoint import open_model, read_tokeniser
    from kvsim.validate.model.weights import load_weights

    arch, source = open_model(str(path))
    assert source is not None
    load_weights(arch, source, torch.device("cpu"), torch.float32)
    tokeniser = read_tokeniser(source)
    tokeniser.check(tokeniser("ab a b"), arch.model.vocab)


def safetensors(path: Path) -> None:
    """Weights beside a sound configuration."""
    import torch

    from kvsim.validate.model.checkpoint import open_model
    from kvsim.validate.model.weights import load_weights

    beside = path.with_name("config.json")
    beside.write_text(json.dumps(TINY))
    try:
        arch, source = open_model(str(path.parent))
        assert source is not None
        load_weights(arch, source, torch.device("cpu"), torch.float32)
    finally:
        beside.unlink()


def tokenizer(path: Path) -> None:
    """A tokeniser beside weights without tensors."""
    from kvsim.validate.model.checkpoint import Safetensors, read_tokeniser

    beside = path.with_name("model.safetensors")
    beside.write_bytes(NO_TENSORS)
    try:
        tokeniser = read_tokeniser(Safetensors(path.parent))
        tokeniser.check(tokeniser("ab a b"), 4)
    finally:
        beside.unlink()
