"""Tests collected once, then run in forked children: first to see what each executes."""

import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests.robust.mutation.changes import ROOT, Mutant, plant
from tests.robust.mutation.code import key_of, swap, touched

MOST = 40.0  # seconds of tests for one change, as traced, the quickest first
LONGER, SPARE = 2.0, 4.0  # a test that takes so many times, and seconds, more has noticed a change
MOSTLY = 0.75  # of a file's tests pass where they are traced, or the tool tells nothing
QUIET = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "-W",
         "ignore::pytest.PytestAssertRewriteWarning"]  # fmt: skip
LISTED = re.compile("test_settings")  # tests of what modules state when imported
Executed = dict[str, tuple[float, list[str]]]
"""Of each test that passes: its time and the functions that it runs."""


@dataclass
class Outcome:
    """What became of a change: the test that noticed it, or nothing; how many tests were tried."""

    by: str
    tried: int
    seconds: float

    @property
    def killed(self) -> bool:
        """Whether a test noticed it."""
        return bool(self.by)


@dataclass
class Session:
    """A plugin of pytest that tries mutants with the tests that it collected.

    Attributes
    ----------
    mutants
        What to try.
    map_file
        Where it is kept which test runs which functions.
    done
        Called with each mutant and its outcome.
    rooms
        Folders, below the project, in each of which a planted change has to be noticed first.
    left_out
        Pattern of tests that are collected and not run, as they are too slow to be traced.
    """

    mutants: Sequence[Mutant]
    map_file: Path
    done: Callable[[Mutant, Outcome], None]
    rooms: Sequence[str]
    left_out: str
    kills: Counter[str] = field(default_factory=Counter)

    def pytest_configure(self) -> None:
        """Have hypothesis give the same examples each time, and shrink none."""
        import hypothesis

        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("same", derandomize=True, database=None, phases=phases)
        hypothesis.settings.load_profile("same")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what is slow to trace."""
        items[:] = [item for item in items if not re.search(self.left_out, item.nodeid)]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the mutants in place of the tests."""
        items = {item.nodeid: item for item in session.items}
        executed = self._executed(list(items.values()))
        for room in self.rooms:
            self._kill_planted(room, executed, items)
        for mutant in self.mutants:
            before = mutant.path.read_text(encoding="utf-8")
            names, whole = touched(before, mutant.source, mutant.path)
            place = mutant.path.relative_to(ROOT).as_posix()
            chosen = self._chosen(executed, place, names, whole)
            some = [(items[name], executed[name][0]) for name in chosen if name in items]
            self.done(mutant, self._tried(mutant, some, whole))
        return True

    def _kill_planted(self, room: str, executed: Executed, items: Mapping[str, Any]) -> None:
        """Fail unless tests notice that a function which they run raises: changes do get in."""
        runs = Counter(
            function
            for _, functions in executed.values()
            for function in functions
            if function.startswith(f"{room}/") and "<" not in function
        )
        for function, _ in runs.most_common():
            place, _, name = function.partition(":")
            planted = plant(ROOT / place, name)
            if planted is not None:
                chosen = self._chosen(executed, place, {name}, whole=False)
                some = [(items[test], executed[test][0]) for test in chosen if test in items]
                outcome = self._tried(planted, some, whole=False)
                if not outcome.killed:
                    pytest.exit(f"no test notices {planted.name}: changes are not seen", 3)
                return
        pytest.exit(f"{room}: no test of {len(executed)} runs a function there", 3)

    def _chosen(self, executed: Executed, place: str, names: set[str], whole: bool) -> list[str]:
        """The tests that run a changed function, or any of a changed module; quick ones first."""
        wanted = {f"{place}:{name}" for name in names}

        def runs(functions: list[str]) -> bool:
            if whole:
                return any(function.startswith(f"{place}:") for function in functions)
            return not wanted.isdisjoint(functions)

        found = {test: cpu for test, (cpu, functions) in executed.items() if runs(functions)}
        whole = whole or not found  # a function is newer than what is known of the tests
        if not found:
            found = {test: cpu for test, (cpu, functions) in executed.items() if runs(functions)}
        if whole:
            found |= {test: cpu for test, (cpu, _) in executed.items() if LISTED.search(test)}
        chosen: list[str] = []
        total = 0.0
        for test in sorted(found, key=lambda test: found[test] / (1 + self.kills[test])):
            total += found[test]
            if total > MOST and chosen:
                break
            chosen.append(test)
        return chosen

    def _tried(self, mutant: Mutant, items: list[tuple[Any, float]], whole: bool) -> Outcome:
        begin = time.monotonic()
        if not items:
            return Outcome("", 0, 0.0)
        by, died = self._in_a_child(mutant, items, whole, timed=True)
        if died:  # unless a first run only had to compile: one without the change does so
            before = mutant.path.read_text(encoding="utf-8")
            self._in_a_child(replace(mutant, source=before), items, whole, timed=False)
            by, died = self._in_a_child(mutant, items, whole, timed=True)
        self.kills[by] += 1
        return Outcome(by, len(items), time.monotonic() - begin)

    def _in_a_child(
        self, mutant: Mutant, items: list[tuple[Any, float]], whole: bool, timed: bool
    ) -> tuple[str, bool]:
        """Which test notices a change, and whether the child that runs them dies of it."""
        reads, writes = os.pipe()
        child = os.fork()
        if not child:
            os.close(reads)
            _end_with(lambda: _noticed(mutant, items, whole, timed), writes)
        os.close(writes)
        with os.fdopen(reads) as file:
            said = file.read()
        _, status = os.waitpid(child, 0)
        if status:
            return f"never ends or dies in {said.strip() or 'a test'}", True
        return said.strip(), False

    def _executed(self, items: list[Any]) -> Executed:
        """Run every test that is not in the map yet, a file at a time."""
        known: Executed = {}
        with suppress(OSError):
            known = json.loads(self.map_file.read_text())
        files: dict[Path, list[Any]] = {}
        for item in items:
            if item.nodeid not in known:
                files.setdefault(item.path, []).append(item)
        for path, some in files.items():
            print(f"what {path.relative_to(ROOT)} runs", flush=True)
            reads, writes = os.pipe()
            child = os.fork()
            if not child:
                os.close(reads)
                _end_with(lambda: json.dumps(_recorded(some)), writes)  # noqa: B023
            os.close(writes)
            with os.fdopen(reads) as file:
                said = file.read()
            os.waitpid(child, 0)
            found = json.loads(said) if said else {}
            if len(found) < MOSTLY * len(some):  # such as where nothing is compiled
                failing = next(item.nodeid for item in some if item.nodeid not in found)
                pytest.exit(f"{failing} and others there fail without a change", 3)
            known |= found
            self.map_file.write_text(json.dumps(known))
        return known


