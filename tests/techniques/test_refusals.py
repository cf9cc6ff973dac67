"""What terms refuse beside each other, and what a clause without layers may say."""

import pytest

from kvsim.errors import InputError
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.report import lists
from kvsim.report.predict import predict_points
from kvsim.techniques import Technique, parse
from kvsim.techniques.notation import terms

WHERE = Deployment(load_model("llama3-8b"), load_hardware("h100"), load_stack("fused"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h2o + mikv", "what h2o drops"),
        ("snapkv + mikv", ""),
        ("streamingllm + mikv", ""),
        ("mikv", ""),
    ],
)
def test_mikv_keeps_what_it_ranks(text: str, words: str) -> None:
    said = parse(text).refuses(WHERE)
    assert words in said if words else "what" not in said


def test_a_clause_without_layers_is_for_drafting_alone() -> None:
    assert parse("0-15: kivi; 16-: full; selfdraft:gamma=2").refuses(WHERE) is not None
    with pytest.raises(InputError, match="only contain drafting"):
        parse("0-15: kivi; 16-: full; offload")


@pytest.mark.parametrize(
    ("model", "spec", "lacks"),
    [
        ("llama3-8b", "mtp", True),
        ("llama3-8b", "mtp:gamma=0", False),
        ("llama3-8b", "eagle:acceptance=0.5", False),
        ("deepseek-v3", "mtp", False),
        ("qwen3.5-35b-a3b", "mtp", False),
        ("kimi-k2", "mtp", True),
    ],
)
def test_prediction_modules_are_not_invented(model: str, spec: str, lacks: bool) -> None:
    where = Deployment(load_model(model), load_hardware("h200"), load_stack("fused"))
    technique = parse(spec)
    assert ("no MTP modules" in technique.refuses_released(where)) == lacks
    assert not technique.refuses(where), "a real run may have random modules"


@pytest.mark.parametrize("name", terms())
def test_every_part_can_be_looked_up(name: str) -> None:
    found = lists.find("techniques", name)
    assert isinstance(found, dict) and found["name"] == name and found["summary"]


def test_presets_alone_are_listed() -> None:
    listed = [row["name"] for row in lists.find("techniques", "") if isinstance(row, dict)]
    assert {name for name in terms() if name in listed} == {
        k for k, v in terms().items() if v.preset
    }


@pytest.mark.parametrize("batches", [[1], [7], [1, 8, 7], [16, 3]])
@pytest.mark.parametrize("spec", ["flexgen", "offload:schedule=column", "fastdecode"])
def test_defaults_run_at_every_batch(spec: str, batches: list[int]) -> None:
    """Each batch has the answer that it has alone."""
    where = Deployment(load_model("opt-6.7b"), load_hardware("t4"), load_stack("flexgen"))
    together = predict([parse(spec)], where, batches)
    alone = [predict([parse(spec)], where, [batch])[0] for batch in batches]
    assert together == alone


def predict(techniques: list[Technique], where: Deployment, batches: list[int]) -> list[float]:
    rows = predict_points(where, techniques, batches, [512], [32]).rows
    return [row["tpot_s"] for row in rows]
