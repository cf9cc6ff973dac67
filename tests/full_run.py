"""Everything that can be run, in parts that go on where they were: ``python -m tests.full_run``.

Usage: ``python -m tests.full_run [PART...]``, or ``python3 make.py test --all`` for all parts. A
part that has passed at this commit is not run again. Each adds a line to docs/full-run.json: its
commit, date, seconds, and how many cases of each kind passed. What is skipped, because a browser,
another Python or a package is absent, is not counted.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "full-run.json"
REPORT = ROOT / "build" / "full-run.xml"
EVERYTHING = {"KVSIM_ALL_TESTS": "1"}
PYTEST = ("-Im", "pytest", "-q", "-n", "2", "--dist", "worksteal", f"--junit-xml={REPORT}")
PAGES = tuple(f"tests/report/test_{name}.py" for name in ("every_page", "pages", "explore"))
INSTALLED = ("tests/test_packaging.py", "tests/test_plain_install.py")
NOTEBOOKS, PROCESSORS = "tests/docs/test_examples.py", "tests/validate/test_any_cpu.py"
REPEATED = ("tests/robust/test_kills.py", "tests/robust/test_determinism.py")
OTHERS = (*PAGES, *INSTALLED, NOTEBOOKS, PROCESSORS, *REPEATED)

Command = tuple[tuple[str, ...], dict[str, str]]
PARTS: dict[str, Command] = {
    "tests": ((*PYTEST, "tests", "kvsim"), {}),
    "slow": (
        (*PYTEST, "tests", *(f"--ignore={test}" for test in OTHERS)),
        EVERYTHING | {"KVSIM_LEFT_OUT": "1"},
    ),
    "pages": ((*PYTEST, *PAGES), EVERYTHING),
    "notebooks": ((*PYTEST, NOTEBOOKS), EVERYTHING),
    "install": ((*PYTEST, *INSTALLED), EVERYTHING),
    "processors": (("make.py", "test", "--cpus"), {}),
    "robust": (("-m", "tests.robust"), {}),
    "kills": (("-m", "tests.robust.kills", "150"), {}),
    "determinism": (("-m", "tests.robust.determinism"), {}),
}
"""What each part runs, with which variables."""


def commit() -> str:
    """The commit that is checked out."""
    words = ["git", "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def count_passed(report: Path) -> dict[str, int]:
    """Count the tests that passed by kind, which is their folder.

    Parameters
    ----------
    report
        What pytest wrote for ``--junit-xml``.

    Returns
    -------
    dict
        Tests by folder, as ``tests/serving``; those of the package's documentation are ``kvsim``.
    """
    found: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        if not any(child.tag in ("skipped", "failure", "error") for child in case):
            words = case.get("classname", "").split(".")
            folders = words[:2] if words[0] == "tests" and len(words) > 2 else words[:1]
            found["/".join(folders)] += 1
    return dict(sorted(found.items()))


def run_part(name: str) -> bool:
    """Run one part and record it if it passes; whether it did.

    Parameters
    ----------
    name
        One of ``PARTS``.
    """
    arguments, variables = PARTS[name]
    print(f"full run: {name}", file=sys.stderr, flush=True)
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.unlink(missing_ok=True)
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, **variables}, check=False
    )
    if done.returncode:
        return False
    row = {
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": round(time.monotonic() - begin),
        "kinds": count_passed(REPORT) if REPORT.exists() else {name: 1},
    }
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    text = json.dumps(dict(sorted((known | {name: row}).items())), indent=2)
    RECORD.write_text(f"{text}\n")
    return True


def main(names: Sequence[str]) -> int:
    """Run the parts that have not passed at this commit; 1 if one fails, 2 for an unknown one."""
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        print(f"no part {unknown[0]!r}; expected some of {', '.join(PARTS)}", file=sys.stderr)
        return 2
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    failed = []
    for name in names or PARTS:
        if known.get(name, {}).get("commit") == commit():
            print(f"full run: {name} passed before", file=sys.stderr)
        elif not run_part(name):
            failed.append(name)
    if failed:
        print(f"full run: failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
