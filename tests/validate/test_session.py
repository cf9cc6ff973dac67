"""The minutes that a GPU is there: what is next, cuts at random moments, bundles. Fake units."""

import errno
import io
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import pytest

import kvsim
from kvsim.api.calibrations import calibrate
from kvsim.api.validations import validate
from kvsim.cli import session
from kvsim.errors import InputError
from kvsim.evidence.machine.samples import read_samples
from kvsim.report.session import make_result
from kvsim.validate.kernels import language
from kvsim.validate.registry import IMPLEMENTATIONS
from kvsim.validate.runner import BY_USE, GIVEN_UP, Past, Runner, Unit
from kvsim.validate.session import state as states
from kvsim.validate.session.queue import run_units
from kvsim.validate.session.state import MANIFEST, SessionState, unpack
from kvsim.validate.session.work import all_units
from tests.support.places import ROOT

SCRIPT = Path(__file__).parents[1] / "support" / "fake_session.py"
WORKER = """
import os, sys, time
from pathlib import Path
from kvsim.validate.session.queue import serve
from kvsim.validate.session.state import SessionState
state = SessionState(Path(sys.argv[1]))
def do(unit, form):
    if unit == "bad": raise RuntimeError("out of resources")
    if unit in ("hung", "slow"): time.sleep(60)
    if unit == "crashed": os.kill(os.getpid(), 11)
    state.write(unit, {"passed": True, "process": os.getpid()})
serve(do)
"""


@pytest.fixture
def state(tmp_path: Path) -> SessionState:
    return SessionState.open(tmp_path, "NVIDIA H200 (fake)")


def run(units: list[Unit], state: SessionState, seconds: float) -> dict[str, str]:
    worker = [sys.executable, "-c", WORKER, str(state.folder)]
    left = run_units(units, state, seconds, lambda text: None, worker)
    return {one.unit.name: one.reason for one in left}


def test_one_that_fails_or_hangs_ends_no_other(state: SessionState) -> None:
    units = [
        Unit("good", 0.1),
        Unit("better", 0.1),
        Unit("bad", 0.1),
        Unit("hung", 0.1, most=0.5),
        Unit("crashed", 0.1),
        Unit("needy", 0.1, needs=("bad",)),
        Unit("last", 0.1, needs=("good",)),
    ]
    left = run(units, state, 60.0)
    assert list(left) == ["bad", "hung", "crashed", "needy"]
    assert "out of resources" in left["bad"]
    assert "took more than" in left["hung"]
    assert "exit code -11" in left["crashed"]
    assert left["needy"] == "needs bad"
    processes = [(state.read(name) or {})["process"] for name in ("good", "better", "last")]
    assert processes[0] == processes[1] != processes[2]  # one process, until a unit ends it
    left = run(units, state, 60.0)
    assert left["bad"].startswith(f"failed {GIVEN_UP} times: RuntimeError")


TROUBLE = """
import os, sys
from pathlib import Path
from kvsim.validate.session.queue import serve
from kvsim.validate.session.state import SessionState
state, trouble = SessionState(Path(sys.argv[1])), sys.argv[2]
def do(unit, form):
    if unit != "good" and (unit == "large" or trouble == "lost"): raise RuntimeError(SAID[trouble])
    state.write(unit, {"passed": True})
SAID = {
    "small": "CUDA out of memory. Tried to allocate 40.00 GiB",
    "compiler": "Failed to find C compiler. Please specify via CC environment variable.",
    "lost": "CUDA error: GPU is lost",
}
serve(do)
"""


@pytest.mark.parametrize(
    ("trouble", "done", "said"),
    [
        ("small", {"good", "b", "c"}, "large: failed: RuntimeError: CUDA out of memory. Tried to"),
        ("compiler", {"good", "b", "c"}, "large: failed: RuntimeError: Failed to find C compiler"),
        ("lost", {"good"}, "CUDA error: GPU is lost: the device may be lost; it ends here"),
    ],
)
def test_trouble_of_a_card_is_one_line_and_what_was_measured_stays(
    state: SessionState, trouble: str, done: set[str], said: str
) -> None:
    units = [Unit(name, 0.1) for name in ("good", "large", "b", "c")]
    worker, told = [sys.executable, "-c", TROUBLE, str(state.folder), trouble], list[str]()
    left = run_units(units, state, 60.0, told.append, worker)
    assert {u.name for u in units if state.read(u.name)} == done
    assert any(said in line for line in told) and all("\n" not in line for line in told)
    if trouble == "lost":  # another card goes on with all of them
        assert not any(one.failures for one in state.past(units).values()) and len(left) == 3


