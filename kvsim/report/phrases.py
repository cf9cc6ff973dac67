"""Parts of sentences: times, memory, how two compare, and why something takes its time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from shlex import join, quote, split
from typing import TYPE_CHECKING

from kvsim.machines.deployment import Deployment
from kvsim.prediction.explain import LIMITS, SERVER, SMALL_PRODUCTS
from kvsim.prediction.generate import Prediction
from kvsim.quality.evidence import Evidence
from kvsim.report import units
from kvsim.report.json import Row, pick
from kvsim.report.names import params
from kvsim.report.suitability import join_titles
from kvsim.report.terminal import BLANK, Block, Verbatim
from kvsim.report.units import QUANTITIES, comparison_key
from kvsim.techniques.released import SERVERS
from kvsim.techniques.technique import Technique

if TYPE_CHECKING:
    from kvsim.emit.served import Served


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
    SMALL_PRODUCTS: "kernels compute whole tiles for few tokens; a larger batch adds throughput",
    "arithmetic that unpacks the cache": "the GPU spends its time unpacking the cache",
    "kernel launches": "the host issues kernels more slowly than the GPU runs them",
    SERVER: "tokenizing prompts and streaming text take the host longer than the GPU needs",
    "fixed time": "every kernel takes a minimum time",
}
"""What binds a round, and why that is."""

assert set(LIMITS.values()) <= set(REASONS)


def summarize_times(prediction: Prediction) -> str:
    """Write TPOT and TTFT without their ranges.

    Parameters
    ----------
    prediction
        Prediction, of which the first batch counts.

    Returns
    -------
    str
        Clause of a sentence; without TPOT where one token is generated.
    """
    ttft = f"TTFT {units.seconds(float(prediction.ttft_s[0]))}"
    if prediction.generate == 1:
        return ttft
    return f"TPOT {units.seconds(float(prediction.tpot_s[0]))}, {ttft}"


def describe_times(row: Row, rate: str = "") -> str:
    """Write TTFT, TPOT and throughput of a row as a clause, with ranges where they are known.

    Parameters
    ----------
    row
        Row of a prediction with its ``ranges``.
    rate
        Contract name of the rate; by default the one that rows are compared by.
    """
    parts = [f"TTFT {_format_time_range(row, 'ttft_s')}"]
    if row["tpot_s"]:
        parts.append(f"TPOT {_format_time_range(row, 'tpot_s')}")
    rate = rate or comparison_key(row)
    parts.append(f"{units.rate(row[rate])} {QUANTITIES[rate].heading}")
    return ", ".join(parts)


def _format_time_range(row: Row, name: str) -> str:
    told = units.seconds(row[name])
    known = row["ranges"].get(name)
    if known is None:
        return told
    return f"{told} ({units.seconds_range(known['low'], known['high'])})"


def describe_memory(row: Row) -> str:
    """Write how much memory of the GPU a row takes, and of the host if it uses any.

    Parameters
    ----------
    row
        Row of a prediction.

    Returns
    -------
    str
        Clause of a sentence.
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
    """Return the rate that rows are compared by.

    Parameters
    ----------
    row
        Row of a prediction.

    Returns
    -------
    float
        Rate under the key of :func:`~kvsim.report.units.comparison_key`. [tokens/s]
    """
    return float(row[comparison_key(row)])


def speed_ratio(row: Row, full: Row) -> float:
    """Return the speed of a row relative to full KV.

    Parameters
    ----------
    row
        Row of a prediction.
    full
        Row of full KV at the same point.

    Returns
    -------
    float
        Ratio of their compared rates.
    """
    return compared_rate(row) / compared_rate(full)


def compare_with_full(row: Row, full: Row, named: str = "") -> str:
    """How a technique compares with full KV, as the rest of a sentence.

    Parameters
    ----------
    named : what it is compared with, where the sentence does not say it already.
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
    """How much less GPU memory a technique takes than full KV, from one per cent on.

    Parameters
    ----------
    of : of what, where the sentence does not say it already.
    """
    saved = full["gpu_bytes"] - row["gpu_bytes"]
    if not row["fits"] or saved <= 0.01 * full["gpu_bytes"]:
        return ""
    return f" and saves {units.size(saved)}{of}"


def change_command(command: str, changes: Mapping[str, str]) -> str:
    """Write a command line with some options given another value.

    Parameters
    ----------
    command
        Command line.
    changes
        Values by option, as ``max_loss``; an empty value for an option that takes none.
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
    """Write the options in which a deployment differs from the one that was chosen.

    Parameters
    ----------
    chosen
        What was chosen.
    other
        What it is compared with.
    """
    before = asdict(chosen.parallelism)
    differs = {
        f"--gpu {quote(other.hardware.name)}": other.hardware.name != chosen.hardware.name,
        f"--weights {other.weights}": other.weights != chosen.weights,
        **{f"--{k} {n}": n != before[k] for k, n in asdict(other.parallelism).items()},
    }
    return " ".join(option for option, given in differs.items() if given)


def join_words(texts: Sequence[str], last: str = "and") -> str:
    """Join texts as a list in a sentence.

    Parameters
    ----------
    texts
        One or several texts.
    last
        The word before the last of them.
    """
    return f" {last} ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))


def explain_limit(bound_by: str, generate: int) -> str:
    """Say what limits decoding, or prefill where one token is generated, and why.

    Parameters
    ----------
    bound_by
        What the busiest stream spends most of its time on.
    generate
        Generated tokens per request. [tokens]
    """
    reason = REASONS[bound_by].format(step="token" if generate > 1 else "pass")
    return f"Limit: {bound_by}, as {reason}."


def paste_blocks(engines: Sequence[Row]) -> list[Block]:
    """Lay out settings of engines for the terminal, below an answer.

    Parameters
    ----------
    engines
        An engine's settings each.

    Returns
    -------
    list of Block
        Blocks with empty lines between them.
    """
    return [block for row in engines for block in (BLANK, Verbatim(row["text"]))]


def describe_command(engine: str, served: "Served", stack: str, replicas: int = 1) -> Iterator[str]:
    """Say how an engine is started, and what it has no setting for.

    Parameters
    ----------
    engine
        Key of the engine.
    served
        What it serves.
    stack
        Stack of the times, which may be another engine's.
    replicas
        Engines to start.

    Yields
    ------
    str
        The command after the title of the engine, then sentences.
    """
    from kvsim.emit.engines import emit

    found, title = emit(engine, served), join_titles([engine])
    if found.line or replicas == 1:
        yield f"{title}: {found.command}"
    if found.line and replicas > 1:
        yield f"Start {replicas} of them behind a load balancer."
    yield from (f"{title} has no setting for {what}." for what in found.missing)
    own = stack.partition("@")[0]
    if own in SERVERS and own != engine:
        yield f"Times are {join_titles([own])}'s; `--stack {engine}` predicts {title}'s."


def quality(found: Evidence) -> Row:
    """Make the row of a setting's evidence of loss.

    Parameters
    ----------
    found
        Evidence on the model.

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
    """List what ranges of layers do, as ``kvsim.techniques.parse`` reads it back.

    Parameters
    ----------
    prediction
        A prediction.

    Returns
    -------
    list of Row
        First layer, count, technique and settings of each range.
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
