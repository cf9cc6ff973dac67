"""Lists of known models, GPUs, techniques and stacks, and the details of one entry."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache

from kvsim.errors import unknown
from kvsim.evidence.ledger import shipped
from kvsim.evidence.published import papers, read
from kvsim.machines.hardware import GIB, Hardware
from kvsim.machines.profiles import hardware_names, load_hardware, load_stack, stack_names
from kvsim.models.catalogue import catalogue_entry, model_names
from kvsim.models.configs import load_model
from kvsim.models.model import Model
from kvsim.report import units
from kvsim.report.answer import Answer
from kvsim.report.evidence import describe_accuracy
from kvsim.report.json import Row, number, pick
from kvsim.report.result import Result
from kvsim.report.table import Column, Table, text_column
from kvsim.report.terminal import BLANK, Block, Hanging, Heading, Items
from kvsim.techniques import TECHNIQUES, parse
from kvsim.techniques.acceptance import load_summaries
from kvsim.techniques.axes.base import Term
from kvsim.techniques.axes.settings import simplify
from kvsim.techniques.notation import terms
from kvsim.techniques.papers.cache import FORMATS, load_kernels
from kvsim.validate.registry import IMPLEMENTATIONS


def _model(shape: Model) -> Row:
    """Make the row of one model."""
    shipped = shape.name in model_names()
    return {
        "name": shape.name,
        "hf_id": shape.repository,
        **pick(shape, "family", "parameters", "active_parameters"),
        "weights": shape.released,
        **pick(shape, "layers", "hidden", "heads"),
        "kv_heads": shape.cached_heads,
        **pick(shape, "max_context", "cached_layers", "kv_bytes_per_token"),
        "state_bytes_per_sequence": number(shape.state_bytes),
        "source": catalogue_entry(shape.name)["source"] if shipped else "its own configuration",
    }


def _gpu(hardware: Hardware) -> Row:
    """Make the row of one hardware profile."""
    return {
        "name": hardware.name,
        "title": hardware.title,
        "basis": hardware.basis,
        "gpu_memory_bytes": hardware.gpu_memory,
        "hbm_bytes_per_s": hardware.links["hbm"].bandwidth,
        "fp16_flop_per_s": hardware.flops["fp16"],
        "h2d_bytes_per_s": hardware.links["h2d"].bandwidth,
        "d2h_bytes_per_s": hardware.links["d2h"].bandwidth,
        "usd_per_hour": hardware.price,
        "rated_power_w": hardware.power,
        "notes": list(hardware.notes),
        "sources": dict(hardware.sources),
    }


def techniques(parts: bool = False) -> list[Row]:
    """Return a row for each technique, with its settings.

    Parameters
    ----------
    parts
        Whether to include the building blocks that techniques are composed of.
    """
    rows = []
    for name, kind in (terms() if parts else TECHNIQUES).items():
        default = parse(name)
        about, _, references = (kind.__doc__ or "").partition("References\n    ----------\n")
        rows.append(
            {
                "name": name,
                "summary": " ".join(about.replace("``", "").split()),
                "lossless": default.exact,
                "assumes": default.assumes,
                "parameters": [
                    {
                        "name": f.name,
                        "default": simplify(default.settings[f.name]),
                        "meaning": f.metadata["text"],
                    }
                    for f in fields(kind)
                ],
                "source": re.sub(r"\.\. \[\d+\] ", "", " ".join(references.split())),
                "compared_with": _describe_comparisons(name, kind),
            }
        )
    return [*rows, *(_cache_format(name) for name in FORMATS if parts and name not in terms())]


RUNS = ("decode", "prefill", "request", "memory")  # kinds of ledger entries that are whole runs
SPEED_UPS = {
    "eagle3": 150,
    "p-eagle": 21,
    "eagle": 9,
    "draft": 4,
    "ngram": 4,
    "medusa": 4,
    "mtp": 2,
}
"""Published speed-ups by drafting technique that ``python -m benchmarks.drafts`` compares with."""


def _describe_comparisons(name: str, kind: type[Term]) -> str:
    """Say what the predictions of a technique were compared with; empty for building blocks."""
    if name not in TECHNIQUES:
        return ""
    figures = Counter(_published_figures().get(name, ()))
    runs: Counter[str] = Counter()
    for entry in shipped():
        if entry.technique == name and entry.kind in RUNS:
            runs[entry.engine] += entry.rows * (entry.source != "published tables")
    methods = name, getattr(kind, "like", "")
    accepted = sum(one.rows for one in load_summaries() if one.method in methods)
    times = [
        (figures.total(), f"published figures (kvsim reproduce {', '.join(figures)})"),
        (runs.total(), f"measurements of runs in {', '.join(+runs)}"),
        (SPEED_UPS.get(name, 0), "published speed-ups"),
    ]
    said = [f"{count:,} {words}" for count, words in times if count]
    said = said or ["no published time"]
    if accepted:
        said.append(f"acceptance in {accepted} public runs")
    if name in IMPLEMENTATIONS:
        said.append("operations counted in its real run (kvsim validate)")
    return "; ".join(said)


@cache
def _published_figures() -> dict[str, list[str]]:
    """List the paper of each published figure, by the technique that it is of."""
    found: dict[str, list[str]] = {}
    for paper in papers():
        for row in read(paper):
            found.setdefault(row.technique, []).append(paper)
    return found


def _cache_format(name: str) -> Row:
    """Make the row of a format that engines have for their caches, under their own name."""
    kernels = [kernel for kernel in load_kernels() if kernel.format == name]
    first = kernels[0]
    bits = f"keys of {first.key_bits:g} bits and values of {first.value_bits:g}"
    engines = " and ".join(f"{kernel.engine} ({kernel.versions})" for kernel in kernels)
    edge = first.edge_layers
    ends = f"; {edge} layers at either end stay in 16 bits" if edge else ""
    return {
        "name": name,
        "summary": f"A cache format of {engines}: {bits}{ends}. It is cache:format={name}.",
        "lossless": False,
        "assumes": "",
        "parameters": [],
        "source": "; ".join(f"{kernel.engine}: {kernel.source}" for kernel in kernels),
        "compared_with": "published speeds of its kernels, to which their times were fitted",
    }


TITLE = 62  # of a stack in the list [characters]


def _shorten(text: str, most: int) -> str:
    """Cut a text after its last whole part that fits; one that is cut mid-phrase ends in "…"."""
    for mark in (";", ",", ":", " ("):
        while len(text) > most and mark in text:
            text = text.rpartition(mark)[0]
    return text if len(text) <= most else text[: most - 1].rpartition(" ")[0] + " …"


def _number(heading: str, key: str, unit: float = 1.0, rank: int = 0) -> Column:
    def value(row: Row) -> float | None:
        return None if row[key] is None else row[key] / unit

    return Column(heading, value, units.format_number, rank)


MODEL_COLUMNS = (
    text_column("model", "name"),
    _number("10^9 params", "parameters", 1e9),
    _number("active", "active_parameters", 1e9, 3),
    _number("layers", "layers", rank=2),
    _number("hidden", "hidden", rank=6),
    _number("heads", "heads", rank=5),
    _number("KV heads", "kv_heads", rank=4),
    Column("context", "max_context", units.integer, 1),
    _number("caches", "cached_layers", rank=3),
    _number("KV KiB/token", "kv_bytes_per_token", 1024),
    _number("state MiB", "state_bytes_per_sequence", 2**20, 2),
)
GPU_COLUMNS = (
    text_column("gpu", "name"),
    text_column("card", "title", 4),
    _number("GiB", "gpu_memory_bytes", GIB),
    _number("GB/s", "hbm_bytes_per_s", 1e9),
    _number("fp16 TFLOP/s", "fp16_flop_per_s", 1e12),
    _number("H2D GB/s", "h2d_bytes_per_s", 1e9, 1),
    _number("USD/h", "usd_per_hour", rank=2),
    text_column("basis", "basis", 3),
)
TECHNIQUE = (
    text_column("technique", "name"),
    text_column("lossless", lambda row: "yes" if row["lossless"] else "no", 1),
    text_column("what it does", lambda row: row["summary"].partition(". ")[0].rstrip(".")),
)
STACKS = (
    text_column("stack", "name"),
    text_column("what it is", lambda row: _shorten(row["title"], TITLE)),
    text_column("basis", "basis", 1),
)
LISTS = {
    "models": (MODEL_COLUMNS, "Models (one in full with its source: kvsim models NAME)"),
    "gpus": (GPU_COLUMNS, "GPUs (one in full with its sources: kvsim gpus NAME)"),
    "techniques": (TECHNIQUE, "Techniques (one in full: kvsim techniques NAME)"),
    "stacks": (STACKS, "Software stacks (one in full: kvsim stacks NAME)"),
}
ENTRIES: dict[str, tuple[Callable[[], Sequence[str]], Callable[[str], Row]]] = {
    "models": (model_names, lambda name: _model(load_model(name))),
    "gpus": (hardware_names, lambda name: _gpu(load_hardware(name))),
    "stacks": (stack_names, lambda name: pick(load_stack(name), "name", "title", "basis", "error")),
}
"""Names of the entries that are shipped, and the row of any, a file of the user's own included."""


