"""Every command at every width, and every page in Chromium: what was asked beside what was found.

Run with ``python -m benchmarks.pages FOLDER [NAME ...]`` (a quarter of an hour). Pages, pictures of
them and results stay in the folder; what it has results of is not run again unless it is
named. Without Chromium only terminals are looked at, without axe-core
(``npm ci --prefix tests/support/axe``) its rules are left out.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from benchmarks import page_checks as checks
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
    "sweep": ("sweep", "SPEC", "--out", "GRID", "--resume"),
    "gpus": ("gpus",), "gpu": ("gpus", "h100"), "models": ("models",), "stacks": ("stacks",),
    "techniques": ("techniques",), "technique": ("techniques", "kivi"),
    "plan explained": ("plan", *POINT, "--prompt", "4k", "--pareto", "--explain"),
    "doctor": ("doctor", "PROFILE"),
    "generate": ("traces", "generate", "LIKE", "--like", "sample:chat", "--rate", "20"),
    "convert": ("traces", "convert", "sample:conversation", "SAME"),
    "import": ("traces", "import", "LOG", "--lengths", "lognormal:prompt=900,generate=200",
               "--out", "OURS"),
}  # fmt: skip
COMMANDS |= {
    f"{what} {name}": (*command, *options)
    for name in SAMPLES
    for what, command, options in (
        ("simulate", ("simulate", "--trace", f"sample:{name}"),
         ("--model", "llama3-8b", "--gpu", "l40s", "--compare", "full,kivi,offload",
          "--ttft", "2s")),
        ("plan trace", ("plan", "--trace", f"sample:{name}"),
         ("--model", "llama3-8b", "--gpu", "l40s", "--rate", "0.25", "--ttft", "4s")),
        ("trace", ("traces", "inspect", f"sample:{name}"), ()),
    )
}  # fmt: skip
PAGELESS = ("gpus", "gpu", "models", "stacks", "techniques", "technique", "plan explained",
            "doctor", "generate", "convert", "import")  # fmt: skip
WITHOUT_JSON = ("explore", "sweep")
GRID = """[grid]
model = ["llama3-8b"]
gpu = ["a6000", "h100"]
technique = ["full", "fp8", "kivi:bits=4", "offload"]
batch = { from = 1, to = 256, count = 9, spacing = "log" }
context = [1024, 8192, 32768]
"""
PROFILE = """title = "a card with faults"
basis = "datasheet"
compute.fp16_FLOPps = 1
compute.fp32_FLOPps = "fast"
memory.gpu_capacity_B = 85899345920
"""
ACCESS = (
    '10.0.0.1 - - [22/Nov/2026:10:{:02d}:{:02d} +0000] "POST /v1/chat/completions HTTP/1.1" 200 9\n'
)
ROUNDS = 3  # a page is opened this often, each time by a new browser
ONCE = ("validate",)  # its page has measured times


@dataclass(frozen=True)
class Case:
    """A command of the table, its files in a folder."""

    name: str
    folder: Path

    @property
    def arguments(self) -> list[str]:
        """The command line as a user types it."""
        places = {
            "RUN": str(self.folder / "run.parquet"),
            "FIT": str(self.folder / "fit.toml"),
            "SPEC": str(self.folder / "grid.toml"),
            "GRID": str(self.folder / "grid"),
            "PROFILE": str(self.folder / "profile.toml"),
            "LIKE": str(self.folder / "like.csv"),
            "SAME": str(self.folder / "same.parquet"),
            "LOG": str(self.folder / "access.log"),
            "OURS": str(self.folder / "ours.parquet"),
        }
        return [places.get(word, word) for word in COMMANDS[self.name]]

    @property
    def page(self) -> Path:
        """Where its page is."""
        return self.folder / f"{self.name.replace(' ', '-')}.html"

    def written(self) -> str:
        """Write its page; the JSON of the same run."""
        where = "--out" if self.name == "explore" else "--report"
        told = () if self.name in WITHOUT_JSON else ("--json",)
        found = run(*self.arguments, where, str(self.page), *told)
        assert self.page.exists(), found.err
        return found.out


def prepared(folder: Path) -> None:
    """The files that commands read."""
    log = ("simulate", "--trace", "sample:chat", "--model", "llama3-8b", "--gpu", "l40s",
           "--stack", "trtllm", "--out", str(folder / "run.parquet"))  # fmt: skip
    assert run(*log).code == 0
    (folder / "grid.toml").write_text(GRID)
    (folder / "profile.toml").write_text(PROFILE)
    lines = (ACCESS.format(i // 60, i % 60) for i in range(0, 600, 7))
    (folder / "access.log").write_text("".join(lines))


def printed(case: Case, width: int) -> str:
    """A command's output in a terminal of a width."""
    with patch.dict(os.environ, {"COLUMNS": str(width), "NO_COLOR": "1"}):
        found = run(*case.arguments)
    return re.sub(r" in [\d.]+ s; solved", "; solved", found.out + found.err)


