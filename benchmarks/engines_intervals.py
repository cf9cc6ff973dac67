"""Intervals of the engines' ledger: wide enough to hold 80 % of what no fit saw, and how many do.

Rows come in groups: a device's rows predicted by the numbers of other devices, or a model's load
tests on one device by host times fitted without them (of an engine's only model, without those of
the same lengths). The interval for a group not measured yet is
a range of quantiles over all groups, each counting alike; the range is the narrowest that holds
80 % of the rows of groups left out of it one after another.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.engines_own import load_tests
from benchmarks.entries import entry_of
from kvsim.evidence import ledger, loadtests
from kvsim.machines.hardware import Stack

Groups = Mapping[tuple[str, ...], np.ndarray]  # measured over predicted, by group
TAILS = (0.1, 0.08, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01, 0.005, 0.0)
HELD = 0.8
WITHIN_SHAPES = 0.08  # share of rows below and above an interval on other shapes of one card


@dataclass(frozen=True)
class Interval:
    """Factors on a prediction, and the share of rows of left-out groups that they hold."""

    low: float
    high: float
    coverage: float
    plain: float  # the share that tenth and ninetieth percentiles hold


def interval(groups: Groups, alike: Callable[[tuple[str, ...]], str]) -> Interval:
    """The interval for a group not measured yet.

    Parameters
    ----------
    alike : what groups are left out together, such as those of one device.
    """
    found = {tail: _coverage(groups, alike, tail) for tail in TAILS}
    tail = next((t for t in TAILS if found[t] >= HELD), TAILS[-1])
    low, high = _range(list(groups.values()), tail)
    return Interval(low, high, found[tail], found[TAILS[0]])


def _coverage(groups: Groups, alike: Callable[[tuple[str, ...]], str], tail: float) -> float:
    held = []
    for key, ratio in groups.items():
        others = [r for k, r in groups.items() if alike(k) != alike(key)]
        if others:
            low, high = _range(others, tail)
            held.append(np.mean((ratio >= low) & (ratio <= high)))
    return float(np.mean(held))


def _range(groups: list[np.ndarray], tail: float) -> tuple[float, float]:
    """Quantiles over groups that count alike."""
    ratio = np.concatenate(groups)
    weight = np.concatenate([np.full(g.size, 1 / g.size) for g in groups])
    order = np.argsort(ratio)
    place = np.cumsum(weight[order]) - 0.5 * weight[order]
    low, high = np.interp((tail, 1 - tail), place / weight.sum(), ratio[order])
    return float(low), float(high)


def requests(
    folder: Path,
    engines: Mapping[str, str],
    carried: Callable[[str, str], Stack],
    own: Callable[[str], Stack],
) -> tuple[list[ledger.LedgerEntry], dict[str, Interval]]:
    """Lines of load tests that no fit saw, on cards with kernels of their own and on others.

    Parameters
    ----------
    carried : an engine's stack for a card without the card's own numbers.
    own : an engine's stack with the host times that are known before any load test is read.

    Intervals are those without them, as few engines have any known.
    """
    tests = {e: load_tests(folder, e) for e in engines}
    parts = sorted({
        (e, r.device, r.model, loadtests.PRECISIONS[r.precision][1])
        for e, rows in tests.items() for r in rows
    })  # fmt: skip
    groups: dict[str, dict[tuple[str, ...], np.ndarray]] = {"card": {}, "device": {}}
    blank: dict[str, dict[tuple[str, ...], np.ndarray]] = {"card": {}, "device": {}}
    for engine, device, model, technique in parts:
        here = [r for r in tests[engine] if (r.device, r.model) == (device, model)]
        took = np.array([r.latency for r in here])
        for what, stack in (("card", own(engine)), ("device", carried(engine, device))):
            left = [
                r
                for r in tests[engine]
                if r.device != device or (what == "card" and r.model != model)
            ]
            key, nothing = (
                (engine, device, model, technique),
                dict.fromkeys(loadtests.HOST_TIMES, 0.0),
            )
            groups[what][key] = took / _told(here, left, stack, own(engine))
            unknown = loadtests.replace_numbers(
                own(engine), nothing, {r.device for r in tests[engine]}
            )
            blank[what][key] = took / _told(here, left, stack, unknown)
    found = {what: interval(g, lambda key: key[1] + key[2]) for what, g in blank.items()}
    entries = []
    for what, several in groups.items():
        for engine in engines:
            mine = {k: r for k, r in several.items() if k[0] == engine}
            wanted = sorted({k[1] for k in mine}) if what == "card" else [ledger.ANY]
            for device in wanted:
                for technique in sorted({k[3] for k in mine}):
                    chosen = [
                        r
                        for k, r in mine.items()
                        if k[3] == technique and (k[1] == device or device == ledger.ANY)
                    ]
                    if chosen:
                        entries.append(line(
                            np.concatenate(chosen), found[what], engine=engine, version="",
                            kind="request", device=device, technique=technique,
                            held_out=_held_out(tests[engine], what),
                            source="aic-core-0.12.0",
                        ))  # fmt: skip
    return entries, {f"requests, {what}": i for what, i in found.items()}


def _held_out(tests: list[loadtests.LoadTest], what: str) -> str:
    if what == "device":
        return "device"
    return "model on the card" if len({(r.device, r.model) for r in tests}) > 1 else "lengths"


def _told(
    here: list[loadtests.LoadTest], left: list[loadtests.LoadTest], stack: Stack, own: Stack
) -> np.ndarray:
    """Load tests of a card by host times fitted to others; where an engine has no others, to those
    of other lengths of prompts and outputs."""
    out = np.empty(len(here))
    lengths = [(r.prompt, r.generate) for r in here]
    for some in [None] if left else sorted(set(lengths)):
        chosen = [i for i, each in enumerate(lengths) if some in (None, each)]
        fitted = left or [r for r, each in zip(here, lengths, strict=True) if each != some]
        host = loadtests.fit_host(fitted, own).values
        rows = [here[i] for i in chosen]
        out[chosen] = loadtests.predict_latencies(
            rows, loadtests.replace_numbers(stack, host, {here[0].device})
        )
    return out


def line(ratio: np.ndarray, found: Interval, **keys: str) -> ledger.LedgerEntry:
    """A line of the ledger: the error of some rows, and the interval for others like them."""
    entry = entry_of(1 / ratio, np.ones(ratio.size), **keys)
    return replace(entry, low=float(f"{found.low:.4g}"), high=float(f"{found.high:.4g}"))


def write_page(page: Path, found: Mapping[str, Interval]) -> None:
    """Put the table of intervals into the page of errors."""
    lines = []
    for name, i in found.items():
        cells = f"{i.low:.2f}–{i.high:.2f} | {100 * i.coverage:.0f} % | {100 * i.plain:.0f} %"
        lines.append(f"| {name} | {cells} |")
        print(lines[-1])
    _put(page, MARK, [SAID, *lines])


def write_refitted(page: Path, found: Mapping[tuple[str, str], tuple[int, float, float]]) -> None:
    """Put the errors of stacks fitted without a mechanism's rows into the page of errors."""
    lines = []
    for (what, which), (count, mean, worst) in found.items():
        lines.append(f"| {what} | {which} | {count} | {100 * mean:.1f} / {100 * worst:.1f} |")
        print(lines[-1])
    _put(page, REFITTED, [REFITTED_SAID, *lines])


def _put(page: Path, mark: str, lines: list[str]) -> None:
    """Replace a section of a page, or add it at its end."""
    above, _, rest = page.read_text().partition(mark)
    _, again, below = rest.partition("\n## ")
    text = "\n".join([above.rstrip(), "", mark, *lines, ""])
    page.write_text(text + again + below if again else text)


REFITTED = "## Without a mechanism's rows"
REFITTED_SAID = """
Errors of times in %. Each stack's numbers were fitted again without the rows of one range of
contexts, one way of grouping heads, or one technique. Numbers that the remaining rows do not
determine are those of the stack that it extends. Documented anomalies are excluded.
`benchmarks/engines.py --host` makes this table.

| left out | which | rows | mean / worst |
| --- | --- | --- | --- |"""
MARK = "## Intervals on cards without rows"
SAID = """
The share of rows within the 80 % interval of an answer, where neither the numbers nor the
interval used their GPU (`requests, card`: their model's load tests on it). The interval is the
narrowest range of quantiles that contains 80 % of the rows of held-out GPUs; the 10 and 90 %
quantiles contain less. `benchmarks/engines.py --write` makes this table.

| class | factors on a time | rows inside | inside 10 and 90 % |
| --- | --- | --- | --- |"""