def find(kind: str, name: str) -> Row | list[Row]:
    """Look up the entries of a list, or one entry.

    Parameters
    ----------
    kind
        ``"models"``, ``"gpus"``, ``"techniques"`` or ``"stacks"``.
    name
        Name of the entry; empty for all.

    Returns
    -------
    Row or list of Row
        The entry, or all entries.

    Raises
    ------
    InputError
        If there is no entry of that name.
    """
    if kind in ENTRIES:
        names, row_of = ENTRIES[kind]
        return row_of(name) if name else [row_of(each) for each in names()]
    if not name:
        return techniques()
    rows = {row["name"]: row for row in techniques(parts=True)}
    wanted = name.lower().partition(":")[0]
    if wanted not in rows:
        raise unknown("technique", name, rows, "see `kvsim techniques`")
    return rows[wanted]


def make_result(kind: str, name: str, command: str = "") -> Result[Row | list[Row]]:
    """Make the result that shows a list, or one entry in full.

    Parameters
    ----------
    kind
        ``"models"``, ``"gpus"``, ``"techniques"`` or ``"stacks"``.
    name
        Name of the entry; empty for all.
    command
        The equivalent command line.

    Returns
    -------
    Result
        The list or the entry.

    Raises
    ------
    InputError
        If there is no entry of that name.
    """
    found = find(kind, name)
    if isinstance(found, dict):
        own = {key: value for key, value in found.items() if key != "notes"}
        blocks, notes = _list_blocks(kind, found, name), found.get("notes", ())
        title, none = str(found.get("title") or found["name"]), Answer("")
        return Result(title, none, own, found, [found], blocks=blocks, notes=notes, command=command)
    columns, title = LISTS[kind]
    tables, own = [Table(columns, found, title)], {"rows": found}
    return Result(title, Answer(""), own, found, found, tables, tables, command=command)


