"""What terms refuse beside each other, and what a clause without layers may say."""

import pytest

from kvsim.errors import InputError
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.techniques import parse

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
    with pytest.raises(InputError, match="for drafting alone"):
        parse("0-15: kivi; 16-: full; offload")
