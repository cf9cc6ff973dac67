"""The trace formats: the columns that hold arrivals and lengths in each.

The reader follows a format's row of ``TRACE_FORMATS`` and nothing else.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from kvsim.errors import InputError, unknown
from kvsim.frozen import frozen
from kvsim.traces.requests import CONDUCT_DEFAULTS

SECONDS_PER_UNIT = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "date": 1.0}  # seconds per unit

Record = dict[str, object]


@frozen
class TraceFormat:
    """A trace format: names and units of the columns.

    Attributes
    ----------
    name
        Name of the format, as ``--format`` takes it.
    arrival, unit
        Column of arrival times, and their unit, a key of ``SECONDS_PER_UNIT``. If the column is
        empty, all requests arrive at 0 s.
    prompt, generate
        Columns of prompt and generated tokens.
    arrivals
        Other columns of arrival times that a file may have instead, with their units.
    blocks
        Column of the ids of the prompt's prefix blocks; empty if there is none.
    block_tokens
        Prompt tokens per prefix block. [tokens]
    marks
        Other columns by which the format is recognised.
    arrives
        Whether a file must have arrival times.
    failed
        Meaning of a generated length of 0, such as "the request failed": such rows are counted and
        left out. If empty, they are errors.
    unpack
        Function that turns a JSON record into several rows; None if each record is one row.
    conduct
        Pairs of role and column for turns, priority classes and aborts.
    chars_per_token
        Characters per token, for files that hold text instead of token counts.
    """

    name: str
    arrival: str
    unit: str
    prompt: str
    generate: str
    arrivals: tuple[tuple[str, str], ...] = ()
    blocks: str = ""
    block_tokens: int = 0
    marks: tuple[str, ...] = ()
    arrives: bool = True
    failed: str = ""
    unpack: Callable[[Record], Iterator[Record]] | None = None
    conduct: tuple[tuple[str, str], ...] = ()
    chars_per_token: float = 0.0

    def columns(self) -> list[str]:
        """Return the names of the columns to read."""
        named = (self.arrival, self.prompt, self.generate, self.blocks)
        return [name for name in (*named, *dict(self.conduct).values()) if name]


ARRAYS = ("start_times", "input_lens", "output_lens")


def unpack_vllm(run: Record) -> Iterator[Record]:
    """Yield the requests of a run of vLLM's benchmark as one record each.

    Parameters
    ----------
    run
        The parsed result, with one array per column.

    Yields
    ------
    dict
        The columns of one request.

    Raises
    ------
    InputError
        If a column is not a list, or lists differ in length.
    """
    arrays: dict[str, list[object]] = {}
    for name, values in ((name, run[name]) for name in ARRAYS if name in run):
        if not isinstance(values, list):
            raise InputError(f"{name}: not a list; expected one number per request")
        arrays[name] = values
    if len(set(map(len, arrays.values()))) > 1:
        lengths = ", ".join(f"{name} {len(values)}" for name, values in arrays.items())
        raise InputError(f"lists of unequal length: {lengths}; expected one entry per request")
    for values in zip(*arrays.values(), strict=True):
        yield dict(zip(arrays, values, strict=True))


def unpack_sharegpt(conversation: Record) -> Iterator[Record]:
    """Yield the characters of the first two turns of a ShareGPT conversation, as one record.

    Parameters
    ----------
    conversation
        The conversation with its turns.

    Yields
    ------
    dict
        Lengths of question and answer. [characters]

    Raises
    ------
    InputError
        If there are fewer than two turns.
    """
    turns = conversation.get("conversations", conversation.get("conversation"))
    if not isinstance(turns, list):
        raise InputError("conversations: expected a list of turns")
    if len(turns) < 2:
        raise InputError("conversations: fewer than two turns; expected a question and an answer")
    texts = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
    if not all(isinstance(text, str) for text in texts):
        raise InputError('conversations: a turn without text; expected {"from": .., "value": ..}')
    yield {"prompt": len(texts[0] or ""), "generate": len(texts[1] or "")}


_FORMATS = (
    # What `kvsim traces convert` and `generate` write; Parquet states the block size besides.
    # docs/traces.md
    TraceFormat(
        "kvsim",
        "arrival_s",
        "s",
        "prompt_tokens",
        "generate_tokens",
        blocks="block_ids",
        conduct=(
            ("parent", "parent_row"),
            ("think", "think_s"),
            ("priority", "priority"),
            ("abort_after", "abort_after_s"),
        ),
    ),
    # Azure LLM inference traces, 2023 and 2024; dates with and without a zone.
    # https://github.com/Azure/AzurePublicDataset
    TraceFormat("azure", "TIMESTAMP", "date", "ContextTokens", "GeneratedTokens"),
    # BurstGPT; a response of 0 tokens is a request that failed.
    # https://github.com/HPMLL/BurstGPT, arXiv:2401.17644
    TraceFormat(
        "burstgpt",
        "Timestamp",
        "s",
        "Request tokens",
        "Response tokens",
        failed="the request failed (0 response tokens)",
    ),
    # Mooncake traces: milliseconds and prefix blocks of 512 tokens.
    # https://github.com/kvcache-ai/Mooncake, FAST'25
    TraceFormat(
        "mooncake",
        "timestamp",
        "ms",
        "input_length",
        "output_length",
        blocks="hash_ids",
        block_tokens=512,
    ),
    # Alibaba's Qwen-Bailian traces: seconds and prefix blocks of 16 tokens.
    # https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon
    TraceFormat(
        "bailian",
        "timestamp",
        "s",
        "input_length",
        "output_length",
        blocks="hash_ids",
        block_tokens=16,
        marks=("chat_id", "parent_chat_id"),
        conduct=(("id", "chat_id"), ("parent", "parent_chat_id")),
    ),
    # Results of `vllm bench serve --save-detailed` and SGLang's twin: one object of arrays per run.
    # https://docs.vllm.ai, vllm bench serve --save-result --save-detailed
    TraceFormat(
        "vllm",
        "start_times",
        "s",
        "input_lens",
        "output_lens",
        arrives=False,
        failed="the request failed (0 output tokens)",
        unpack=unpack_vllm,
    ),
    # ShareGPT conversations: text, so tokens are characters divided by `--chars-per-token`.
    # As in vLLM's benchmark, a request is a conversation's first turn and its answer.
    # https://github.com/vllm-project/vllm/tree/main/benchmarks
    TraceFormat(
        "sharegpt",
        "",
        "s",
        "prompt",
        "generate",
        marks=("conversations",),
        arrives=False,
        unpack=unpack_sharegpt,
    ),
    # LLMServingSim workloads and the logs of its vLLM runs.
    # https://github.com/casys-kaist/LLMServingSim
    TraceFormat(
        "llmservingsim",
        "arrival_time_ns",
        "ns",
        "input_toks",
        "output_toks",
        arrivals=(("arrival_time_s", "s"), ("arrival_time", "s")),
    ),
    # Vidur's processed traces; files of lengths alone exist.
    # https://github.com/microsoft/vidur
    TraceFormat(
        "vidur", "arrived_at", "s", "num_prefill_tokens", "num_decode_tokens", arrives=False
    ),
)
TRACE_FORMATS = {x.name: x for x in _FORMATS}
GENERIC = "columns"  # the format that the user describes by naming columns
COLUMN_ROLES = ("arrival", "prompt", "generate", "blocks", *CONDUCT_DEFAULTS)


def choose(file: str, columns: Collection[str], wanted: str = "") -> TraceFormat:
    """Choose the format of a file by the names of its columns.

    Parameters
    ----------
    file
        Name of the file, for messages.
    columns
        Names of the file's columns.
    wanted
        Name of the format that the user asks for; empty to recognise it.

    Returns
    -------
    TraceFormat
        The format, reduced to those of its columns that the file has.

    Raises
    ------
    InputError
        If no format fits, or the requested one lacks a column.
    """
    if wanted:
        if wanted not in TRACE_FORMATS:
            raise unknown("trace format", wanted, TRACE_FORMATS)
        return _in_file(file, columns, TRACE_FORMATS[wanted])
    fitting = [x for x in TRACE_FORMATS.values() if _fits(columns, x)]
    if not fitting:
        found = ", ".join(map(repr, list(columns)[:8])) or "none"
        raise InputError(
            f"{file}, line 1: columns {found} are of no known trace format; name them with "
            "--columns arrival=..,prompt=..,generate=.. or the format with --format "
            f"({', '.join(TRACE_FORMATS)})"
        )
    return _in_file(file, columns, max(fitting, key=lambda x: len(x.marks)))


def named(file: str, columns: Collection[str], names: dict[str, str], unit: str) -> TraceFormat:
    """Build a trace format from column names that the user gives.

    Parameters
    ----------
    file
        Name of the file, for error messages.
    columns
        Names of the file's columns.
    names
        Column of each role, such as ``arrival`` or ``prompt``.
    unit
        Unit of arrival times: s, ms, us, ns or date.

    Returns
    -------
    TraceFormat
        The format.

    Raises
    ------
    InputError
        If a role is unknown, or a required role or a column is missing.
    """
    for role in names:
        if role not in COLUMN_ROLES:
            raise unknown("column role", role, COLUMN_ROLES)
    for role in ("prompt", "generate"):
        if role not in names:
            raise InputError(f"--columns: no {role}; expected arrival=..,prompt=..,generate=..")
    for role, name in names.items():
        if name not in columns:
            raise _missing(file, name, role, columns)
    if unit not in SECONDS_PER_UNIT:
        raise unknown("time unit", unit, SECONDS_PER_UNIT)
    return TraceFormat(
        GENERIC,
        names.get("arrival", ""),
        unit,
        names["prompt"],
        names["generate"],
        blocks=names.get("blocks", ""),
        conduct=tuple((role, name) for role, name in names.items() if role in CONDUCT_DEFAULTS),
    )


def _fits(columns: Collection[str], format: TraceFormat) -> bool:
    if not all(mark in columns for mark in format.marks):
        return False
    if format.marks and format.unpack:
        return True
    arrives = not format.arrives or any(name in columns for name, _ in _arrivals(format))
    return arrives and format.prompt in columns and format.generate in columns


def _arrivals(format: TraceFormat) -> list[tuple[str, str]]:
    return [(format.arrival, format.unit), *format.arrivals]


def _in_file(file: str, columns: Collection[str], format: TraceFormat) -> TraceFormat:
    """A format with those of its columns that a file has."""
    if format.marks and format.unpack:  # rows are made of records; names are the format's own
        return format
    there = [(name, unit) for name, unit in _arrivals(format) if name in columns]
    if not there and format.arrives:
        raise _missing(file, format.arrival, "arrival", columns)
    for role, name in (("prompt", format.prompt), ("generate", format.generate)):
        if name not in columns:
            raise _missing(file, name, role, columns)
    arrival, unit = there[0] if there else ("", "s")
    blocks = format.blocks if format.blocks in columns else ""
    return replace(
        format,
        arrival=arrival,
        unit=unit,
        blocks=blocks,
        block_tokens=format.block_tokens if blocks else 0,
        conduct=tuple((role, name) for role, name in format.conduct if name in columns),
    )


def _missing(file: str, name: str, role: str, columns: Collection[str]) -> InputError:
    hint = unknown(f"column for {role},", name, columns)
    return InputError(f"{file}, line 1: {hint}; or name yours with --columns {role}=..")
