"""The verdict on predictions: one point, several techniques at one point, or a sweep."""

from collections.abc import Sequence

from kvsim.planner.question import known_difference
from kvsim.prediction.breakeven import break_even_acceptance
from kvsim.prediction.generate import Prediction
from kvsim.prediction.pool import longest_prompt, pool
from kvsim.prediction.remedies import remedies
from kvsim.report import evidence, units
from kvsim.report.acceptable import quality_of, where_they_run
from kvsim.report.answer import Answer, verdict
from kvsim.report.clauses import SAME, against, brief, memory_of, rate_of, ratio, saves, times_of
from kvsim.report.json import Row
from kvsim.report.kernels import slower_kernels
from kvsim.report.names import distinct
from kvsim.report.reasons import why


def answered(rows: Sequence[Row], found: Sequence[Prediction], left_out: Sequence[str]) -> Answer:
    """The answer of ``kvsim predict``.

    Parameters
    ----------
    rows : one per point.
    found : the prediction of each row, at its one batch.
    """
    points = {(row["batch"], row["prompt"], row["generate"]) for row in rows}
    best = _fastest(rows)
    at = rows.index(best)
    changes = _changes(rows, found)
    if len(rows) == 1:
        said = _one(best, found[at], changes)
    elif len(points) == 1:
        said = _compared(rows, best, _accepted(rows, found), _as_good(rows, found, at))
    else:
        said = _swept(rows, best, _accepted(rows, found))
    d = found[at].deployment
    return Answer(
        verdict=said,
        figures=figures(best),
        changes=[
            *(f"{_unfit(rows)} fits with {change}." for change in changes),
            *slower_kernels(found[at]),
        ],
        settings=[*where_they_run(found), *_limits(best, found[at], len(rows) > 1)],
        evidence=[*evidence.on_card(d, best["technique"]), *quality_of(found)],
        assumed=best["assumed"],
        left_out=left_out,
    )


def figures(row: Row) -> Row:
    """The numbers of a verdict under their contract names."""
    keys = ("batch", "ttft_s", "tpot_s", "decode_tok_s", "output_tok_s", "gpu_bytes", "host_bytes")
    return {
        "technique": row["notation"],
        **{key: row[key] for key in keys},
        "ranges": row["ranges"],
    }


def _fastest(rows: Sequence[Row]) -> Row:
    """The fastest row among those that fit, or of all where none does."""
    return max([row for row in rows if row["fits"]] or rows, key=rate_of)


def _one(row: Row, prediction: Prediction, changes: Sequence[str]) -> str:
    what = f"{row['technique']} on {row['gpu']} at batch {units.whole(row['batch'])}"
    if row["fits"]:
        needed = [
            f"{what}: {times_of(row)}, {memory_of(row)}.",
            why(row["bound_by"], row["generate"]),
        ]
        return verdict(needed, [_pool(prediction), _longest(prediction), _most(row)])
    needed = [f"{what} does not fit: it needs {memory_of(row)}{_there_is(row, prediction)}."]
    return verdict([*needed, _most(row)], [f"It fits with {change}." for change in changes])


def _there_is(row: Row, prediction: Prediction) -> str:
    """The capacity of the tier that is too small."""
    hardware = prediction.deployment.hardware
    if row["gpu_bytes"] > hardware.gpu_memory:
        return f", there are {units.size(hardware.gpu_memory)}"
    return f", the host has {units.size(hardware.host_memory)}"


def _pool(prediction: Prediction) -> str:
    room = pool(prediction.technique, prediction.deployment, prediction.prompt, prediction.generate)
    if not room.tokens or float(prediction.host_bytes[0]):
        return ""  # engines have no pool of what is kept elsewhere
    return (
        f"KV pool at {room.share:.1f} of the memory: {room.tokens:,} tokens, {room.blocks:,} "
        f"blocks, {room.concurrency:.2f} sequences."
    )


def _longest(prediction: Prediction) -> str:
    longest = longest_prompt(
        prediction.technique, prediction.deployment, int(prediction.batch[0]), prediction.generate
    )
    return f"Longest prompt: {longest:,} tokens{_beyond(longest, prediction)}."


