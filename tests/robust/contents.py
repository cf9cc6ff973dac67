"""Files of the right kind that say what cannot be."""

import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import kvsim
from kvsim.models.catalogue import catalogue_config
from tests.robust.cases import MODEL, REFUSED, TRACE, WHERE, Case, Made

SHIPPED = Path(kvsim.__file__).parent
PROFILE = (SHIPPED / "hwprofiles" / "t4.toml").read_text(encoding="utf-8")
STACK = (SHIPPED / "hwprofiles" / "stacks" / "fused.toml").read_text(encoding="utf-8")
CONFIG: dict[str, Any] = dict(catalogue_config("smollm2-135m"))
PREDICT = ("predict", "--technique", "full", "--technique", "kvpr")
EDGES = ("1e300", "1e200", "1e100", "1e-300", "1e-200", "-1.0", "nan", "inf", "'x'", "[]", "true")
WORDS = (".",)


def contents() -> Iterator[Case]:
    """Configurations, profiles, stacks, traces and tables with odd content."""
    yield from configurations()
    yield from numbers_of("--gpu", PROFILE)
    yield from numbers_of("--stack", STACK)
    yield from stacks()
    yield from traces()
    yield from parquet()


def configurations() -> Iterator[Case]:
    """Every number of a configuration with what none can be."""
    for name, value in CONFIG.items():
        if type(value) is not int:
            continue
        odds: tuple[Any, ...] = (
            0, -1, 1.5, 10**12, "x", None, [], {}, True, float("nan"), float("inf"),
        )  # fmt: skip
        for odd in odds:
            if odd is None or (name.endswith("token_id")):
                continue
            text = json.dumps(CONFIG | {name: odd})
            yield _config(f"{name} {odd!r}", text, (0, REFUSED))
    deep = {"model_type": "llama"} | CONFIG | {"rope_scaling": "x"}
    yield _config("rope scaling as text", json.dumps(deep), (0, REFUSED))
    kinds = [("sliding_attention", "full_attention")[i * i % 3 % 2] for i in range(1000)]
    many = CONFIG | {"num_hidden_layers": 1000, "layer_types": kinds, "sliding_window": 64}
    yield _config("a thousand layers of two kinds", json.dumps(many), (0, REFUSED))
    yield _config("a list", "[]")
    yield _config("nothing", "null")
    yield _config("itself as text model", json.dumps({"text_config": {"text_config": {}}}))


def _config(name: str, text: str, code: int | tuple[int, ...] = REFUSED) -> Case:
    files: dict[str, Made] = {"c.json": text.encode()}
    return Case(
        f"config {name}", (*PREDICT, "--gpu", "t4", "--model", "./c.json"), code, WORDS, files
    )


def numbers_of(option: str, text: str) -> Iterator[Case]:
    """Every number of a TOML file at the edge of floats."""
    where = ("--model", "smollm2-135m") if option == "--gpu" else WHERE
    for number, line in enumerate(text.splitlines()):
        key, equals, value = line.partition(" = ")
        if not equals or not value[:1].isdigit():
            continue
        for edge in EDGES[number % 3 :: 3]:
            lines = text.splitlines()
            lines[number] = f"{key} = {edge}"
            files: dict[str, Made] = {"f.toml": "\n".join(lines).encode()}
            arguments = (*PREDICT, *where, option, "./f.toml")
            yield Case(f"{option} {key} {number} {edge}", arguments, (0, REFUSED), WORDS, files)


def stacks() -> Iterator[Case]:
    """Stacks that extend each other."""
    chain: dict[str, Made] = {
        f"s{i}.toml": _extending(f"./s{i + 1}.toml").encode() for i in range(3000)
    }
    circle: dict[str, Made] = {
        f"s{i}.toml": _extending(f"./s{(i + 1) % 2}.toml").encode() for i in range(2)
    }
    for name, files in (("a chain of 3,000", chain), ("a circle", circle)):
        arguments = (*PREDICT, *WHERE, "--stack", "./s0.toml")
        yield Case(f"stacks: {name}", arguments, REFUSED, ("extends",), files)
    dotted: dict[str, Made] = {"f.toml": ("a" + ".a" * 100_000 + " = 1").encode()}
    arguments = (*PREDICT, *WHERE, "--stack", "./f.toml")
    yield Case("stacks: a key of 100,000 dots", arguments, REFUSED, ("nested too deeply",), dotted)