def test_a_driver_that_is_too_old_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "class cuda:\n    def get_device_name(device):\n"
        "        raise RuntimeError('The NVIDIA driver on your system is too old (found 11040)')\n"
        "device = str\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["make.py gpu", "--state", str(tmp_path / "state")])
    assert session.main() == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "cuda:0 does not answer (The NVIDIA driver on your" in lines[0]


def test_a_full_disk_keeps_the_bundle_before_and_the_results(
    state: SessionState,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bundle = tmp_path / "b.tar.gz"
    state.write("facts", {"device": "x"})
    session._pack(bundle, state)
    before = bundle.read_bytes()
    state.write("ceilings", {"hbm_B_per_s": 1.0})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        session._pack(bundle, state)
        with pytest.raises(InputError, match="disk full"):
            state.write("compile", {})
    (said,) = capsys.readouterr().err.splitlines()
    assert "disk full" in said and "results are in" in said
    assert bundle.read_bytes() == before and state.read("ceilings") and not state.read("compile")


def test_what_does_not_fit_is_passed_over_and_its_estimate_corrected(state: SessionState) -> None:
    units = [Unit("long", 100.0), Unit("slow", 0.5), Unit("never reached", 0.5)]
    begin = time.monotonic()
    left = run(units, state, 4.0)
    assert time.monotonic() - begin < 30  # not the minute that it would take
    assert left == {
        "long": "no time left",
        "slow": "ended, as time is up",
        "never reached": "no time left",
    }
    again = Runner(units, past=state.past(units))
    assert again.expected(units[1], "long") > 1.5  # tried again only where there is more time
    assert again.past["slow"].failures == 0


@pytest.mark.parametrize(
    ("seconds", "done", "expected"),
    [
        (100.0, "", ("first", "long")),  # 30 of it, 5 + 20 of the others
        (39.0, "", ("first", "long")),
        (37.0, "", ("first", "short")),  # else the third would not fit
        (12.0, "", ("first", "short")),
        (4.0, "", ("third", "long")),  # what does not fit is passed over
        (0.5, "", None),
        (100.0, "first second third", ("first", "long")),  # then more of what is worth most
        (25.0, "first second third", ("second", "long")),
    ],
)
def test_short_forms_come_before_long_ones(
    seconds: float, done: str, expected: tuple[str, str] | None
) -> None:
    units = [Unit("first", 30.0, 10.0), Unit("second", 20.0, 5.0), Unit("third", 3.0)]
    past = dict.fromkeys(done.split(), Past("short"))
    plan = Runner(units, seconds, past, lambda: 0.0).plan()
    assert (plan[0].unit.name, plan[0].form) == expected if plan else expected is None


def test_a_slow_machine_corrects_the_estimates_of_all_kinds() -> None:
    runner = Runner([Unit("a one", 10.0), Unit("a two", 10.0), Unit("b", 10.0)])
    assert runner.paces() == {"": 1.0}
    runner.past["a one"] = Past("long", 5.0)
    assert runner.paces() == {"a": 0.5, "": 1.0}  # another kind is not expected to be fast
    runner.past["a one"] = Past("long", 30.0)
    assert runner.paces() == {"a": 3.0, "": 3.0}


def test_time_goes_by_rank_and_units_run_in_their_order() -> None:
    """A plan is made anew when a unit took longer; what is required is done all the same."""
    now = [0.0]
    units = [Unit("a 1", 4.0, rank=2), Unit("b 1", 4.0, rank=1), Unit("b 2", 4.0, rank=3)]
    units.append(Unit("c", 4.0, required=True, rank=4))
    runner, ran = Runner(units, 12.0, clock=lambda: now[0]), list[str]()
    assert [one.unit.name for one in runner.plan()] == ["a 1", "b 1", "b 2", "c"]
    for chosen in runner:
        assert bool(runner.remaining) == bool(ran)
        ran.append(chosen.unit.name)
        now[0] += 8.0
    assert ran == ["a 1", "c"] and runner.paces() == {"a": 2.0, "c": 2.0, "": 2.0}


def play(folder: Path, seconds: float, cut: float = -1.0, number: int = 0, *more: Path) -> int:
    """A session of so many simulated seconds, killed at a moment of them; its exit code."""
    words = [sys.executable, "-I", str(SCRIPT), str(folder), str(seconds), str(cut), str(number)]
    return subprocess.run([*words, *map(str, more)], capture_output=True).returncode


def worth(folder: Path) -> dict[str, str]:
    """Units that a session's bundle holds, by their form."""
    if not (folder / "bundle.tar.gz").exists():
        return {}
    with TemporaryDirectory() as place:
        state = unpack(folder / "bundle.tar.gz", Path(place))
        return {name: past.form for name, past in state.past(all_units("cpu")).items() if past.form}


def done(folder: Path) -> tuple[dict[str, str], dict[str, float]]:
    """Units that a session has finished, by their form, and when, and when the last one began."""
    lines = (folder / "state" / "cpu" / "runs").read_text().splitlines()
    rows = [line.split(" ", 2) for line in lines]
    found = {text.removesuffix(" done"): form for _, form, text in rows if text.endswith(" done")}
    ends = {text.removesuffix(" done"): float(when) for when, _, text in rows}
    begun = max(float(when) for when, _, text in rows if text.endswith(" begun"))
    return found, {name: end for name, end in ends.items() if name in found} | {"": begun}


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    """What sessions of so many minutes find that nothing cuts short."""
    found = {}
    for minutes in (30, 10):
        folder = tmp_path_factory.mktemp(f"of_{minutes}_minutes")
        assert play(folder, 60.0 * minutes) == 0
        found[minutes] = worth(folder)
    return found


MOMENTS = 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("minutes", [30, 10])
@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_cut_session_loses_one_unit_and_goes_on_as_if_it_had_not_been_cut(
    tmp_path: Path,
    uncut: dict[int, dict[str, str]],
    minutes: int,
    number: signal.Signals,
    moment: int,
) -> None:
    """It goes on elsewhere, where there is the time that was left behind what the bundle holds."""
    seconds = 60.0 * minutes
    cut = random.Random(moment).uniform(moment, moment + 1) / MOMENTS * seconds
    first, other = tmp_path / "first", tmp_path / "other"
    for place in (first, other):
        place.mkdir()
    play(first, seconds, cut, int(number))
    (finished, moments), kept = done(first), worth(first)
    assert len([name for name, form in finished.items() if kept.get(name) != form]) <= 1
    assert kept.items() <= finished.items()
    bundle = [first / "bundle.tar.gz"] if kept else []
    spent = max(when for name, when in moments.items() if not name or name in kept)
    play(other, seconds - spent, -1.0, 0, *bundle)
    assert worth(other) == uncut[minutes]


def test_a_bundle_holds_what_is_worth_most(
    state: SessionState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "MOST_BUNDLE_BYTES", 2**16 + 30_000)
    state.write("facts", {"device": "x"})
    state.path("quick.samples.jsonl").write_bytes(random.Random(0).randbytes(20_000))
    state.path("full.samples.jsonl").write_bytes(random.Random(1).randbytes(40_000))
    state.path("facts.log").write_bytes(b"said\n" * 10_000)
    (state.folder / "triton" / "ab").mkdir(parents=True)
    (state.folder / "triton" / "ab" / "kernel.cubin").write_bytes(b"x" * 100)
    state.path("strange name").write_text("never")
    bundle = tmp_path / "b.tar.gz"
    assert state.pack(bundle) == ["full.samples.jsonl"]
    other = unpack(bundle, tmp_path / "other")
    assert other.folder.name == state.folder.name and other.read("facts") == {"device": "x"}
    assert other.path("facts.log").stat().st_size == states.LOG_BYTES
    assert (other.folder / "triton" / "ab" / "kernel.cubin").exists()
    other.write("facts", {"device": "y"})
    assert unpack(bundle, tmp_path / "other").read("facts") == {"device": "y"}  # stays


def archive(*members: tuple[str, bytes, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as made:
        for name, content, kind in members:
            member = tarfile.TarInfo(name)
            member.size, member.type, member.linkname = len(content), kind, "/etc/passwd"
            made.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no archive",
        archive(("facts.json", b"{}", tarfile.REGTYPE)),
        archive((MANIFEST, b"[]", tarfile.REGTYPE)),
        archive((MANIFEST, b'{"device": "../up"}', tarfile.REGTYPE)),
        archive((MANIFEST, b'{"device": "a"}', tarfile.REGTYPE), ("../b", b"", tarfile.REGTYPE)),
        archive((MANIFEST, b'{"device": "a"}', tarfile.REGTYPE), ("b", b"", tarfile.SYMTYPE)),
        archive((MANIFEST, b'{"device": "a"}', tarfile.REGTYPE))[:60],
    ],
    ids=range(8),  # an archive holds the time, by which two workers would name it differently
)
def test_what_is_no_bundle_is_refused(tmp_path: Path, content: bytes) -> None:
    bundle = tmp_path / "b.tar.gz"
    bundle.write_bytes(content)
    with pytest.raises(InputError, match=r"not a bundle that make\.py gpu --bundle wrote"):
        unpack(bundle, tmp_path / "state")
    assert not (tmp_path / "state").exists() and not (tmp_path / "b").exists()


def test_a_rented_image_has_what_a_session_imports() -> None:
    """Which has PyTorch with Triton, NumPy, SciPy and Typer."""
    missing = ("numba", "pulp", "plotly", "pandas", "jinja2", "highspy")
    needed = (
        "report.calibrate", "report.session", "report.validate", "report.validate_times",
        "evidence.machine.fit", "api.calibrations", "api.validations", "cli.session",
        "validate.bench.suite", "validate.counts.check", "validate.session.work",
        "validate.times.points",
    )  # fmt: skip
    code = f"import sys; sys.modules.update(dict.fromkeys({missing}))\n"
    code += "\n".join(f"import kvsim.{name}" for name in needed)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_interpreter_that_does_not_suit_numpy_is_one_line() -> None:
    problem = RuntimeError("in a kernel")
    problem.__cause__ = TypeError("only 0-dimensional arrays can be converted to Python scalars")
    said = language.interpreter_fault(problem)
    assert said.startswith("Triton ") and "with NumPy" in said and "\n" not in said
    assert not language.interpreter_fault(RuntimeError("out of resources"))


def test_two_sessions_do_not_share_a_folder(state: SessionState) -> None:
    with state.lock(), pytest.raises(InputError, match="a session runs in"):
        state.lock().__enter__()


def timed(technique: str, seconds: float, predicted: float) -> dict[str, object]:
    """A point as a session keeps it, timed with the quick profile."""
    rows = [
        {"name": name, "predicted": predicted, "measured": seconds, "noise": 0.01}
        for name in ("ttft_s", "tpot_s", "decode attn_s")
    ]
    one = {"technique": technique, "batch": 8, "prompt": 1024, "rounds": "eager", "measured": rows}
    where = {"model": "llama3.1-8b", "layers": 4, "profile": "quick.toml"}
    return {**where, "found": [one], "left": []}


def test_each_technique_has_a_line_by_the_later_profile(state: SessionState) -> None:
    state.write("point full", timed("full", 2.0, 2.0))
    state.write("point fp8", timed("fp8", 1.0, 4.0))
    state.write("point kivi", timed("kivi:bits=2", 3.0, 1.0))
    units = all_units("cuda:0")
    shipped = Path(kvsim.__file__).parent / "hwprofiles"
    profiles = {"quick": "a6000", "full": "a100-80g"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvsim.report.session.best_shares", lambda state: {})
        page = make_result(state, units)
        for name, card in profiles.items():
            shutil.copy(shipped / f"{card}.toml", state.path(f"{name}.toml"))
            shutil.copy(shipped / "stacks" / "kvsim.toml", state.path(f"{name}.stack.toml"))
        found = make_result(state, units).fields["units"]["point fp8"]
    (lines,) = (t for t in page.tables if t.title.startswith("Techniques per token"))
    cells = {row["cells"][0]: row["cells"] for row in lines.rows}
    assert cells["fp8"][1:4] == ["4,000", "1,000", "+300"] and cells["full"][-1] == "-"
    assert cells["fp8"][-1] == "a plan would omit it, and it is faster than full"
    assert cells["kivi:bits=2"][-1] == "a plan would choose it, and full is faster"
    again = {m["name"]: m["predicted"] for m in found["found"][0]["measured"]}
    assert found["profile"] == "full.toml"
    assert again["tpot_s"] < 1 and again["decode attn_s"] < 1  # as a card predicts them


def test_what_an_h100_has_measured_is_predicted_from_its_bundle() -> None:
    place = ROOT / "results" / "nvidia-h100-80gb-hbm3"
    result = validate(from_bundle=place / "2026-11-27" / "card.tar.gz")
    assert "order is right in 321 of 351 pairs" in str(result)
    points = [one for name, one in result.fields["units"].items() if name.startswith("point")]
    measured = [m for point in points for one in point["found"] for m in one["measured"]]
    for name, bound in (("ttft_s", 0.02), ("tpot_s", 0.07), ("resident_B", 1e-6), ("h2d_B", 1e-6)):
        off = [abs(m["predicted"] / m["measured"] - 1) for m in measured if m["name"] == name]
        assert median(off) < bound


def test_a_bundle_becomes_a_calibration_with_its_samples(tmp_path: Path) -> None:
    bundle = ROOT / "results" / "nvidia-h100-80gb-hbm3" / "2026-11-27" / "card.tar.gz"
    calibrate(str(tmp_path / "card.toml"), from_bundle=str(bundle))
    endings = ("samples.jsonl", "stack.toml", "toml")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"card.{end}" for end in endings]
    _, samples = read_samples(tmp_path / "card.samples.jsonl")
    kept = unpack(bundle, tmp_path / "state")
    assert samples == read_samples(kept.path("quick.samples.jsonl"))[1]
    for ending in (".toml", ".stack.toml"):
        texts = bundle.with_name(f"profile{ending}"), tmp_path / f"card{ending}"
        # standard errors of numbers at a bound differ between processors; all else is equal
        shown, found = (re.sub(r"\+-[\d.]+ %", "", text.read_text()) for text in texts)
        assert found == shown


def test_a_bundle_without_samples_is_shown_as_it_was_fitted(tmp_path: Path) -> None:
    whole = ROOT / "results" / "nvidia-h100-80gb-hbm3" / "2026-11-27" / "card.tar.gz"
    there = unpack(whole, tmp_path)
    there.path("quick.samples.jsonl").unlink()
    there.pack(tmp_path / "full.tar.gz")
    assert "28 of " in str(validate(from_bundle=tmp_path / "full.tar.gz"))
    with pytest.raises(InputError, match="holds no calibration"):
        calibrate(str(tmp_path / "card.toml"), from_bundle=str(tmp_path / "full.tar.gz"))


def test_units_are_in_the_order_of_their_worth() -> None:
    names = [unit.name for unit in all_units("cuda:0")]
    assert names[:3] == ["facts", "ceilings", "calibration"]
    assert names[3:13] == [f"point {name}" for name in BY_USE]
    assert sum(unit.short or unit.seconds for unit in all_units("cuda:0")) < 20 * 60
    timed = {name.split()[1] for name in names if name.startswith("point")}
    assert timed == set(IMPLEMENTATIONS) - {"draft", "cascade"}


def test_a_worker_does_what_standard_input_names(tmp_path: Path) -> None:
    """Without a GPU kernels are interpreted; ``make.py gpu --device cpu`` rehearses all units."""
    pytest.importorskip("torch")
    names = ("facts", "kernels gather", "kernels topk")
    command = [sys.executable, "-m", "kvsim.validate.session.work", "cpu", str(tmp_path)]
    log = tmp_path / "said.log"
    asked = [json.dumps({"unit": name, "form": "short", "log": str(log)}) + "\n" for name in names]
    done = subprocess.run(
        command, input="".join(asked), capture_output=True, text=True, timeout=200
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert said == [{"error": ""}] * len(names), log.read_text()
    for name in names:
        result = SessionState(tmp_path).read(name)
        assert result and result.get("passed", True), name
