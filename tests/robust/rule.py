"""The rule that every case keeps: its exit code, one line, bounded, nothing half-written."""

import os
import re
import stat
from pathlib import Path

from tests.robust.cases import Case
from tests.robust.runner import BYTES, SECONDS, Ended, execute, fresh

NOISE = re.compile(r"Traceback|Warning|fault in kvsim|Error:")
Listing = dict[str, tuple[int, int, bytes]]


def violations(case: Case, folder: Path) -> list[str]:
    """What is wrong with how a case ends; empty if nothing is."""
    fresh(folder)
    for name, made in case.files.items():
        path = folder / name
        if callable(made):
            made(path)
        else:
            path.write_bytes(made)
    before = listing(folder)
    ended = execute(case.arguments, folder, case.environment, case.limits)
    return [*_of_end(case, ended), *_of_files(case, before, listing(folder))]


def _of_end(case: Case, ended: Ended) -> list[str]:
    wrong = []
    codes = case.code if isinstance(case.code, tuple) else (case.code,)
    lines = ended.err.splitlines()
    if ended.code not in codes:
        wrong.append(f"exit code {ended.code}, not {case.code}: {ended.err[-300:]!r}")
    elif ended.code == 2:
        said = lines[-1] if lines else ""
        if not said.startswith("kvsim: ") or len(said) > 1100 or not said.isprintable():
            wrong.append(f"no one line: {ended.err[-300:]!r}")
        if case.words and not any(re.search(words, said, re.IGNORECASE) for words in case.words):
            wrong.append(f"the line lacks {case.words}: {said!r}")
        if ended.out:
            wrong.append(f"standard output has {ended.out[:80]!r}")
    if NOISE.search(ended.err):
        wrong.append(f"noise: {ended.err[-300:]!r}")
    if not case.large and ended.cpu > SECONDS:
        wrong.append(f"{ended.cpu:.1f} s of CPU")
    if not case.large and ended.peak > BYTES:
        wrong.append(f"{ended.peak / 1e9:.1f} GB")
    return wrong


def _of_files(case: Case, before: Listing, after: Listing) -> list[str]:
    wrong = [f"left {name}" for name in after if ".kvsim-" in name]
    codes = case.code if isinstance(case.code, tuple) else (case.code,)
    if 0 not in codes and before != after:
        changed = {n for n in before | after if before.get(n) != after.get(n)}
        wrong.append(f"touched {sorted(changed)}")
    null = Path("/dev/null").lstat()
    if not stat.S_ISCHR(null.st_mode):
        wrong.append("/dev/null is no device any more")
    return wrong


def listing(folder: Path) -> Listing:
    """Names, kinds, sizes and (small) contents of everything in a folder."""
    found: Listing = {}
    for entry in os.scandir(folder):
        status = entry.stat(follow_symlinks=False)
        small = stat.S_ISREG(status.st_mode) and status.st_size < 10**6
        content = Path(entry.path).read_bytes() if small else b""
        found[entry.name] = (status.st_mode, status.st_size, content)
    return found
