"""The functions that Python users call give what the command line gives."""

import inspect
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import kvsim
import kvsim.api
from kvsim.errors import InfeasibleError, InputError
from kvsim.options import PRESENTED, options_of
from kvsim.techniques.notation import presets, terms
from kvsim.techniques.papers.full import Full
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
    assert found.fields["limits"]["tpot"] == 0.05 and found.frame()["standing"][0] == "choice"


def test_a_plan_has_its_choice_as_attributes(tmp_path: Path) -> None:
    best = kvsim.plan(*CASE, **kvsim.Workload(prompt=4096, tpot="50ms"))
    assert best.choice.batch == best.fields["choice"]["batch"]
    assert best.ttft == best.fields["answer"]["figures"]["ttft_s"]
    assert best.tpot.p90 <= 0.05 and "batch" in repr(best.choice)
    best.save_report(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").stat().st_size > 10_000
    with pytest.raises(AttributeError, match="chooses nothing"):
        _ = kvsim.predict(*CASE).choice


def test_objects_stand_for_their_names() -> None:
    model, gpu = kvsim.Model("meta-llama/Llama-3.1-8B"), kvsim.GPU("NVIDIA H100 80GB HBM3")
    one = kvsim.predict(model, gpu, kvsim.Technique("kivi:bits=4"), batch=3)
    assert one.rows == kvsim.predict(*CASE, "kivi:bits=4", batch=3).rows
    config = {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 2, "vocab_size": 32000,
        "num_attention_heads": 32, "intermediate_size": 11008, "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }  # fmt: skip
    for own in (config, kvsim.Model(config)):
        found = kvsim.predict(own, "h100")
        assert found.rows[0]["model"] == "llama" and "--model config.json" in found.command


def test_a_technique_of_your_own_is_registered() -> None:
    class Mine(Full):
        name = "mine-of-a-test"

    with pytest.raises(InputError, match="extends Term"):
        kvsim.register_technique(int)  # type: ignore[arg-type]
    try:
        kvsim.register_technique(Mine)
        assert kvsim.predict(*CASE, "mine-of-a-test").rows[0]["technique"] == Mine.name
        with pytest.raises(InputError, match="is taken"):
            kvsim.register_technique(type("Other", (Full,), {"name": Mine.name}))
    finally:
        terms().pop(Mine.name, None), presets().pop(Mine.name, None)


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
    assert "of requests meet TTFT 2.00 s and TPOT 100 ms" in found.answer.verdict
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
        assert all(f"\n    {keyword} : " in function.__doc__ for keyword in keywords), name
    with pytest.raises(TypeError, match="bach"):
        kvsim.predict(*CASE, bach=1)


def test_what_the_command_refuses_is_refused() -> None:
    with pytest.raises(InputError, match="unknown model"):
        kvsim.predict("llama9", "h100")
    with pytest.raises(InputError, match="write 50ms or 50s"):
        kvsim.plan(*CASE, tpot=50)
    with pytest.raises(InfeasibleError, match="weights int4"):
        kvsim.plan("qwen2.5-32b", "a100-40g", prompt=4096, generate=256)


@pytest.mark.parametrize("name", dir(kvsim.api))
def test_what_is_public_says_what_it_takes_and_returns_with_an_example(name: str) -> None:
    public = getattr(kvsim.api, name)
    about = public.__doc__ or ""
    assert "Parameters\n" in about or "Attributes\n" in about
    assert "Examples\n" in about and ">>> " in about
    assert isinstance(public, type) or "Returns\n" in about
