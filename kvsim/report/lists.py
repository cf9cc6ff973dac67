"""The lists of what is known, `kvsim models|gpus|techniques|stacks`, and one entry in full."""

from collections.abc import Sequence
from dataclasses import fields

from kvsim.errors import unknown
from kvsim.machines.hardware import GIB, Hardware
from kvsim.machines.profiles import hardware_names, load_hardware, load_stack, stack_names
from kvsim.models.configs import catalogue_entry, load_model, model_names
from kvsim.report import units
from kvsim.report.answer import Answer
from kvsim.report.evidence import describe_accuracy
from kvsim.report.json import Row
from kvsim.report.names import params, spec
from kvsim.report.result import Result
from kvsim.report.table import Column, Table, cells_table, text_column
from kvsim.report.terminal import BLANK, Block, Hanging, Heading, Items
from kvsim.techniques import TECHNIQUES, parse


def models() -> list[Row]:
    """One row for each model of the catalogue."""
    rows = []
    for name in model_names():
        m, entry = load_model(name), catalogue_entry(name)
        rows.append(
            {
                "name": name,
                "hf_id": entry["hf_id"],
                "family": m.family,
                "parameters": m.parameters,
                "active_parameters": m.active_parameters,
                "layers": m.layers,
                "hidden": m.hidden,
                "heads": m.heads,
                "kv_heads": m.cached_heads,
                "max_context": m.max_context,
                "cached_layers": m.cached_layers,
                "kv_bytes_per_token": m.kv_bytes_per_token,
                "state_bytes_per_sequence": m.state_bytes,
                "source": entry["source"],
            }
        )
    return rows


def gpus() -> list[Row]:
    """One row for each hardware profile that is shipped."""
    return [gpu(load_hardware(name)) for name in hardware_names()]


def gpu(hardware: Hardware) -> Row:
    """Make the row of one hardware profile.

    Parameters
    ----------
    hardware
        Hardware profile.

    Returns
    -------
    Row
        Memory, rates and price under their contract names.
    """
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


def techniques() -> list[Row]:
    """The techniques with their parameters."""
    rows = []
    for name, kind in TECHNIQUES.items():
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
                        "default": params(default)[f.name],
                        "meaning": f.metadata["text"],
                    }
                    for f in fields(kind)
                ],
                "source": " ".join(references.split()),
            }
        )
    return rows


def stacks() -> list[Row]:
    """One row for each software stack that is shipped."""
    rows = []
    for name in stack_names():
        s = load_stack(name)
        rows.append({"name": name, "title": s.title, "basis": s.basis, "error": s.error})
    return rows


def settings(row: Row) -> str:
    """Write a listed technique with its default settings.

    Parameters
    ----------
    row
        Row of the list of techniques.

    Returns
    -------
    str
        Name and settings.
    """
    defaults = {parameter["name"]: parameter["default"] for parameter in row["parameters"]}
    return spec({"technique": row["name"], "params": defaults})


def _number(heading: str, key: str, unit: float = 1.0, rank: int = 0) -> Column:
    def value(row: Row) -> float | None:
        return None if row[key] is None else row[key] / unit

    return Column(heading, lambda row: units.format_number(value(row)), value, rank=rank)


MODEL_COLUMNS = (
    text_column("model", "name"),
    _number("10^9 params", "parameters", 1e9),
    _number("active", "active_parameters", 1e9, 3),
    _number("layers", "layers", rank=2),
    _number("hidden", "hidden", rank=6),
    _number("heads", "heads", rank=5),
    _number("KV heads", "kv_heads", rank=4),
    Column("context", lambda row: units.integer(row["max_context"]), rank=1),
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
    text_column("what it is", "summary"),
)
STACKS = (
    text_column("stack", "name"),
    text_column("what it is", "title"),
    text_column("basis", "basis", 1),
    text_column("known error", lambda row: row["error"] or "not measured yet", 2),
)
LISTS = {
    "models": (models, MODEL_COLUMNS, "Models"),
    "gpus": (gpus, GPU_COLUMNS, "GPUs (one in full with its sources: kvsim gpus NAME)"),
    "techniques": (techniques, TECHNIQUE, "Techniques (one in full: kvsim techniques NAME)"),
    "stacks": (stacks, STACKS, "Software stacks (one in full: kvsim stacks NAME)"),
}


def find(kind: str, name: str) -> Row | list[Row]:
    """Find the entries of a list, or the one of a name.

    Parameters
    ----------
    kind
        ``models``, ``gpus``, ``techniques`` or ``stacks``.
    name
        Name of an entry; empty for all.

    Returns
    -------
    Row or list of Row
        One entry, or all of them.

    Raises
    ------
    InputError
        If there is no entry of that name.
    """
    rows = LISTS[kind][0]()
    return _entry(kind, name, rows) if name else rows


def make_result(kind: str, name: str, command: str = "") -> Result[Row | list[Row]]:
    """Make a list of what is known, or one entry of it in full.

    Parameters
    ----------
    kind
        ``models``, ``gpus``, ``techniques`` or ``stacks``.
    name
        Name of an entry; empty for all.
    command
        Command line that gives the same.

    Returns
    -------
    Result
        Answer for the terminal, pages, JSON and Python.

    Raises
    ------
    InputError
        If there is no entry of that name.
    """
    found = find(kind, name)
    if isinstance(found, dict):
        own = {key: value for key, value in found.items() if key != "notes"}
        blocks, notes = _list_blocks(kind, found, name), found.get("notes", ())
        title = str(found.get("title") or found["name"])
        return Result(command, title, Answer(""), own, found, [found], blocks=blocks, notes=notes)
    _, columns, title = LISTS[kind]
    below = settings if kind == "techniques" else lambda row: ""
    table = Table(columns, found, title, below)
    fields = {"rows": found}
    return Result(command, title, Answer(""), fields, found, found, [table], [table])


def _entry(kind: str, name: str, rows: Sequence[Row]) -> Row:
    wanted = load_hardware(name).name if kind == "gpus" else name.lower().partition(":")[0]
    for row in rows:
        if row["name"] == wanted:
            return row
    if kind == "gpus":
        return gpu(load_hardware(name))  # a profile of the user's own
    raise unknown(kind.removesuffix("s"), name, [r["name"] for r in rows], f"see `kvsim {kind}`")


def _list_blocks(kind: str, row: Row, name: str) -> list[Block]:
    """All that is known of an entry."""
    blocks: list[Block] = [Heading(str(row.get("title") or row["name"]))]
    if kind == "gpus":
        blocks += [describe_accuracy(load_hardware(name)), BLANK]
    for key, value in row.items():
        if key == "parameters" and isinstance(value, list):
            columns = (
                text_column("setting", "name"),
                text_column("default", "default"),
                text_column("meaning", "meaning"),
            )
            blocks += [Table(columns, value)] if value else []
        elif isinstance(value, dict):
            cells = [(key, str(text)) for key, text in value.items()]
            blocks.append(cells_table(("number", "source"), cells, 2))
        elif isinstance(value, list):
            blocks += [Items(str(item) for item in value)] if value else []
        elif value not in (None, "") and key not in ("title",):
            blocks.append(Hanging(f"{key.replace('_', ' ')}: {_format_setting(value)}"))
    return blocks


def _format_setting(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return units.format_number(value) if isinstance(value, float) else str(value)