QUANTITIES = {
    "gpu_memory_bytes": ("GPU memory", "GiB", GIB),
    "hbm_bytes_per_s": ("GPU memory bandwidth", "GB/s", 1e9),
    "fp16_flop_per_s": ("fp16 peak", "TFLOP/s", 1e12),
    "h2d_bytes_per_s": ("host to GPU", "GB/s", 1e9),
    "d2h_bytes_per_s": ("GPU to host", "GB/s", 1e9),
    "usd_per_hour": ("price", "USD/h", 1.0),
    "rated_power_w": ("rated power", "W", 1.0),
    "kv_bytes_per_token": ("KV cache per token", "KiB", 1024),
    "state_bytes_per_sequence": ("state per sequence", "MiB", 2**20),
    "parameters": ("parameters", "billion", 1e9),
    "active_parameters": ("active parameters per token", "billion", 1e9),
}
"""Label, unit and scale of the quantities in the details of an entry."""


def _list_blocks(kind: str, row: Row, name: str) -> list[Block]:
    """All that is known of an entry."""
    blocks: list[Block] = [Heading(str(row.get("title") or row["name"]))]
    if kind == "gpus":
        blocks += [describe_accuracy(load_hardware(name)), BLANK]
    for key, value in row.items():
        if key == "parameters" and isinstance(value, list):
            keys = {"setting": "name", "default": "default", "meaning": "meaning"}
            columns = [text_column(heading, each) for heading, each in keys.items()]
            blocks += [Table(columns, value)] if value else []
        elif isinstance(value, dict):
            numbers: dict[str, list[str]] = {}
            for number_name, source in value.items():
                numbers.setdefault(str(source), []).append(number_name)
            blocks += ["Sources:", Items(f"{', '.join(numbers[text])}: {text}" for text in numbers)]
        elif isinstance(value, list):
            blocks += [Items(str(item) for item in value)] if value else []
        elif value not in (None, "") and key != "title":
            label = key.replace("_", " ")
            if key in QUANTITIES:
                label, unit, scale = QUANTITIES[key]
                written = f"{units.format_number(float(str(value)) / scale)} {unit}"
            elif isinstance(value, bool):
                written = "yes" if value else "no"
            elif isinstance(value, int):
                written = f"{value:,}"
            else:
                written = units.format_number(value) if isinstance(value, float) else value
            blocks.append(Hanging(f"{label}: {written}"))
    return blocks
