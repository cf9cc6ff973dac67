"""Real weights: SmolLM2-135M against transformers, and what techniques do to it."""

from pathlib import Path
from typing import Any

import torch

from kvsim.techniques import parse
from kvsim.validate.quality.runs import Forced
from kvsim.validate.run import Generation
from tests.support.runs import assert_likeliest, logits_of
from tests.support.smollm2 import checkpoint, english, oracle, smollm2, tokeniser


def test_logits_and_tokens_are_those_of_transformers() -> None:
    given = [english(400)[:70], english(400)[200:333]]
    run = Generation(smollm2(), parse("full"), given, 64, chunk=80, keep=True)
    tokens = run.complete()
    for i, prompt in enumerate(given):
        ids = torch.tensor([prompt + tokens[i].tolist()])
        with torch.no_grad():
            expected = oracle()(ids).logits[0, len(prompt) - 1 : -1]
        assert_likeliest(logits_of(run, i), tokens[i], expected)


def test_tokens_of_a_text_are_those_of_transformers() -> None:
    import transformers

    path = Path(checkpoint()[1].where)
    theirs: Any = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    text = "In 2024, 1,234 cats;\n\n  it's 'quoted' — naïve\tcode = f(x) # ✓ 日本\r\n"
    assert tokeniser()(text) == theirs(text)["input_ids"]
    assert tokeniser().backend.decode(tokeniser()(text))
    assert (tokeniser()(""), tokeniser().start) == ([], ())


def perplexity(text: str, ids: list[int], prompt: int) -> float:
    run = Forced(smollm2(), parse(text), [ids], prompt)
    run.complete()
    return run.perplexity


def test_one_bit_is_usable_with_specaches_zero_point_alone() -> None:
    ids, shared = english(161), "bits=1,group=32,residual=32"
    own = perplexity(f"kivi:{shared}", ids, 128)
    paper = perplexity(f"specache:{shared},k=64", ids, 128)
    unaided = perplexity(f"specache:{shared},k=0", ids, 128)
    assert own > 50 * paper
    assert own > 10 * unaided  # the zero point by itself, without a fetched pair
