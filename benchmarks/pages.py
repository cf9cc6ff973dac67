"""Every command at every width, and every page in Chromium: what was asked beside what was found.

Run with ``python -m benchmarks.pages [FOLDER]`` (about five minutes on two cores); pages and
pictures of them are left in the folder if there is one. Without Chromium only terminals are looked
at.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from tests.support import browser as chromium
from tests.support.commands import run
from tests.support.devtools import Browser, browser

WIDTHS = (60, 80, 100, 160)
SAMPLES = ("chat", "code", "conversation")
POINT = ("--model", "llama3.1-8b", "--gpu", "h100")
COMMANDS: dict[str, tuple[str, ...]] = {
    "plan": ("plan", *POINT, "--prompt", "4k", "--tp", "1,2"),
    "plan lossy": ("plan", "--model", "llama2-7b", "--gpu", "a6000", "--lossy", "--objective",
                   "latency"),
    "plan too large": ("plan", "--model", "qwen2.5-32b", "--gpu", "a100-40g", "--weights", "auto"),
    "predict": ("predict", *POINT, "--technique", "full,offload,kivi,quantspec,eagle", "--batch",
                "1,8,512", "--prompt", "2k,64k"),
    "explore": ("explore", *POINT, "--technique", "full,kivi,offload,mtp"),
    "reproduce": ("reproduce", "all"),
    "capacity": ("capacity", "--trace", "sample:chat", "--model", "llama3-8b", "--gpus",
                 "l40s,a100-80g", "--ttft", "2s", "--tpot", "100ms"),
    "loads": ("simulate", "--trace", "sample:chat", "--model", "llama3-8b", "--gpu", "h100",
              "--req-s", "2,8"),
    "calibrate": ("calibrate", "--from-run", "RUN", "--model", "llama3-8b", "--gpu", "l40s",
                  "--out", "FIT"),
    "validate": ("validate", "--model", "smollm2-135m", "--layers", "1", "--techniques", "full",
                 "--techniques", "kivi"),
    "gpus": ("gpus",), "gpu": ("gpus", "h100"), "models": ("models",), "stacks": ("stacks",),
    "techniques": ("techniques",), "technique": ("techniques", "kivi"),
}  # fmt: skip
COMMANDS |= {
    f"{what} {name}": (*command, *options)
    for name in SAMPLES
    for what, command, options in (
        ("simulate", ("simulate", "--trace", f"sample:{name}"),
         ("--model", "llama3-8b", "--gpu", "l40s", "--compare", "full,kivi,offload",
          "--ttft", "2s")),
        ("plan trace", ("plan", "--trace", f"sample:{name}"), ("--model", "llama3-8b", "--gpu",
                                                               "l40s")),
        ("trace", ("traces", "inspect", f"sample:{name}"), ()),
    )
}  # fmt: skip
PAGED = ("plan", "predict", "explore", "reproduce", "capacity", "loads", "calibrate", "validate",
         "simulate code", "plan trace chat", "trace conversation")  # fmt: skip
NUMBER = r"-?\d[\d,]*\.?\d*(?:e[+-]\d+)?"


@dataclass(frozen=True)
class Case:
    """A command of the table, its files in a folder."""

    name: str
    folder: Path

    @property
    def arguments(self) -> list[str]:
        """What is typed."""
        places = {"RUN": str(self.folder / "run.parquet"), "FIT": str(self.folder / "fit.toml")}
        return [places.get(word, word) for word in COMMANDS[self.name]]

    @property
    def page(self) -> Path:
        """Where its page is."""
        return self.folder / f"{self.name.replace(' ', '-')}.html"

    def written(self) -> str:
        """What the terminal shows while the page is written."""
        where = "--out" if self.name == "explore" else "--report"
        return run(*self.arguments, where, str(self.page)).err


def prepared(folder: Path) -> None:
    """The log that one command fits to."""
    log = ("simulate", "--trace", "sample:chat", "--model", "llama3-8b", "--gpu", "l40s",
           "--stack", "trtllm", "--out", str(folder / "run.parquet"))  # fmt: skip
    assert run(*log).code == 0


def printed(case: Case, width: int) -> str:
    """A command's output in a terminal of a width."""
    with patch.dict(os.environ, {"COLUMNS": str(width), "NO_COLOR": "1"}):
        found = run(*case.arguments)
    return found.out + found.err


def faults(wide: str, narrow: str, width: int) -> Iterator[str]:
    """Lines that are too long, and numbers of the prose that the widest output has otherwise."""
    for line in narrow.splitlines():
        if len(line) > width and len(line.split()) > 2 and "kvsim: " not in line:
            yield f"longer than {width}: {line[:60]}"
        if line != line.rstrip():
            yield f"trailing blanks: {line[:60]}"
    known = set(re.findall(NUMBER, wide))
    for number in set(re.findall(NUMBER, narrow)) - known:
        if len(number) > 3:
            yield f"{number} is not in the widest output"


