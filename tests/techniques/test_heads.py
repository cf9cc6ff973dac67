"""Heads that draft: who has one, and what is planned, said and refused without."""

import pytest

from kvsim.errors import InputError
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.planner.question import Admission
from kvsim.techniques import parse
from kvsim.techniques.heads import HEADS, lacks_head, read_draft_model
from tests.support.commands import run

OWN = ("eagle3", "me/head")


@pytest.mark.parametrize(
    ("technique", "model", "named", "known"),
    [
        *((method, "qwen2.5-7b", ("", ""), False) for method in HEADS),
        ("eagle3", "qwen3-8b", ("", ""), True),
        ("eagle3", "llama3.1-8b", ("", ""), True),  # trained for the tuned one
        ("medusa", "vicuna-7b-v1.3", ("", ""), True),
        ("eagle3", "qwen2.5-7b", OWN, True),
        ("dflash", "qwen2.5-7b", OWN, False),
        ("fp8+eagle3", "qwen2.5-7b", ("", ""), False),
        ("fp8+eagle3", "qwen2.5-7b", OWN, True),
        ("eagle3:gamma=0", "qwen2.5-7b", ("", ""), True),
        *((other, "qwen2.5-7b", ("", ""), True) for other in ("draft", "ngram", "suffix", "full")),
    ],
)
def test_only_known_or_named_heads_draft(
    technique: str, model: str, named: tuple[str, str], known: bool
) -> None:
    some, h100 = parse(technique), load_hardware("h100")
    d = Deployment(load_model(model), h100, load_stack("vllm"), draft_model=named)
    assert bool(lacks_head(some, d)) != known
    if len(some.terms) == 1:
        assert Admission(only=(some.name,)).has_drafter(some, d) == known


def test_a_named_head_is_admitted_without_more() -> None:
    d = Deployment(load_model("qwen2.5-7b"), load_hardware("h100"), load_stack("vllm"))
    assert not Admission().has_drafter(parse("eagle3"), d)
    own = Deployment(d.model, d.hardware, d.stack, draft_model=OWN)
    assert Admission().has_drafter(parse("eagle3"), own)
    said = Admission(only=("eagle3", "mtp")).describe_refusals(d)
    assert "--draft-model eagle3=NAME" in said and "mtp cannot run here" in said
    assert not Admission(only=("eagle3", "full")).describe_refusals(d)


@pytest.mark.parametrize(("named", "notes"), [("", 1), ("--draft-model eagle3=me/head", 0)])
def test_predict_notes_once_that_no_head_is_known(named: str, notes: int) -> None:
    asked = "predict --model qwen2.5-7b --gpu h100 --technique eagle3"
    text = run(*asked.split(), *named.split()).out
    assert text.count("head of qwen2.5-7b is known") == notes


@pytest.mark.parametrize("text", ["me/head", "eagle3=", "=me/head", "ngram=me/head", ""])
def test_what_is_no_head_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--draft-model"):
        read_draft_model(text)