def _end_with(work: Callable[[], str], writes: int) -> None:
    """Do the work of a child, write down what it says, and end."""
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for number in (1, 2):
            os.dup2(null, number)
        said = work().encode()
        while said:
            said = said[os.write(writes, said) :]
        code = 0
    finally:
        os._exit(code)


def _noticed(mutant: Mutant, items: list[tuple[Any, float]], whole: bool, timed: bool) -> str:
    """The first test that fails with the change; one that takes too long ends the process."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL if timed else signal.SIG_IGN)
    if whole:
        allowed = sum(cpu for _, cpu in items) * LONGER + 5 * SPARE
        signal.setitimer(signal.ITIMER_PROF, allowed)
        return _noticed_anew(mutant, [item.nodeid for item, _ in items])
    swap(mutant.source, mutant.path)
    for (item, cpu), after in zip(items, [*items[1:], None], strict=True):
        signal.setitimer(signal.ITIMER_PROF, cpu * LONGER + SPARE)
        next_item = None if after is None else after[0]
        if any(report.failed for report in runtestprotocol(item, log=False, nextitem=next_item)):
            return str(item.nodeid)
    return ""


def _noticed_anew(mutant: Mutant, tests: list[str]) -> str:
    """The same where a module's own body differs: all of kvsim is imported again."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("kvsim", "tests")]:
        del sys.modules[name]
    changed = mutant.path.resolve()
    original = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, name: str) -> CodeType | None:
        if Path(self.path).resolve() == changed:
            return compile(mutant.source, self.path, "exec", dont_inherit=True)
        return original(self, name)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]
    failed = _Failed()
    code = pytest.main([*QUIET, "-x", *tests], plugins=[failed])
    unseen = (pytest.ExitCode.OK, pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED)
    return failed.first or ("" if code in unseen else f"pytest ends with {int(code)}")


class _Failed:
    """A plugin that keeps the first test that fails, or the first file that cannot be read."""

    first = ""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep its name."""
        if report.failed and not self.first:
            self.first = report.nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep its name."""
        if report.failed and not self.first:
            self.first = report.nodeid


def _recorded(items: list[Any]) -> Executed:
    """Run tests one after the other and see which functions of kvsim each calls."""
    found: Executed = {}
    places: dict[str, str] = {}

    def place_of(code: CodeType) -> str:
        file = code.co_filename
        if file not in places:
            path = Path(file).resolve()
            inside = path.is_relative_to(ROOT) and ".venv" not in path.parts
            place = path.relative_to(ROOT).as_posix() if inside else ""
            places[file] = "" if place.startswith("tests/") else place
        return places[file]

    for item, after in zip(items, [*items[1:], None], strict=True):
        codes: set[CodeType] = set()

        def trace(frame: FrameType, event: str, argument: object) -> None:
            codes.add(frame.f_code)  # noqa: B023

        begin = time.process_time()
        sys.settrace(trace)
        try:
            reports = runtestprotocol(item, log=False, nextitem=after)
        finally:
            sys.settrace(None)
        spent = time.process_time() - begin
        if not any(report.failed for report in reports):
            keys = {key_of(code, place_of(code)) for code in codes if place_of(code)}
            found[item.nodeid] = (round(spent, 3), sorted(keys))
    return found