def in_terminals(case: Case) -> Iterator[str]:
    """What is wrong with a command's output at any width."""
    if case.name == "explore":
        return
    wide = printed(case, WIDTHS[-1])
    for width in WIDTHS:
        found = wide if width == WIDTHS[-1] else printed(case, width)
        for fault in checks.lines(wide, found, width):
            yield f"{width} columns: {fault}"


def on_its_page(case: Case, b: Browser, shots: Path) -> Iterator[str]:
    """What is wrong with a command's page."""
    told = case.written()
    yield from checks.looked(b, case.page, shots)
    if case.name not in WITHOUT_JSON:
        yield from checks.agreed(b, case.page, told)
        yield from checks.sums(b, case.page, list(dicts(json.loads(told))))
    if case.name not in ONCE:
        yield from checks.again(b, case.page)


def dicts(found: Any) -> Iterator[dict[str, Any]]:
    """Every JSON object, however deep."""
    if isinstance(found, dict):
        yield found
        found = list(found.values())
    if isinstance(found, list):
        for value in found:
            yield from dicts(value)


def main() -> None:
    """The cases that are named or all, but for those that the folder has results of."""
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(COMMANDS)
    folder.mkdir(exist_ok=True)
    if not (folder / "run.parquet").exists():
        prepared(folder)
    for name in names:
        kept = folder / f"{name}.json"
        if kept.exists() and not sys.argv[2:]:
            continue
        try:
            found = measured(Case(name, folder))
        except Exception as error:  # the other cases are looked at all the same
            print(f"{name}: not measured: {error!r}"[:400], flush=True)
            continue
        kept.write_text(json.dumps(found, indent=1))
        for where in ("terminal", "page"):
            for fault in found.get(where, ()):
                print(f"{name}, {where}: {fault}", flush=True)
    tell([json.loads(kept.read_text()) for kept in folder.glob("*.json")])


def measured(case: Case) -> dict[str, Any]:
    """What is wrong with a command in terminals and on its page; the page's size and time."""
    found: dict[str, Any] = {"terminal": list(in_terminals(case))}
    if chromium.CHROMIUM is None or case.name in PAGELESS:
        return found
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile, browser(Path(profile)) as b:
        found["page"] = list(on_its_page(case, b, case.folder))
    found["page"] += checks.large(case.page)
    times = []
    for _ in range(ROUNDS):
        with TemporaryDirectory(ignore_cleanup_errors=True) as profile, browser(Path(profile)) as b:
            times.append(b.timed(case.page, 1440))
    least = min(times, key=lambda took: took["first_cpu_s"])  # other work on the machine adds
    return found | {"bytes": case.page.stat().st_size, **least}


def tell(results: list[dict[str, Any]]) -> None:
    """What was asked beside what was found."""
    paged = [found for found in results if "page" in found]
    titles = {
        "terminal": f"commands at {WIDTHS} columns",
        "page": "pages: 390 and 1440 px, light, dark, A4, axe, JSON, foot",
    }
    for where, what in titles.items():
        here = [found[where] for found in results if where in found]
        print(f"{len(here)} {what} | 0 faults asked | {sum(map(len, here))} found")
    if paged:
        most = {k: max(found[k] for found in paged) for k in ("bytes", "first_cpu_s")}
        print(f"largest page | 5,000,000 bytes asked | {most['bytes']:,} found")
        print(f"first picture, CPU time | 2 s asked | {most['first_cpu_s']:.2f} s found")


if __name__ == "__main__":
    main()
