"""Every format that kvsim reads: sound examples, how to spoil them, who reads them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.robust.fuzz import binary, examples, readers
from tests.robust.fuzz.edits import texts, trees
from tests.robust.fuzz.play import Work, command

SMALL_MODEL = ("--model", "smollm2-135m")
WHERE = (*SMALL_MODEL, "--gpu", "t4")
PREDICT = ("predict", "--technique", "full,kvpr,kivi:bits=4", "--batch", "1,4")


@dataclass(frozen=True)
class Format:
    """A format.

    Attributes
    ----------
    file
        Name of the input.
    sound
        Inputs that the reader takes.
    inputs
        Strategy of odd ones.
    read
        The function that reads it.
    commands
        Command lines that do.
    """

    file: str
    sound: tuple[bytes, ...]
    inputs: Callable[[], st.SearchStrategy[bytes]]
    read: Work
    commands: tuple[Work, ...] = ()


def _text(file: str, sound: Sequence[str], read: Work, *commands: Work) -> Format:
    raw = tuple(text.encode() for text in sound)
    return Format(file, raw, lambda: texts(sound), read, commands)


def _tree(file: str, sound: Sequence[Any], read: Work, *commands: Work) -> Format:
    raw = tuple(json.dumps(document).encode() for document in sound)
    return Format(file, raw, lambda: trees(sound), read, commands)


SERVED = command("simulate", *WHERE, "--trace", "{}")
INSPECT = command("traces", "inspect", "{}")
DOCTOR = command("doctor", "{}")
IMPORT = ("traces", "import", "{}", "--out", "{}.csv")
FORMATS: dict[str, Format] = {
    "config.json": _tree(
        "c.json", examples.CONFIGS, readers.config,
        command(*PREDICT, "--gpu", "h100", "--model", "{}"), DOCTOR,
    ),
    "trace text": _text("t.csv", examples.TRACES, readers.trace, INSPECT, DOCTOR, SERVED),
    "chats": _text(
        "t.json", examples.CHATS, readers.chats,
        command("traces", "inspect", "{}", "--chars-per-token", "4"),
    ),
    "trace Parquet": Format(
        "t.parquet", (), binary.parquet, readers.trace, (INSPECT, SERVED, DOCTOR)
    ),
    "profile": _text(
        "p.toml", examples.shipped("hwprofiles/*.toml"), readers.hardware,
        command(*PREDICT, *SMALL_MODEL, "--gpu", "{}"), DOCTOR,
    ),
    "stack": _text(
        "s.toml", examples.shipped("hwprofiles/stacks/*.toml"), readers.stack,
        command(*PREDICT, *WHERE, "--stack", "{}"), DOCTOR,
    ),
    "benchmark result": _tree("b.json", examples.BENCHES, readers.run, INSPECT),
    "run log": _text("r.jsonl", examples.RUNS, readers.run, INSPECT),
    "simulated run": Format("r.parquet", (), binary.simulated, readers.run),
    "attention trace": _tree(
        "a.json", examples.documents("traces/measured/*.json"), readers.attention, DOCTOR,
        command("simulate", *WHERE, "--trace", "sample:chat", "--technique", "magicdec",
                "--acceptance", "{}", "--check"),
    ),
    "notation": _text("n.txt", examples.NOTATIONS, readers.notation),
    "plan": _tree(
        "plan.json", [examples.PLAN], readers.plan, command("predict", *WHERE, "--technique", "{}"),
    ),
    "GGUF": Format("m.gguf", (), binary.gguf, readers.gguf),
    "safetensors": Format("model.safetensors", (), binary.safetensors, readers.safetensors),
    "tokenizer": _tree("tokenizer.json", [examples.TOKENIZER], readers.tokenizer),
    "samples": _text("s.jsonl", examples.SAMPLES, readers.samples),
    "sweep": _text("sweep.toml", examples.SWEEPS, readers.sweep),
    "own runs": _text(
        "runs.csv", examples.OWN_RUNS, readers.published, command("reproduce", "{}"), DOCTOR,
    ),
    "operators": _text(
        "ops.csv", examples.OPERATORS, readers.operators,
        command("calibrate", "--from-ops", "{}", "--engine", "vllm", "--gpu", "t4", "--out",
                "{}.toml"),
    ),
    "load tests": _text(
        "load.csv", examples.LOAD_TESTS, readers.load_tests,
        command("calibrate", "--from-serving", "{}", "--engine", "vllm", "--out", "{}.toml"),
    ),
    "range query": _text("m.json", examples.METRICS, command(*IMPORT)),
    "metrics": _text("m.txt", examples.SCRAPES, readers.metrics),
    "spans": _text("spans.json", examples.SPANS, command(*IMPORT)),
    "access log": _text(
        "access.log", examples.ACCESS,
        command(*IMPORT, "--lengths", "lognormal:prompt=64,generate=16"),
    ),
}  # fmt: skip
