"""The functions that Python users call give what the command line gives."""

import inspect
import shlex
import subprocess
import sys

import pytest

import kvsim
from kvsim.errors import InfeasibleError, InputError
from kvsim.options import PRESENTED, options_of
from tests.support.commands import run
from tests.support.envelope import answer_in

CASE = ("llama3.1-8b", "h100")


def test_nothing_is_imported_before_it_is_used() -> None:
    code = "import sys, kvsim; print([m for m in ('numpy', 'pandas', 'typer') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert set(kvsim.FUNCTIONS) < set(dir(kvsim))
    with pytest.raises(AttributeError, match="prediction_of"):
        _ = kvsim.prediction_of


def test_predict_is_the_command() -> None:
    found = kvsim.predict(*CASE, ["full", "kivi:bits=4"], batch=[1, 8], prompt="8k")
    again = answer_in(run(*found.command.split()[1:], "--json").out)
    assert found.envelope()["rows"] == again["rows"] and len(again["rows"]) == 4
    assert len(repr(found).splitlines()) <= 10
    assert found.answer.verdict in found._repr_html_().replace("&#x27;", "'")
    frame = found.frame()
    assert list(frame["batch"]) == [1, 8, 1, 8] and frame["params"][2].startswith("bits=4")
    assert len(found.figure().data) == 2


def test_plan_is_the_command() -> None:
    found = kvsim.plan(*CASE, prompt=4096, tpot="50ms", only=["full", "offload"])
    again = answer_in(run(*found.command.split()[1:], "--json").out)
    for part in ("choice", "predicted", "answer", "limits"):
        assert found.fields[part] == again[part]
    assert found.found.limits.tpot == 0.05 and found.frame()["standing"][0] == "choice"


def test_sweep_is_a_grid_of_predictions() -> None:
    grid = kvsim.sweep(*CASE, batch=range(1, 6), prompt=[1024, 4096])
    one = kvsim.predict(*CASE, batch=3, prompt=4096).rows[0]
    (same,) = [row for row in grid.rows if (row["batch"], row["prompt"]) == (3, 4096)]
    for key in ("ttft_s", "tpot_s", "output_tok_s", "gpu_bytes"):
        assert same[key] == pytest.approx(one[key], rel=1e-12)
    assert grid.frame().shape[0] == 10 and grid.figure().data


def test_simulate_is_the_command() -> None:
    found = kvsim.simulate("sample:chat", *CASE, ttft="2s", tpot="100ms")
    again = answer_in(run(*found.command.split()[1:], "--json").out)
    assert found.rows[0].items() <= again.items()
    assert "of requests meet TTFT 2s and TPOT 100ms" in found.answer.verdict
    assert len(found.figures()) >= 7


def test_capacity_is_the_command() -> None:
    asked = {"gpus": ["l40s"], "only": "full", "tp": 1}
    found = kvsim.capacity("sample:chat", "llama3-8b", ttft="2s", tpot=0.1, **asked)
    again = answer_in(run(*shlex.split(found.command)[1:], "--json").out)
    assert again == found.envelope() | {"command": again["command"]}


def test_every_command_has_a_function_with_its_options() -> None:
    for name in ("predict", "plan", "simulate", "capacity", "calibrate", "reproduce", "explore"):
        function = getattr(kvsim, name)
        keywords = set(inspect.signature(function).parameters)
        assert keywords == options_of(name).keys() - set(PRESENTED), name
        assert all(f"\n    {keyword}\n" in function.__doc__ for keyword in keywords), name
    with pytest.raises(TypeError, match="bach"):
        kvsim.predict(*CASE, bach=1)


def test_what_the_command_refuses_is_refused() -> None:
    with pytest.raises(InputError, match="unknown model"):
        kvsim.predict("llama9", "h100")
    with pytest.raises(InputError, match="write 50ms or 50s"):
        kvsim.plan(*CASE, tpot=50)
    with pytest.raises(InfeasibleError, match="weights int4"):
        kvsim.plan("qwen2.5-32b", "a100-40g", prompt=4096, generate=256)