def _beyond(longest: int, prediction: Prediction) -> str:
    """That memory would hold more than the model takes, if so."""
    most = prediction.deployment.model.max_context
    return f" by memory, the model takes {most:,}" if longest + prediction.generate > most else ""


def _most(row: Row) -> str:
    if not row["max_batch"]:
        return "Not even one sequence of this length fits."
    return f"At most {units.whole(row['max_batch'])} such sequences fit."


def _accepted(rows: Sequence[Row], found: Sequence[Prediction]) -> str:
    """From which acceptance on drafting pays, at the largest batch of the one that drafts."""
    full = next((p.technique for p in found if p.technique.name == "full"), None)
    drafts = [
        p
        for p in found
        if "acceptance" in p.technique.settings and p.generate > 1 and bool(p.fits[0])
    ]
    if full is None or len({str(p.technique) for p in drafts}) != 1:
        return ""
    last = max(drafts, key=lambda p: (float(p.batch[0]), p.prompt))
    share = break_even_acceptance(last, full)
    if not share:
        return ""
    if share > 1:
        return f"At batch {units.whole(float(last.batch[0]))} no acceptance makes it pay."
    gamma = last.technique.settings.get("gamma")
    drafted = (
        f" ({gamma:g} {'draft' if gamma == 1 else 'drafts'} per round)"
        if isinstance(gamma, (int, float))
        else ""
    )
    at = units.whole(float(last.batch[0]))
    return f"At batch {at} it breaks even at an acceptance of {share:.2f}{drafted}."


def _as_good(rows: Sequence[Row], found: Sequence[Prediction], at: int) -> set[int]:
    """Rows, by identity, whose distance to the fastest is within the known error of the two."""
    top = found[at].technique
    return {
        id(row)
        for row, p in zip(rows, found, strict=True)
        if rate_of(rows[at]) / rate_of(row) - 1 < known_difference(p.deployment, p.technique, top)
    }


def _compared(rows: Sequence[Row], best: Row, accepted: str, as_good: set[int]) -> str:
    """Several techniques at one point: the fastest, against full KV if that is one of them."""
    names = dict(zip(map(id, rows), distinct(rows), strict=True))
    full = next((row for row in rows if row["technique"] == "full"), None)
    others = [row for row in rows if row is not best and row is not full]
    if full is None or not full["fits"]:
        gone = "Full KV does not fit." if full else ""
        told = f"{names[id(best)]} is fastest on {best['gpu']} at batch {best['batch']}:"
        return verdict([gone, f"{told} {times_of(best)}.", why(best["bound_by"], best["generate"])])
    if best is full or ratio(best, full) < 1 + SAME:
        beside = [row for row in rows if row is not full]
        close, slow = (pick(beside, key=lambda row: ratio(row, full)) for pick in (max, min))
        needed = [
            f"Stay with full KV on {full['gpu']} at batch {full['batch']}: {times_of(full)}.",
            f"{names[id(close)]} {against(close, full)}{saves(close, full)}.",
        ]
        wanted = [why(close["bound_by"], close["generate"])]
        if slow is not close:
            needed.append(f"{names[id(slow)]} {against(slow, full)}{saves(slow, full)}.")
            wanted = [why(slow["bound_by"], slow["generate"])]
        return verdict(needed, [accepted, *wanted])
    return verdict(
        [
            f"{names[id(best)]} is fastest on {best['gpu']} at batch {best['batch']}: "
            f"{times_of(best)}, {units.times(ratio(best, full))} full KV's{saves(best, full)}."
        ],
        [
            accepted,
            *(
                f"{names[id(r)]} {against(r, full, 'full')}{saves(r, full, '')}"
                + (f"; within the known error of {names[id(best)]}." if id(r) in as_good else ".")
                for r in others
            ),
            why(best["bound_by"], best["generate"]),
        ],
    )


