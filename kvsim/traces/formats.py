"""The trace formats: the columns that hold arrivals and lengths in each.

The reader follows a format's row of ``FORMATS`` and nothing else.
"""

from collections.abc import Callable, Collection, Iterator

from kvsim.errors import InputError, unknown
from kvsim.frozen import frozen
from kvsim.traces.requests import CONDUCT_DEFAULTS

SECONDS_PER_UNIT = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "date": 1.0}  # seconds per unit

Record = dict[str, object]


@frozen
class TraceFormat:
    """One public trace format; the reader follows it and nothing else.

    A column has one or more names; the first that the file has is taken.

    Attributes
    ----------
    title
        What the format is.
    source
        Where it is published.
    arrival
        Name and unit (`SECONDS_PER_UNIT`) of the column with arrivals. Dates count as `date`.
    prompt, generate
        Names of the columns with prompt and generated tokens.
    blocks
        Name of the column with the prompt's prefix hash blocks; empty if there is none.
    block_tokens
        Prompt tokens per block. [tokens]
    marks
        Further columns that tell this format from others.
    arrives
        False if files without arrivals exist; their requests all arrive at 0 s.
    failed
        What a generated length of 0 means here; such rows are no requests and are left out,
        counted. Empty: such a row is an error.
    unpack
        Turns a JSON record into rows; the record itself if not given.
    conduct
        Roles and names of columns on turns, classes and aborts, where a file has them.
    """

    title: str
    source: str
    arrival: tuple[tuple[str, str], ...]
    prompt: tuple[str, ...]
    generate: tuple[str, ...]
    blocks: str = ""
    block_tokens: int = 0
    marks: tuple[str, ...] = ()
    arrives: bool = True
    failed: str = ""
    unpack: Callable[[Record], Iterator[Record]] | None = None
    conduct: tuple[tuple[str, str], ...] = ()


@frozen
class Layout:
    """A format's columns as one file has them; `arrival` is empty if it has none."""

    format: str
    arrival: str
    unit: str
    prompt: str
    generate: str
    blocks: str = ""
    block_tokens: int = 0
    failed: str = ""
    unpack: Callable[[Record], Iterator[Record]] | None = None
    chars_per_token: float = 0.0
    conduct: tuple[tuple[str, str], ...] = ()  # roles and columns of turns, classes and aborts

    def columns(self) -> list[str]:
        """Names of the columns to read."""
        named = (self.arrival, self.prompt, self.generate, self.blocks)
        return [name for name in (*named, *dict(self.conduct).values()) if name]


ARRAYS = ("start_times", "input_lens", "output_lens")