def _extending(other: str) -> str:
    return f'title = "t"\nbasis = "datasheet"\nerror = ""\nextends = "{other}"\n'


def traces() -> Iterator[Case]:
    """Traces with rows that break a rule, and options that name columns twice."""
    rows = {
        "negative": "3,-1,5", "zero": "3,0,5", "huge": "3,1000000000000,5", "half": "3,1.5,5",
        "nan": "nan,1,5", "infinite": "inf,1,5", "1e308": "1e308,1,5", "backwards": "-1,1,5",
        "text": "x,y,z", "short": "3,1", "long": "3,1,5,7", "quote": '3,"1,5', "NUL": "3,\0,5",
        "years": "1e12,1,5",
    }  # fmt: skip
    for name, row in rows.items():
        files: dict[str, Made] = {"t.csv": f"{TRACE}{row}\n".encode()}
        commands: tuple[tuple[str, ...], ...] = (
            ("traces", "inspect", "t.csv"),
            ("simulate", *WHERE, "--trace", "t.csv"),
        )
        for command in commands:
            yield Case(f"trace {command[0]} {name}", command, REFUSED, ("t.csv",), files)
    own: dict[str, Made] = {"t.csv": TRACE.encode()}
    for columns in ("prompt=a,prompt=b", ",", "=", "x=y", "prompt=", "prompt=nope"):
        arguments = ("traces", "inspect", "t.csv", "--columns", columns)
        yield Case(f"--columns {columns}", arguments, REFUSED, WORDS, own)
    for compare in (",", ",,", " ", "full,full", "full,", "x"):
        code = (0, REFUSED) if compare == "full," else REFUSED
        several = ("simulate", *WHERE, "--trace", "t.csv", "--compare", compare)
        yield Case(f"--compare {compare!r}", several, code, WORDS, own)
    cost = ("capacity", *MODEL, "--gpus", ",", "--ttft", "2s", "--tpot", "1s", "--trace", "t.csv")
    yield Case("--gpus ,", cost, REFUSED, WORDS, own)


def parquet() -> Iterator[Case]:
    """Parquet columns of every type."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {
        "date32": pa.array([1, 2], pa.int32()).cast(pa.date32()),
        "date64": pa.array([86400000, 172800000], pa.int64()).cast(pa.date64()),
        "time32": pa.array([1, 2], pa.int32()).cast(pa.time32("s")),
        "time64": pa.array([1, 2], pa.int64()).cast(pa.time64("us")),
        "duration": pa.array([1, 2], pa.int64()).cast(pa.duration("s")),
        "decimal": pa.array([1, 2]).cast(pa.decimal128(38, 2)),
        "binary": pa.array([b"\xff", b"1"]), "list": pa.array([[1], [2]]),
        "struct": pa.array([{"a": 1}, {"a": 2}]), "bool": pa.array([True, False]),
        "null": pa.nulls(2), "half": pa.array([1, 2], pa.int64()).cast(pa.float16(), safe=False),
        "uint64": pa.array([2**63, 2**63 + 1], pa.uint64()),
        "timestamp": pa.array([1, 2], pa.int64()).cast(pa.timestamp("ns")),
    }  # fmt: skip
    good = {"arrival_s": pa.array([0.0, 1.0]), "prompt_tokens": pa.array([1, 2]),
            "generate_tokens": pa.array([1, 2])}  # fmt: skip
    for name, values in kinds.items():
        for column in good:
            sink = BytesIO()
            try:
                pq.write_table(pa.table(good | {column: values}), sink)
            except pa.ArrowException:
                continue
            files: dict[str, Made] = {"t.parquet": sink.getvalue()}
            arguments = ("traces", "inspect", "t.parquet")
            yield Case(f"parquet {column} {name}", arguments, (0, REFUSED), ("t.parquet",), files)