def _swept(rows: Sequence[Row], best: Row, accepted: str) -> str:
    """A grid of points: where full KV is overtaken, and by what."""
    names = dict.fromkeys(row["technique"] for row in rows)
    fits = sum(row["fits"] for row in rows)
    where = f"batch {units.whole(best['batch'])}, prompt {units.whole(best['prompt'])}"
    told = f"Of {len(rows)} points {fits} fit in memory on {best['gpu']}."
    fastest = f"Fastest is {best['technique']} at {where}: {times_of(best)}."
    if len(names) == 1:
        return verdict([told, fastest], [why(best["bound_by"], best["generate"])])
    turn = _turn(rows, list(names))
    if turn:
        return verdict([turn, *filter(None, [accepted]), fastest], [told])
    wins: dict[str, int] = {}
    points = dict.fromkeys((row["batch"], row["prompt"], row["generate"]) for row in rows)
    for point in points:
        here = [r for r in rows if (r["batch"], r["prompt"], r["generate"]) == point]
        wins[_fastest(here)["technique"]] = wins.get(_fastest(here)["technique"], 0) + 1
    ranked = sorted(wins.items(), key=lambda item: -item[1])
    if len(ranked) == 1:
        return verdict([f"{ranked[0][0]} is fastest at each of {len(points)} points.", fastest],
                       [told])  # fmt: skip
    (first, most), *others = ranked[:3]
    shares = "".join(f", {name} at {count}" for name, count in others)
    said = f"{first} is fastest at {most} of {len(points)} points{shares}."
    return verdict([said, fastest], [told])


def _turn(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Where one of two techniques overtakes the other along batch or prompt; empty otherwise."""
    axes = [key for key in ("batch", "prompt") if len({row[key] for row in rows}) > 1]
    if len(names) != 2 or len(axes) != 1 or len(rows) != 2 * len({row[axes[0]] for row in rows}):
        return ""
    axis = axes[0]
    base, other = names if names[0] == "full" else names[::-1]
    speed = {(r["technique"], r[axis]): rate_of(r) for r in rows}
    points = sorted({row[axis] for row in rows} - {r[axis] for r in rows if not r["fits"]})
    if len(points) < 2:
        return ""
    gains = [speed[other, x] / speed[base, x] for x in points]
    ahead = [gain > 1 for gain in gains]
    turns = [i for i in range(1, len(points)) if ahead[i] != ahead[i - 1]]
    first, last = units.times(gains[0]), units.times(gains[-1])
    if max(abs(gain - 1) for gain in gains) < SAME:
        return f"{other} is as fast as {base} at every {axis}."
    if not turns:
        side = "faster" if ahead[0] else "slower"
        return f"{other} is {side} than {base} at every {axis} ({first} to {last} as fast)."
    i = turns[0]
    return (
        f"{other} is {'faster' if ahead[0] else 'slower'} than {base} up to {axis} "
        f"{points[i - 1]:,} and {'slower' if ahead[0] else 'faster'} from {points[i]:,} on: "
        f"{first} as fast at {points[0]:,}, {last} at {points[-1]:,}."
    )


def _changes(rows: Sequence[Row], found: Sequence[Prediction]) -> list[str]:
    """What makes the first point that does not fit do so, as clauses."""
    for row, p in zip(rows, found, strict=True):
        if not row["fits"]:
            return [f"{remedy.option} ({brief(remedy.prediction)})" for remedy in remedies(p)]
    return []


def _unfit(rows: Sequence[Row]) -> str:
    """The first point that does not fit, as the start of a sentence."""
    if len(rows) == 1:
        return "It"
    row = next(row for row in rows if not row["fits"])
    prompt = units.whole(row["prompt"])
    return f"{row['technique']} at batch {units.whole(row['batch'])}, prompt {prompt}"


def _limits(row: Row, prediction: Prediction, several: bool) -> list[str]:
    """The KV pool as engines print it, and the longest prompt that fits; of which technique."""
    whose = f" with {row['technique']}" if several else ""
    d = prediction.deployment
    room = pool(prediction.technique, d, prediction.prompt, prediction.generate)
    lines = []
    if room.tokens:
        lines.append(
            f"KV pool{whose} at {room.share:.1f} of the GPU's memory: {room.tokens:,} tokens, "
            f"{room.blocks:,} blocks of 16; maximum concurrency {room.concurrency:.2f} sequences "
            f"of {room.length:,} tokens."
        )
    longest = longest_prompt(prediction.technique, d, int(prediction.batch[0]), prediction.generate)
    lines.append(
        f"Longest prompt that fits{whose} at batch {units.whole(row['batch'])}: {longest:,} tokens"
        f"{_beyond(longest, prediction)}."
    )
    return lines
