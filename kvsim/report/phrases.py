"""Clauses for sentences: times, memory, comparisons and bottlenecks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from shlex import join, quote, split
from typing import TYPE_CHECKING

from kvsim.emit.flags import MANUALS
from kvsim.machines.deployment import Deployment
from kvsim.prediction.explain import LAUNCHES, LIMITS, SERVER, SMALL_PRODUCTS
from kvsim.prediction.generate import Prediction
from kvsim.quality.evidence import Evidence
from kvsim.report import units
from kvsim.report.json import Row, pick
from kvsim.report.names import params
from kvsim.report.suitability import join_titles
from kvsim.report.terminal import BLANK, Block, Command, Verbatim
from kvsim.report.units import QUANTITIES, comparison_key
from kvsim.techniques.technique import Technique

if TYPE_CHECKING:
    from kvsim.emit.served import Served
    from kvsim.prediction.pool import KvPool


EQUAL_SPEED = 0.02  # relative difference below which two techniques are called equal

REASONS = {
    "GPU memory bandwidth": "every {step} reads weights and cache",
    "host memory bandwidth": "every {step} reads cache or weights there",
    "host-to-GPU link": "every {step} waits for cache or weights from the host",
    "GPU-to-host link": "writing the cache to the host takes longest",
    "GPU-to-GPU link": "the GPUs wait for all-reduces",
    "reads from the disk": "every {step} waits for cache or weights from there",
    "writes to the disk": "writing the cache there takes longest",
    "arithmetic": "the GPU computes all the time; a larger batch adds no throughput",
    "host arithmetic": "the CPU computes attention",
    SMALL_PRODUCTS: "which leave most of each tile empty; a larger batch adds throughput",
    "arithmetic that unpacks the cache": "the GPU spends its time unpacking the cache",
    "kernel launches": "the host issues kernels more slowly than the GPU runs them",
    SERVER: "tokenizing prompts and streaming text take the host longer than the GPU needs",
    LAUNCHES: "the kernels are too short to fill the GPU",
}
"""What binds a round, and why that is."""

assert set(LIMITS.values()) <= set(REASONS)


def summarize_times(prediction: Prediction) -> str:
    """Write TPOT and TTFT without intervals.

    Parameters
    ----------
    prediction
        The prediction, of which the first batch is used.

    Returns
    -------
    str
        For example ``TPOT 20.1 ms, TTFT 310 ms``.
    """
    ttft = f"TTFT {units.seconds(float(prediction.ttft_s[0]))}"
    if prediction.generate == 1:
        return ttft
    return f"TPOT {units.seconds(float(prediction.tpot_s[0]))}, {ttft}"


def describe_times(row: Row, rate: str = "") -> str:
    """Write TTFT, TPOT and throughput, with intervals where they are known.

    Parameters
    ----------
    row
        The row of a prediction, which has ``ranges``.
    rate
        Name of the throughput to state; by default that of :func:`compared_rate`.

    Returns
    -------
    str
        A clause.
    """
    parts = [f"TTFT {_format_time_range(row, 'ttft_s', '80 % interval ')}"]
    if row["tpot_s"]:
        parts.append(f"TPOT {_format_time_range(row, 'tpot_s')}")
    rate = rate or comparison_key(row)
    parts.append(f"{units.rate(row[rate])} {QUANTITIES[rate].heading}")
    return ", ".join(parts)


def _format_time_range(row: Row, name: str, what: str = "") -> str:
    told = units.seconds(row[name])
    known = row["ranges"].get(name)
    if known is None:
        return told
    return f"{told} ({what}{units.seconds_range(known['low'], known['high'])})"


def describe_memory(row: Row) -> str:
    """Write the memory that a prediction uses on GPU, host and drive.

    Parameters
    ----------
    row
        The row of a prediction.

    Returns
    -------
    str
        A clause.
    """
    told, known = units.size(row["gpu_bytes"]), row["ranges"].get("gpu_bytes")
    if known is not None:
        told += f" ({units.size(known['low'])}–{units.size(known['high'])})"
    if not row["host_bytes"] and not row.get("disk_bytes"):
        return f"{told} of GPU memory"
    host = f"{units.size(row['host_bytes'])} of host memory"
    if row.get("disk_bytes"):
        return f"{told} of GPU memory, {host} and {units.size(row['disk_bytes'])} of the disk"
    return f"{told} of GPU and {host}"


def compared_rate(row: Row) -> float:
    """Return the throughput by which rows are compared.

    Parameters
    ----------
    row
        The row of a prediction.

    Returns
    -------
    float
        Decoding throughput; output throughput if one token is generated. [tokens/s]
    """
    return float(row[comparison_key(row)])


def speed_ratio(row: Row, full: Row) -> float:
    """Return the throughput of a row relative to that of the full cache.

    Parameters
    ----------
    row
        The row of a prediction.
    full
        The row of the full cache at the same batch and prompt.

    Returns
    -------
    float
        The ratio.
    """
    return compared_rate(row) / compared_rate(full)


def compare_with_full(row: Row, full: Row, named: str = "") -> str:
    """Write how fast a technique is compared with the full cache.

    Parameters
    ----------
    row
        The row of the technique.
    full
        The row of the full cache at the same batch and prompt.
    named
        Name of the baseline to mention; empty if the sentence has mentioned it.

    Returns
    -------
    str
        The rest of a sentence, such as ``is 1.90x as fast``.
    """
    relative = speed_ratio(row, full)
    as_it, than_it = (f" {word} {named}" if named else "" for word in ("as", "than"))
    if not row["fits"]:
        return "does not fit"
    if abs(relative - 1) < EQUAL_SPEED:
        return f"is as fast{as_it}"
    if relative > 1:
        return f"is {units.times(relative)} as fast{as_it}"
    slower = units.times(1 / relative) if relative < 1 / 1.5 else units.percent(1 - relative)
    return f"is {slower} slower{than_it}"


def describe_saving(row: Row, full: Row, of: str = " of GPU memory") -> str:
    """Write how much GPU memory a technique saves compared with the full cache.

    Parameters
    ----------
    row
        The row of the technique.
    full
        The row of the full cache at the same batch and prompt.
    of
        The memory that is meant, to be appended.

    Returns
    -------
    str
        The rest of a sentence; empty if less than 1 % is saved.
    """
    saved = full["gpu_bytes"] - row["gpu_bytes"]
    if not row["fits"] or saved <= 0.01 * full["gpu_bytes"]:
        return ""
    return f" and saves {units.size(saved)}{of}"


def change_command(command: str, changes: Mapping[str, str]) -> str:
    """Replace or add options in a command line.

    Parameters
    ----------
    command
        The command line.
    changes
        New values by keyword, such as ``max_loss``; an empty value for a flag.

    Returns
    -------
    str
        The changed command line.
    """
    words, found = split(command), []
    skip = False
    for word in words:
        name = word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else ""
        if skip:
            skip = False
            continue
        if name in changes:
            skip = "=" not in word
            continue
        found.append(word)
    given = [x for k, v in changes.items() for x in (f"--{k.replace('_', '-')}", v) if x]
    return join([*found, *given])


def differing_options(chosen: Deployment, other: Deployment) -> str:
    """Write the options in which a deployment differs from the recommended one.

    Parameters
    ----------
    chosen
        The recommended deployment.
    other
        The other deployment.

    Returns
    -------
    str
        Options such as ``--gpu h200 --tp 2``.
    """
    before = asdict(chosen.parallelism)
    differs = {
        f"--gpu {quote(other.hardware.name)}": other.hardware.name != chosen.hardware.name,
        f"--weights {other.weights}": other.weights != chosen.weights,
        **{f"--{k} {n}": n != before[k] for k, n in asdict(other.parallelism).items()},
    }
    return " ".join(option for option, given in differs.items() if given)


def explain_limit(bound_by: str, generate: int) -> str:
    """Write what limits the speed of decoding (or of prefill, if one token is generated), and why.

    Parameters
    ----------
    bound_by
        The bottleneck, a key of ``REASONS``.
    generate
        Generated tokens per request. [tokens]
    """
    reason = REASONS[bound_by].format(step="token" if generate > 1 else "pass")
    joint = {SMALL_PRODUCTS: ", ", LAUNCHES: "; "}.get(bound_by, ", as ")
    return f"Limit: {bound_by}{joint}{reason}."


def paste_blocks(engines: Sequence[Row]) -> list[Block]:
    """Lay out configurations of engines for the terminal.

    Parameters
    ----------
    engines
        Configurations, as :func:`kvsim.emit.engines.write_settings` returns them.

    Returns
    -------
    list of Block
        Each configuration after an empty line; one that is a single command on as few lines as it
        takes.
    """
    blocks: list[Block] = []
    for row in engines:
        told = row["text"].splitlines()
        lines = [line for line in told if not line.startswith("#")]
        if " ".join(line.removesuffix("\\").strip() for line in lines) == row["line"]:
            at = told.index(lines[0])
            before, after = told[:at], told[at + len(lines) :]
            kept = ("\n".join(x) for x in (before, after))
            head, tail = ([Verbatim(x)] if x else [] for x in kept)
            blocks += [BLANK, *head, Command(row["line"]), *tail]
        else:
            blocks += [BLANK, Verbatim(row["text"])]
    return blocks


def describe_command(engine: str, served: "Served", stack: str, replicas: int = 1) -> Iterator[str]:
    """Write the command that starts an engine, and settings that the engine does not have.

    Parameters
    ----------
    engine
        Name of the engine, such as ``vllm``.
    served
        The model, technique and limits to serve.
    stack
        Name of the stack that was predicted, which may be of another engine.
    replicas
        Number of engines to start.

    Yields
    ------
    str
        The command, then sentences.
    """
    from kvsim.emit.engines import emit

    own = stack.partition("@")[0]
    if own == "ollama":
        yield from _describe_ollama(served)
        return
    found, title = emit(engine, served), join_titles([engine])
    if found.line or replicas == 1:
        yield f"{title}: {found.command}"
    if found.line and replicas > 1:
        yield f"Start {replicas} of them behind a load balancer."
    for what in found.missing:
        yield what if what.endswith(".") else f"{title} has no setting for {what}."
    if (timed := own.partition("-")[0]) in MANUALS and timed != engine:
        yield f"The times are of {join_titles([timed])}; `--stack {engine}` predicts {title}'s."


def _describe_ollama(served: "Served") -> Iterator[str]:
    """How Ollama's server is started, which keeps a whole context for each request at once."""
    context = served.max_model_len
    many = max(min(served.cache_tokens // context, served.max_seqs), 1)
    stored = served.terms["cache"].settings["format"] if "cache" in served.terms else ""
    told = {
        "OLLAMA_CONTEXT_LENGTH": context,
        "OLLAMA_NUM_PARALLEL": many,
        **({"OLLAMA_FLASH_ATTENTION": 1, "OLLAMA_KV_CACHE_TYPE": stored} if stored else {}),
    }
    yield f"Ollama: {' '.join(f'{k}={v}' for k, v in told.items())} ollama serve"
    yield (
        f"Ollama reserves {context:,} tokens for each request at once. The cache shared by all "
        "requests, as predicted here, is llama-server's: `--engine llamacpp` prints its command."
    )


def describe_pool(pool: "KvPool", ranks: int) -> str:
    """Write the tokens of a KV pool, and that they are of several data-parallel ranks together.

    Parameters
    ----------
    pool
        The pool of a replica.
    ranks
        Its data-parallel ranks.
    """
    of = f" on {ranks} data-parallel ranks" if ranks > 1 else ""
    return f"{pool.tokens:,} tokens{of}"


def quality(found: Evidence) -> Row:
    """Convert evidence of quality loss to a row.

    Parameters
    ----------
    found
        The evidence.

    Returns
    -------
    Row
        Loss with its interval, unit and source.
    """
    return {
        "evidence": found.kind,
        **pick(found, "loss", "low", "high"),
        "unit": found.unit,
        "worst": found.worst,
        "source": found.source,
        "missing": found.missing,
        "words": str(found),
    }


def layers_of(prediction: Prediction) -> list[Row]:
    """List which technique each range of layers uses.

    Parameters
    ----------
    prediction
        The prediction.

    Returns
    -------
    list of Row
        First layer, number of layers, technique and settings of each range.
    """
    count = prediction.deployment.model.layers
    if prediction.technique.uniform:
        return [_range_of_layers(prediction.technique, 0, count)]
    rows = []
    for some in prediction.technique.layers:
        last = count - 1 if some.last is None else some.last
        t = Technique((replace(some, first=0, last=None),))
        rows.append(_range_of_layers(t, some.first, last - some.first + 1))
    return rows


def _range_of_layers(technique: Technique, first: int, count: int) -> Row:
    named = {"technique": technique.name, "params": params(technique), "notation": str(technique)}
    return {"first": first, "count": count, **named}
