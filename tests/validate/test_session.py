"""The minutes that a GPU is there: deadlines, kills at random moments, what is left. Fake units."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvsim.errors import InputError
from kvsim.validate.session.report import MAX_REPORT_BYTES, write_report
from kvsim.validate.session.run import GIVEN_UP, SessionState, Unit, all_units, estimate, run_units
from tests.support.fake_session import HANGS

SCRIPT = Path(__file__).parents[1] / "support" / "fake_session.py"


def fake(state: SessionState, name: str, code: str, seconds: float = 0.0, **more: object) -> Unit:
    """A unit that is a few lines of Python; ``done`` writes its result."""
    done = (
        "import os\n"
        f"place = {str(state.path(f'{name}.json'))!r}\n"
        "def done():\n"
        "    open(place + '.draft', 'w').write('{\"passed\": true}')\n"
        "    os.replace(place + '.draft', place)\n"
    )
    command = (sys.executable, "-S", "-c", done + code)
    return Unit(name, seconds, command, **more)  # type: ignore[arg-type]


@pytest.fixture
def state(tmp_path: Path) -> SessionState:
    return SessionState.open(tmp_path, "NVIDIA H200 (fake)")


def test_one_that_fails_or_hangs_ends_no_other(state: SessionState) -> None:
    units = [
        fake(state, "good", "done()"),
        fake(state, "bad", "raise RuntimeError('out of resources')"),
        fake(state, "hung", "import time; time.sleep(60)", most=0.3),
        fake(state, "crashed", "os.kill(os.getpid(), 11)"),
        fake(state, "needy", "done()", needs=("bad",)),
        fake(state, "last", "done()", needs=("good",)),
    ]
    left = {one.unit.name: one.reason for one in run_units(units, state, 60.0, lambda text: None)}
    assert list(left) == ["bad", "hung", "crashed", "needy"]
    assert "out of resources" in left["bad"]
    assert "took more than 0 s" in left["hung"]
    assert "exit code -11" in left["crashed"]
    assert left["needy"] == "needs bad"
    for _ in range(GIVEN_UP):
        left = {one.unit.name: one.reason for one in run_units(units, state, 60.0, lambda t: None)}
    assert left["bad"].startswith(f"failed {GIVEN_UP} times: exit code 1")


def test_what_does_not_fit_is_passed_over_and_its_estimate_corrected(state: SessionState) -> None:
    units = [
        fake(state, "long", "done()", seconds=100.0),
        fake(state, "slow", "import time; time.sleep(60)", seconds=0.5),
        fake(state, "never reached", "done()"),
    ]
    begin = time.monotonic()
    left = {one.unit.name: one.reason for one in run_units(units, state, 3.5, lambda text: None)}
    assert time.monotonic() - begin < 4.5
    assert left == {
        "long": "no time left",
        "slow": "ended, as time is up",
        "never reached": "no time left",
    }
    assert estimate(units[1], state) > 1.5  # it is tried again only where there is more time
    assert state.failures("slow") == 0


def test_what_goes_on_is_begun_with_little_time(state: SessionState) -> None:
    code = f"open({str(state.path('kept'))!r}, 'a').write('x')\nimport time; time.sleep(60)"
    unit = fake(state, "calibration", code, seconds=500.0, goes_on=True)
    (left,) = run_units([unit], state, 3.2, lambda text: None)
    assert left.reason == "ended, as time is up"
    assert state.path("kept").read_text() == "x"
    assert estimate(unit, state) == 500.0


@pytest.mark.parametrize("seed", range(2))
def test_the_whole_command_stopped_at_random_moments_goes_on(tmp_path: Path, seed: int) -> None:
    """It is given random deadlines and killed; its units are those of a session, with fake work."""
    moments, kills, deadlines = random.Random(seed), 0, 0
    for _ in range(30):
        given = moments.uniform(0.6, 2.0)
        begin = time.monotonic()
        words = [sys.executable, "-I", str(SCRIPT), str(tmp_path), str(given)]
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        killed = moments.random() < 0.5
        try:
            said = process.communicate(timeout=moments.uniform(0.3, 1.5) if killed else 60)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
        else:
            deadlines += "run it again to go on" in said
            assert (
                time.monotonic() - begin < given + 5.0
            )  # Python starts and ends, on a busy machine
            assert len(list((tmp_path / "out").iterdir())) <= 8
            if "29 of 30 units are done" in said:
                break
        for place in tmp_path.rglob("*.json"):
            json.loads(place.read_text())  # whole, or not there
    state = SessionState(tmp_path / "state" / "cpu")
    units = [unit.name for unit in all_units("cpu", state)]
    done = [name for name in units if state.read(name) is not None]
    assert kills + deadlines >= 1
    assert done == [name for name in units if name != HANGS]
    log = (state.folder / "runs").read_text().splitlines()
    again = [line for line in log if line.endswith(" done")]
    assert len(again) == len(set(again)), "what was finished is done again"
    begun = sum(line.endswith(" begun") for line in log)
    assert begun <= len(done) + kills + deadlines + 1 + GIVEN_UP, "a stop loses one unit at most"
    time.sleep(0.1)
    assert not _alive(tmp_path)


def _alive(folder: Path) -> list[str]:
    """Processes that still name the folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder) in place.read_text().replace("\0", " ") and place.parent.name != str(
                os.getpid()
            ):
                found.append(place.parent.name)
        except OSError:
            continue
    return found


def test_two_sessions_do_not_share_a_folder(state: SessionState) -> None:
    with state.lock(), pytest.raises(InputError, match="a session runs in"):
        state.lock().__enter__()


def test_a_report_is_a_few_small_files(state: SessionState, tmp_path: Path) -> None:
    units = all_units("cuda:0", state)
    for unit in units:
        state.write(unit.name, {"passed": True})
    samples = state.path("profile.samples.jsonl")
    samples.write_bytes(b"x" * (MAX_REPORT_BYTES + 1))
    files = write_report(state, units, tmp_path / "report")
    assert len(files) <= 8 and sum(path.stat().st_size for path in files) < MAX_REPORT_BYTES
    assert "samples.jsonl" not in {path.name for path in files}
    points = json.loads((tmp_path / "report" / "points.json").read_text())
    assert len(points) >= 8


def test_units_are_in_the_order_of_their_worth() -> None:
    units = all_units("cuda:0", SessionState(Path("nowhere")))
    kinds = list(dict.fromkeys(unit.name.split()[0] for unit in units))
    assert kinds == [
        "facts", "ceilings", "compile", "kernels", "sanitizer", "counts", "calibration", "point",
        "rates",
    ]  # fmt: skip
    points = [unit for unit in units if unit.name.startswith("point")]
    assert all(unit.seconds <= unit.most == 90.0 for unit in points)
    sizes = [int(u.name.split()[-2]) * int(u.name.split()[-1]) for u in points if "short" in u.name]
    assert max(sizes) <= 65536


@pytest.mark.parametrize("name", ["facts", "kernels gather", "kernels topk"])
def test_a_unit_runs_in_a_process_of_its_own(name: str, tmp_path: Path) -> None:
    """Without a GPU kernels are interpreted; ``make.py gpu --device cpu`` rehearses all units."""
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "kvsim.validate.session.work", name, "cpu", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    result = SessionState(tmp_path).read(name)
    assert result and result.get("passed", True)
