"""``kvsim validate --plan``: a plan that differs by layer, run beside full KV."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvsim.quality.planfile import read_plan
from kvsim.report.validate import PlanRun, write_answer
from kvsim.techniques import parse
from kvsim.validate.counts.expected import RandomPrompts
from kvsim.validate.planned import MeasuredLoss, measure_loss
from kvsim.validate.quality.settings import Reading
from tests.support.commands import run
from tests.support.decoders import CONFIGS, decoder, prompts
from tests.support.envelope import answer_in

MIXED = "0-0: full; 1-2: kivi:bits=2,group=16,residual=16"
WORK = {"batch": 2, "prompt": 40, "generate": 6}


def plan(folder: Path, **changes: Any) -> str:
    """A plan of the small Llama as ``kvsim plan --json`` prints it."""
    config = folder / "config.json"
    config.write_text(CONFIGS["llama"].to_json_string(use_diff=False))
    packed = {"bits": 2, "group": 16, "residual": 16}
    layers = [
        {"first": 0, "count": 1, "technique": "full", "params": {}},
        {"first": 1, "count": 2, "technique": "kivi", "params": packed},
    ]
    quality = {"evidence": "measured", "unit": "relative perplexity",
               "loss": 0.02, "low": 0.01, "high": 0.05}  # fmt: skip
    content = {"choice": {"layers": layers}, "predicted": {"model": str(config), **WORK},
               "quality": quality} | changes  # fmt: skip
    file = folder / "plan.json"
    file.write_text(json.dumps(content))
    return str(file)


def test_a_mixed_plan_is_run_beside_full_kv(tmp_path: Path) -> None:
    result = run("validate", "--plan", plan(tmp_path), "--json")
    assert result.code == 0, result.err
    found = answer_in(result.out)
    assert found["technique"] == str(parse(MIXED))
    assert {m["name"]: m["measured"] > 0 for m in found["times"]} == dict.fromkeys(
        ("ttft_s", "tpot_s", "speedup", "resident_B"), True
    )
    resident = next(m for m in found["times"] if m["name"] == "resident_B")
    assert resident["predicted"] == pytest.approx(resident["measured"], rel=0.03)
    assert [m["predicted"] for m in found["times"] if m["name"] != "resident_B"] == [None] * 3
    assert [text.partition(":")[0] for text in found["left_out"]] == ["loss", "predicted times"]
    assert (found["batch"], found["prompt"], found["generate"]) == tuple(WORK.values())


def test_what_the_plan_gives_up_is_measured_on_a_text() -> None:
    reading = Reading(2, 40, 12)
    texts = prompts(reading.length, reading.length)
    lossless = measure_loss(decoder("llama"), parse("full"), reading, texts)
    assert lossless == MeasuredLoss(0.0, 0.0)
    packed = measure_loss(decoder("llama"), parse(MIXED), reading, texts)
    assert packed.divergence > 1e-6


def test_the_loss_is_held_against_the_plans_interval_in_its_own_unit(tmp_path: Path) -> None:
    chosen = read_plan(plan(tmp_path))
    work = RandomPrompts(**WORK)

    def ran(relative: float, divergence: float = 0.1, **changes: Any) -> PlanRun:
        loss = MeasuredLoss(relative, divergence)
        return PlanRun(replace(chosen, **changes), "title", work, loss, [])

    assert ran(0.049).holds is True
    assert ran(0.051).holds is False
    assert "ABOVE" in write_answer(ran(0.051)).verdict
    assert ran(0.01, unit="relative score").holds is None
    assert "not compared" in write_answer(ran(0.01, unit="relative score")).verdict
    assert ran(0.0, 1e-6, technique=parse("full")).holds is True
    assert ran(0.0, 1e-2, technique=parse("full")).holds is False


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"predicted": None}, "predicted is 'None'; expected what `kvsim plan --json` prints"),
        ({"predicted": {"model": 3, **WORK}}, "model is '3'; expected a text"),
        ({"predicted": {"model": "llama2-7b", **WORK, "batch": 0}}, "batch is '0'"),
        ({"quality": {"evidence": "x", "unit": "y", "loss": "z"}}, "loss is 'z'"),
        ({"choice": {"layers": []}}, "no choice.layers"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    result = run("validate", "--plan", plan(tmp_path, **changes))
    assert result.code == 2
    assert told in result.err
    assert result.err.count("\n") == 1


def test_a_plan_of_more_layers_than_the_model_has_is_refused(tmp_path: Path) -> None:
    layers = [
        {"first": 0, "count": 9, "technique": "full", "params": {}},
        {"first": 9, "count": 2, "technique": "fp8", "params": {}},
    ]
    result = run("validate", "--plan", plan(tmp_path, choice={"layers": layers}))
    assert result.code == 2
    assert result.err.count("\n") == 1