def unpack_vllm(run: Record) -> Iterator[Record]:
    """Iterate over the requests of a run of vLLM's benchmark, one row each.

    Parameters
    ----------
    run
        The run, with one array per column.
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
    """Return the characters of the first two turns of a conversation.

    Parameters
    ----------
    conversation
        The conversation, with its turns.
    """
    turns = conversation.get("conversations", conversation.get("conversation"))
    if not isinstance(turns, list):
        raise InputError("conversations: not a list; expected turns")
    if len(turns) < 2:
        raise InputError("conversations: fewer than two turns; expected a question and an answer")
    texts = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
    if not all(isinstance(text, str) for text in texts):
        raise InputError('conversations: a turn without text; expected {"from": .., "value": ..}')
    yield {"prompt": len(texts[0] or ""), "generate": len(texts[1] or "")}


FORMATS: dict[str, TraceFormat] = {
    # What `kvsim traces convert` and `generate` write; Parquet states the block size besides.
    "kvsim": TraceFormat(
        title="kvsim Parquet or CSV",
        source="docs/traces.md",
        arrival=(("arrival_s", "s"),),
        prompt=("prompt_tokens",),
        generate=("generate_tokens",),
        blocks="block_ids",
        conduct=(
            ("parent", "parent_row"),
            ("think", "think_s"),
            ("priority", "priority"),
            ("abort_after", "abort_after_s"),
        ),
    ),
    # Azure LLM inference traces, 2023 and 2024; dates with and without a zone.
    "azure": TraceFormat(
        title="Azure LLM inference CSV (2023, 2024)",
        source="https://github.com/Azure/AzurePublicDataset",
        arrival=(("TIMESTAMP", "date"),),
        prompt=("ContextTokens",),
        generate=("GeneratedTokens",),
    ),
    # BurstGPT; a response of 0 tokens is a request that failed.
    "burstgpt": TraceFormat(
        title="BurstGPT CSV",
        source="https://github.com/HPMLL/BurstGPT, arXiv:2401.17644",
        arrival=(("Timestamp", "s"),),
        prompt=("Request tokens",),
        generate=("Response tokens",),
        failed="the request failed (0 response tokens)",
    ),
    # Mooncake traces: milliseconds and prefix blocks of 512 tokens.
    "mooncake": TraceFormat(
        title="Mooncake JSONL with prefix blocks",
        source="https://github.com/kvcache-ai/Mooncake, FAST'25",
        arrival=(("timestamp", "ms"),),
        prompt=("input_length",),
        generate=("output_length",),
        blocks="hash_ids",
        block_tokens=512,
    ),
    # Alibaba's Qwen-Bailian traces: seconds and prefix blocks of 16 tokens.
    "bailian": TraceFormat(
        title="Alibaba Qwen-Bailian JSONL with prefix blocks",
        source="https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon",
        arrival=(("timestamp", "s"),),
        prompt=("input_length",),
        generate=("output_length",),
        blocks="hash_ids",
        block_tokens=16,
        marks=("chat_id", "parent_chat_id"),
        conduct=(("id", "chat_id"), ("parent", "parent_chat_id")),
    ),
    # Results of `vllm bench serve --save-detailed` and SGLang's twin: one object of arrays per run.
    "vllm": TraceFormat(
        title="vLLM or SGLang benchmark result, JSON or JSONL",
        source="https://docs.vllm.ai, vllm bench serve --save-result --save-detailed",
        arrival=(("start_times", "s"),),
        prompt=("input_lens",),
        generate=("output_lens",),
        arrives=False,
        failed="the request failed (0 output tokens)",
        unpack=unpack_vllm,
    ),
    # ShareGPT conversations: text, so tokens are characters divided by `--chars-per-token`.
    # As in vLLM's benchmark, a request is a conversation's first turn and its answer.
    "sharegpt": TraceFormat(
        title="ShareGPT conversations, JSON or JSONL",
        source="https://github.com/vllm-project/vllm/tree/main/benchmarks",
        arrival=(),
        prompt=("prompt",),
        generate=("generate",),
        marks=("conversations",),
        arrives=False,
        unpack=unpack_sharegpt,
    ),
    # LLMServingSim workloads and the logs of its vLLM runs.
    "llmservingsim": TraceFormat(
        title="LLMServingSim JSONL, workload or measured run",
        source="https://github.com/casys-kaist/LLMServingSim",
        arrival=(("arrival_time_ns", "ns"), ("arrival_time_s", "s"), ("arrival_time", "s")),
        prompt=("input_toks",),
        generate=("output_toks",),
    ),
    # Vidur's processed traces; files of lengths alone exist.
    "vidur": TraceFormat(
        title="Vidur CSV",
        source="https://github.com/microsoft/vidur",
        arrival=(("arrived_at", "s"),),
        prompt=("num_prefill_tokens",),
        generate=("num_decode_tokens",),
        arrives=False,
    ),
}
GENERIC = "columns"  # the format that the user describes by naming columns
COLUMN_ROLES = ("arrival", "prompt", "generate", "blocks", *CONDUCT_DEFAULTS)


def choose(file: str, columns: Collection[str], wanted: str = "") -> Layout:
    """Choose the layout of a file by its columns.

    Parameters
    ----------
    file
        Name of the file, for messages.
    columns
        Names of its columns.
    wanted
        Format asked for; empty for the one that fits.

    Raises
    ------
    InputError
        If no format fits, or the wanted one lacks a column.
    """
    if wanted:
        if wanted not in FORMATS:
            raise unknown("trace format", wanted, FORMATS)
        return _layout(file, columns, wanted)
    fitting = [name for name, format in FORMATS.items() if _fits(columns, format)]
    if not fitting:
        found = ", ".join(map(repr, list(columns)[:8])) or "none"
        raise InputError(
            f"{file}, line 1: columns {found} are of no known trace format; name them with "
            "--columns arrival=..,prompt=..,generate=.. or the format with --format "
            f"({', '.join(FORMATS)})"
        )
    return _layout(file, columns, max(fitting, key=lambda name: len(FORMATS[name].marks)))


def named(file: str, columns: Collection[str], names: dict[str, str], unit: str) -> Layout:
    """Build the layout that the user describes.

    Parameters
    ----------
    file
        Name of the file, for messages.
    columns
        Names of its columns.
    names
        Column of each role.
    unit
        Unit of time.
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
    conduct = tuple((role, name) for role, name in names.items() if role in CONDUCT_DEFAULTS)
    arrival, blocks = names.get("arrival", ""), names.get("blocks", "")
    lengths = names["prompt"], names["generate"]
    return Layout(GENERIC, arrival, unit, *lengths, blocks, conduct=conduct)


def _fits(columns: Collection[str], format: TraceFormat) -> bool:
    if not all(mark in columns for mark in format.marks):
        return False
    if format.marks and format.unpack:
        return True
    arrives = any(name in columns for name, _ in format.arrival) or not format.arrives
    lengths = (format.prompt, format.generate)
    return arrives and all(any(name in columns for name in names) for names in lengths)


def _layout(file: str, columns: Collection[str], name: str) -> Layout:
    format = FORMATS[name]
    if format.marks and format.unpack:  # rows are made of records; names are the format's own
        return Layout(name, "", "s", format.prompt[0], format.generate[0], unpack=format.unpack)
    arrivals = [(column, unit) for column, unit in format.arrival if column in columns]
    if not arrivals and format.arrives:
        raise _missing(file, format.arrival[0][0], "arrival", columns)
    arrival, unit = arrivals[0] if arrivals else ("", "s")
    chosen = {"arrival": arrival}
    for role, names in (("prompt", format.prompt), ("generate", format.generate)):
        chosen[role] = next((one for one in names if one in columns), "")
        if not chosen[role]:
            raise _missing(file, names[0], role, columns)
    blocks = format.blocks if format.blocks in columns else ""
    conduct = tuple((role, name) for role, name in format.conduct if name in columns)
    columns_of = (chosen["arrival"], unit, chosen["prompt"], chosen["generate"], blocks)
    tokens = format.block_tokens if blocks else 0
    return Layout(name, *columns_of, tokens, format.failed, format.unpack, conduct=conduct)


def _missing(file: str, name: str, role: str, columns: Collection[str]) -> InputError:
    hint = unknown(f"column for {role},", name, columns)
    return InputError(f"{file}, line 1: {hint}; or name yours with --columns {role}=..")
