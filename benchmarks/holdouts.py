"""Whole runs of engines, predicted by host times and kernels that never saw them.

    python -m benchmarks.holdouts ../shared           # the table, in about four minutes of CPU
    python -m benchmarks.holdouts ../shared --page    # and its section of docs/fidelity.md

Load tests choose the host times again from a grid without one model or one number of GPUs, by
request latency and time per token together; llama.cpp's stack is fitted again without one card.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks import llamacpp
from benchmarks.truth_page import END, PAGE
from benchmarks.truth_rows import Row, read_rows
from benchmarks.truth_runs import Said, predict_rows
from kvsim.evidence.loadtests import replace_numbers
from kvsim.machines.profiles import load_stack, number_of

PUBLISHED = "## Published tables of techniques"
Numbers = dict[str, float]


@dataclass(frozen=True)
class HeldOut:
    """Errors of a group of runs, as shipped and by a fit without them. [%]"""

    engine: str
    by: str
    group: str
    numbers: Numbers  # chosen without the group
    rows: int
    shipped: tuple[float, float]  # median and 90th percentile
    unseen: tuple[float, float]


@dataclass(frozen=True)
class Search:
    """Host times of an engine, the values that its load tests may choose, and what is left out."""

    engine: str
    version: str
    stack: str
    by: str
    group: Callable[[Row], str]
    wanted: Callable[[Row], bool]
    grid: Mapping[str, Sequence[float]]


SEARCHES = (
    Search(
        "SGLang", "0.5.6.post2", "sglang", "model", lambda r: r.model, lambda r: True,
        {"server.token_s": (0.0, 24e-6, 47e-6, 71e-6), "time.sequence_s": (0.0, 19e-6, 38e-6)},
    ),
    Search(
        "TensorRT-LLM", "1.0.0rc3", "trtllm-1.0", "GPUs", lambda r: str(r.tp),
        lambda r: r.file == "serving",
        {"server.prompt_s": (0.0, 6e-3, 12e-3, 18.7e-3, 25e-3, 37e-3)},
    ),
)  # fmt: skip


def search_held_out(search: Search, folder: Path) -> list[HeldOut]:
    """Predict each group of an engine's load tests by host times that the others choose."""
    rows = [
        r for r in read_rows(folder)
        if (r.engine, r.version) == (search.engine, search.version) and r.file != "engines"
        and r.asked in ("latency", "tpot") and search.wanted(r)
    ]  # fmt: skip
    stack, cards = load_stack(search.stack), {r.card for r in rows}
    shipped = {key: number_of(stack, key) for key in search.grid}
    choices = [dict(zip(search.grid, x, strict=True)) for x in product(*search.grid.values())]
    ratios = np.array([
        _ratios(rows, folder, replace_numbers(stack, numbers, cards))
        for numbers in [*choices, shipped]
    ])  # fmt: skip
    groups = np.array([search.group(r) for r in rows])
    latency = np.array([r.asked == "latency" for r in rows])
    found = []
    for name in dict.fromkeys(groups):
        out = groups == name
        best = int(np.argmin(np.median(np.abs(np.log(ratios[:-1][:, ~out])), axis=1)))
        asked = out & latency
        found.append(HeldOut(
            search.engine, search.by, str(name), choices[best], int(asked.sum()),
            errors_of(ratios[-1][asked]), errors_of(ratios[best][asked]),
        ))  # fmt: skip
    return found


def _ratios(rows: Sequence[Row], folder: Path, stack: object) -> list[float]:
    said = predict_rows(rows, folder / "measured" / "traces", stack)  # type: ignore[arg-type]
    return [s.value / r.value for r, s in zip(rows, said, strict=True) if isinstance(s, Said)]


def errors_of(ratio: np.ndarray) -> tuple[float, float]:
    """Return the median and the 90th percentile of errors. [%]"""
    median, p90 = 100 * np.quantile(np.abs(ratio - 1), (0.5, 0.9))
    return round(float(median), 1), round(float(p90), 1)


def bench_held_out(folder: Path) -> list[HeldOut]:
    """Predict llama-bench's rows of each card by fits to the other cards."""
    found = []
    for kind, keys in llamacpp.FREE.items():
        runs = [r for r in llamacpp.read_bench(folder, metal=False) if r.kind == kind]
        shipped, unseen = llamacpp.ratios(runs, {}), llamacpp.held_out(runs, keys)
        groups = np.array([r.group for r in runs])
        for name in sorted({r.group for r in runs}):
            own = groups == name
            found.append(HeldOut(
                f"llama.cpp {kind}", "card", name, {}, int(own.sum()),
                errors_of(shipped[own]), errors_of(unseen[own]),
            ))  # fmt: skip
    return found


def write_section(found: Sequence[HeldOut]) -> None:
    """Write the section of the page of fidelity that truth.py leaves as it is."""
    lines = [
        END,
        "",
        "Load tests of one model or number of GPUs by host times that the others choose, and",
        "llama.cpp on one GPU by a fit to the others: median and 90th percentile of the error of",
        "request latency, or of tokens per second. `python -m benchmarks.holdouts SHARED --page`",
        "rewrites this section.",
        "",
        "| engine | left out | rows | as shipped | held out | chosen without it |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for h in found:
        numbers = ", ".join(f"{key} {1e3 * value:.4g} ms" for key, value in h.numbers.items())
        own, unseen = (f"{median:.1f}, {p90:.1f} %" for median, p90 in (h.shipped, h.unseen))
        lines.append(
            f"| {h.engine} | {h.by} {h.group} | {h.rows} | {own} | {unseen} | {numbers or '–'} |"
        )
    before, _, rest = PAGE.read_text().partition(END)
    _, mark, after = rest.partition(PUBLISHED)
    PAGE.write_text(before + "\n".join(lines) + "\n\n" + mark + after)


def main() -> None:
    folder = Path(sys.argv[1])
    found = [h for s in SEARCHES for h in search_held_out(s, folder)] + bench_held_out(folder)
    for h in found:
        print(f"{h.engine:20s} {h.by:6s} {h.group:18s} {h.rows:4d}  {h.shipped}  {h.unseen}  "
              f"{h.numbers}")  # fmt: skip
    if "--page" in sys.argv:
        write_section(found)


if __name__ == "__main__":
    main()
