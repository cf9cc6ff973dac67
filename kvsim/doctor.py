"""Finding every fault of a file at once: profiles, stacks, models, traces, measurements.

The commands stop at the first fault of a file, because they need a sound one; `kvsim doctor` goes
on, so that a file is mended in one sitting. Nothing is checked here that is not checked where the
file is used: those checks are called until they have nothing more to say.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from kvsim.errors import InputError
from kvsim.evidence import published
from kvsim.evidence.published import PAPER_COLUMNS
from kvsim.files import JSON, TRACE, check_input, open_input, read_json
from kvsim.frozen import frozen
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.machines.schema import HARDWARE_FILE, STACK_FILE, Schema, inspect, keys_of
from kvsim.models.configs import read_config, read_model
from kvsim.models.fields import FieldError
from kvsim.traces import attention
from kvsim.traces.read import Reader, ReadOptions

HEADER_BYTES = 65536  # bytes that tell a table's columns
PUBLISHED_COLUMNS = {"technique", "metric", "published"}  # columns that no request trace has


@frozen
class Diagnosis:
    """Result of checking a file.

    Attributes
    ----------
    kind
        Kind of the file, such as ``request trace``.
    faults
        One line per fault, in the order of the file where there is one; empty if it is valid.
    notes
        Remarks on the valid content, one line each.
    """

    kind: str
    faults: tuple[str, ...]
    notes: tuple[str, ...] = ()


def examine(path: str) -> Diagnosis:
    """Find every fault of a file that kvsim reads.

    Parameters
    ----------
    path
        File to check.

    Returns
    -------
    Diagnosis
        Kind of the file, its faults and notes.

    Raises
    ------
    InputError
        If the file cannot be read at all, or is of no kind that kvsim reads.
    """
    file = check_input(path, TRACE)
    kind, check = _kind(file)
    try:
        faults, notes = check(file)
    except InputError as fault:  # at which the reader stops
        faults, notes = [str(fault)], []
    return Diagnosis(kind, tuple(faults), tuple(notes))


Check = Callable[[Path], tuple[list[str], list[str]]]


def _kind(file: Path) -> tuple[str, Check]:
    if file.suffix == ".toml":
        return _toml(file)
    if file.suffix == ".json":
        return _json(file)
    if file.suffix == ".csv" and PUBLISHED_COLUMNS & _header(file):
        return "measured rows", measured_faults
    return "request trace", trace_faults


def _toml(file: Path) -> tuple[str, Check]:
    """Examine a TOML file as a stack or a hardware profile, whichever shares more keys."""
    try:
        keys = set(keys_of(file))
    except InputError as fault:
        unreadable = str(fault)
        return "TOML file", lambda _: ([unreadable], [])
    if len(keys & STACK_FILE.keys) + ("extends" in keys) >= len(keys & HARDWARE_FILE.keys):
        return "software stack", partial(profile_faults, schema=STACK_FILE, load=load_stack)
    return "hardware profile", partial(profile_faults, schema=HARDWARE_FILE, load=load_hardware)


def _json(file: Path) -> tuple[str, Check]:
    if file.stat().st_size > JSON.most:
        return "request trace", trace_faults
    try:
        found = read_json(file, JSON, strict=False)
    except InputError:
        return "model configuration", configuration_faults  # which says what is wrong with it
    if isinstance(found, dict) and found.get("format") == attention.TRACE_FORMAT:
        return "attention trace", attention_faults
    if isinstance(found, dict) and {"model_type", "hidden_size", "text_config"} & found.keys():
        return "model configuration", configuration_faults
    return "request trace", trace_faults


def _header(file: Path) -> set[str]:
    with open_input(file, TRACE) as table:
        first = table.read(HEADER_BYTES).decode("utf-8-sig", "replace").partition("\n")[0]
    return {name.strip().strip('"') for name in first.split(",")} & set(PAPER_COLUMNS)


# A sound value for each field that may be wrong, so that the fields read after it are checked too.
SOUND = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "model_type": "llama",
    "num_local_experts": 8,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 1024,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
MAX_REPAIRS = 100  # fields of one file that are mended in turn


def configuration_faults(file: Path) -> tuple[list[str], list[str]]:
    """Find every wrong field of a model configuration.

    Each wrong field is replaced by a valid value in memory, and the configuration is read again.

    Parameters
    ----------
    file
        A model's ``config.json``.

    Returns
    -------
    tuple of two lists of str
        Faults, and remarks on the valid configuration; one line each.
    """
    found: list[str] = []
    mended: set[str] = set()
    config, name, where = read_config(str(file))
    for _ in range(MAX_REPAIRS):
        try:
            model = read_model(config, name, where)
        except FieldError as fault:
            found.append(str(fault))
            if fault.field in mended:
                break
            mended.add(fault.field)
            config = _mended(dict(config), fault)
        except InputError as fault:
            found.append(str(fault))
            break
        else:
            return found, list(model.notes) if not found else []
    return found, []


def _mended(config: dict[str, object], fault: FieldError) -> dict[str, object]:
    """The configuration with one field replaced by a valid value, or removed."""
    inner = config.get("text_config")
    if fault.prefix and isinstance(inner, dict):
        return config | {"text_config": _mended(inner, FieldError("", fault.field))}
    left = {key: value for key, value in config.items() if key != fault.field}
    return left | ({fault.field: SOUND[fault.field]} if fault.field in SOUND else {})


def measured_faults(file: Path) -> tuple[list[str], list[str]]:
    """Find invalid and duplicate rows of a table of measured runs.

    Parameters
    ----------
    file
        The table.

    Returns
    -------
    tuple of two lists of str
        Faults, and the number of valid rows; one line each.
    """
    found: list[str] = []
    rows = published.read(str(file), found.append)
    return found, [f"{len(rows):,} sound rows"]


def profile_faults(
    file: Path, schema: Schema, load: Callable[[Path], object]
) -> tuple[list[str], list[str]]:
    """Find the faults of a profile's entries or, if there are none, those of combinations.

    Parameters
    ----------
    file
        Hardware profile or software stack.
    schema
        Keys that it may have.
    load
        Function that reads such a file as the commands do.

    Returns
    -------
    tuple of two lists of str
        Faults, and numbers that are assumed rather than measured; one line each.
    """
    _, faults = inspect(file, schema)
    notes: list[str] = []
    if not faults:
        try:
            sources = getattr(load(file), "sources", {})
            assumed = sorted(key for key, text in sources.items() if "assumed" in text.lower())
            notes = [f"assumed, not measured: {', '.join(assumed)}"] if assumed else []
        except InputError as fault:
            faults.append(fault)
    return [str(fault) for fault in faults], notes


def trace_faults(file: Path) -> tuple[list[str], list[str]]:
    """Find the rows of a trace that break a rule, and faults of the whole file.

    Parameters
    ----------
    file
        Request trace.

    Returns
    -------
    tuple of two lists of str
        Faults, one line per broken rule with its first row; and remarks on the valid rows.
    """
    options, found = ReadOptions(skip_bad=True), []
    while True:
        reader = Reader(str(file), options)
        try:
            count = sum(len(part.prompt) for part in reader.parts())
        except InputError as fault:
            found.append(str(fault))
            if options.sort or "--sort" not in str(fault):
                return [*_row_faults(reader), *found], []
            options = replace(options, sort=True)  # the order is one fault; look for others
            continue
        return [*_row_faults(reader), *found], [
            f"{count:,} sound requests",
            *[note for note in reader.notes() if not note.startswith("omitted ")],
        ]


def _row_faults(reader: Reader) -> list[str]:
    left = reader.left_out  # requests that failed where they were measured are no fault
    return [
        left.first[rule] + (f" ({count:,} such rows)" if count > 1 else "")
        for rule, count in left.counts.items()
        if rule != "failed"
    ]


def attention_faults(file: Path) -> tuple[list[str], list[str]]:
    """Check an attention trace, whose reader stops at the first fault.

    Parameters
    ----------
    file
        Attention trace.

    Returns
    -------
    tuple of two lists of str
        No faults and no notes.

    Raises
    ------
    InputError
        At the first fault.
    """
    attention.load(file)
    return [], []
