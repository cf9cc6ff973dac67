"""kvsim calibrate --device: killed at random it loses little; bad input is one line, at once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvsim.api.calibrations import check_place, check_same
from kvsim.errors import InputError
from tests.support.commands import line
from tests.support.places import ROOT

torch = pytest.importorskip("torch")

KILLS = 20
SCRIPT = ROOT / "tests" / "support" / "killed_calibration.py"


def test_killed_at_random_moments_it_goes_on_and_never_leaves_half_a_profile(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-I", str(SCRIPT), str(tmp_path), str(KILLS)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr  # a half-written profile or stack would not load
    *kills, last = [json.loads(text) for text in run.stdout.splitlines()]
    assert len(kills) == KILLS
    for kill in kills:
        assert kill["after"][: len(kill["before"])] == kill["before"]
        assert not set(kill["begun"]) & set(kill["before"])  # what is finished is not repeated
        assert len(set(kill["begun"]) - set(kill["after"])) <= 1
    assert any(kill["begun"] and not kill["profile"] for kill in kills)
    assert last["code"] == 0 and len({name.split()[0] for name in last["after"]}) >= 5


def kvsim(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvsim", "calibrate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cuda:0", "--out", "F.toml"], "PyTorch sees no GPU; try --device cpu"),
        (["--device", "tpu", "--out", "F.toml"], "expected cpu, cuda or cuda:N"),
        (
            ["--device", "cpu", "--out", "F.json"],
            "--out: got 'F.json'; expected a name that ends with .toml",
        ),
        (
            ["--out", "F.toml"],
            "expected one of --device cpu|cuda:N, --from-run LOG, --from-ops F.csv",
        ),
        (
            ["--device", "cpu", "--from-run", "x", "--out", "F.toml"],
            "give either --device or --from-run, not both",
        ),
        (
            ["--from-run", "x", "--quick", "--out", "F.toml"],
            "--quick: has no effect without --device",
        ),
        (["--from-run", "x", "--out", "F.toml"], "--from-run needs --model and --gpu"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "cuda:0" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    assert said in line("calibrate", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_profile_of_another_device_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "F.toml"
    shipped = ROOT / "kvsim/hwprofiles" / "h100.toml"
    out.write_bytes(shipped.read_bytes())
    with pytest.raises(InputError, match=r"is a profile of .*H100.*, this is my CPU"):
        check_same(out, "my CPU")
    out.write_text("not toml")
    with pytest.raises(InputError, match="not valid TOML"):
        check_same(out, "my CPU")
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    with pytest.raises(InputError, match="is a folder"):
        check_place(folder)


def test_neither_command_needs_what_plans_and_pages_do(tmp_path: Path) -> None:
    """A machine with a GPU has PyTorch, and often nothing else."""
    script = (
        "import sys\n"
        "for name in ('pulp', 'highspy', 'plotly', 'pandas', 'pyarrow', 'numba'):\n"
        "    sys.modules[name] = None\n"
        "from kvsim.cli.app import main\n"
        "main()\n"
    )
    small = ["--layers", "1", "--techniques", "full", "--prompt", "8", "--generate", "2"]
    for arguments, code in (
        (["validate", *small, "--json"], 0),
        (["calibrate", "--device", "cuda:7", "--out", str(tmp_path / "F.toml")], 2),
    ):
        command = [sys.executable, "-c", script, *arguments]
        run = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert run.returncode == code, run.stderr
        assert "Traceback" not in run.stderr