def looked(b: Browser, page: Path, shots: Path | None = None) -> Iterator[str]:
    """What is wrong with a page: at two widths, light and dark, and printed."""
    papers = set()
    for width in (390, 1440):
        for scheme in ("light", "dark"):
            b.open(page, width, scheme)
            seen = b.look()
            papers.add(seen["paper"])
            where = f"{width} px, {scheme}"
            if seen["scroll"] != width:
                yield f"{where}: {seen['scroll']} px wide"
            for key in ("overlaps", "cut", "said", "requests"):
                if seen[key]:
                    yield f"{where}: {key}: {seen[key][:2]}"
            if shots:
                b.shot(shots / f"{page.stem}-{width}-{scheme}.png")
    if len(papers) != 2:
        yield "dark is as light"
    b.paged(page)
    seen = b.look()
    for heading in seen["headings"]:
        if heading["next"] is not None and heading["next"] > heading["column"] + 300:
            yield f"printed: {heading['text'][:40]} stands last on its sheet"
    for key in ("overlaps", "cut"):
        if seen[key]:
            yield f"printed: {key}: {seen[key][:2]}"
    if shots:
        b.shot(shots / f"{page.stem}-print.png")


def again(b: Browser, page: Path) -> Iterator[str]:
    """The command in the foot, run again: every cell must have the same number."""
    b.open(page, 1440)
    before = b.look()
    other = page.with_name(f"again-{page.name}")
    arguments = before["foot"].split()[1:]
    if arguments[0] == "explore":
        return
    run(*arguments, "--report", str(other))
    b.open(other, 1440)
    after = b.look()
    for key in ("verdict", "cells"):
        if before[key] != after[key]:
            yield f"the foot's command gives other {key}"


def sums(b: Browser, page: Path, rows: list[dict[str, Any]]) -> Iterator[str]:
    """Lanes of a round against its length in the heading, memory bars against the rows' totals."""
    b.open(page, 1440)
    for title, traces in b.look()["traces"].items():
        if title.startswith("One decoding round"):
            ends = [x + base for t in traces for x, base in zip(t["x"], t["base"], strict=True)]
            told = re.search(r": ([\d.,]+) (ms|s|µs),", title)
            assert told, title
            unit = {"µs": 1e-3, "ms": 1.0, "s": 1e3}[told[2]]
            length = float(told[1].replace(",", "")) * unit
            if abs(max(ends) / length - 1) > 6e-3:
                yield f"lanes end at {max(ends):.4g} ms, the heading says {length:.4g} ms"
        if title.startswith("GPU memory"):
            bars = [t for t in traces if t["type"] == "bar"]
            totals = [sum(t["x"][i] for t in bars) for i in range(len(bars[0]["x"]))]
            known = [row["gpu_bytes"] / 2**30 for row in rows]
            for total in totals:
                if min(abs(total - size) for size in known) > 2e-3 * total:
                    yield f"bars of {total:.4g} GiB, no row has that"


def main() -> None:
    """The whole matrix."""
    keep = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(TemporaryDirectory()))
        folder.mkdir(exist_ok=True)
        prepared(folder)
        cases = {name: Case(name, folder) for name in COMMANDS}
        broken = 0
        for name, case in cases.items():
            if name in ("validate", "explore"):
                continue
            wide = printed(case, WIDTHS[-1])
            for width in WIDTHS:
                for fault in faults(wide, printed(case, width), width):
                    broken += 1
                    print(f"{name}, {width} columns: {fault}")
        print(f"{len(cases) - 2} commands x {WIDTHS} columns | 0 faults asked | {broken} found")
        if chromium.CHROMIUM is None:
            return
        b = stack.enter_context(browser(Path(stack.enter_context(TemporaryDirectory()))))
        wrong = 0
        for name in PAGED:
            case = cases[name]
            case.written()
            found = [*looked(b, case.page, keep)]
            if name in ("plan", "predict", "simulate code", "capacity"):
                found += again(b, case.page)
            if name == "predict":
                rows = json.loads(run(*case.arguments, "--json").out)
                found += sums(b, case.page, rows)
            if case.page.stat().st_size > 5e6:
                found.append(f"{case.page.stat().st_size:,} bytes")
            wrong += len(found)
            for fault in found:
                print(f"page of {name}: {fault}")
        print(
            f"{len(PAGED)} pages, 390 and 1440 px, light, dark, A4 | 0 faults asked | {wrong} found"
        )


if __name__ == "__main__":
    main()
