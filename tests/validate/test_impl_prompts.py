"""Prompts that are read one after another: each whole, or in chunks of its own."""

from unittest.mock import patch

import pytest

pytest.importorskip("torch")

import torch

from kvsim.errors import InputError
from kvsim.techniques import parse
from kvsim.validate.model.attention import Pass
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.registry import IMPLEMENTATIONS, SmallRun, small_settings
from kvsim.validate.run import Generation
from tests.support.decoders import decoder, prompts
from tests.support.runs import TOLERANCE, assert_same_run, logits_of

LENGTHS = (41, 41, 41)
TOGETHER = {"fastdecode", "infinigen", "kvpr", "offload"}
"""Rows on the host: a chunk of all prompts leaves as one copy."""
CODED = {
    "fp8", "gear", "kivi", "kvquant", "mikv", "quantspec", "shadowkv", "specache", "turboquant",
    "zipcache",
}  # fmt: skip
"""A number half-way between two codes gets another one where chunks round otherwise: rare ties."""


BY_CHUNK = {"flexprefill", "minference"}
"""A chunk's last queries choose what it reads."""


def run(text: str, chunk: int) -> tuple[Generation, list[Pass]]:
    """A complete run, and the passes that its prompt took."""
    seen: list[Pass] = []
    step = Decoder.step

    def noted(self: Decoder, *arguments: object) -> Pass:
        made = step(self, *arguments)  # type: ignore[arg-type]
        seen.append(made)
        return made

    with patch.object(Decoder, "step", noted):
        made = Generation(
            decoder("llama"), parse(text), prompts(*LENGTHS), 6, chunk=chunk, keep=True
        )
        made.complete()
    return made, [one for one in seen if one.kind == "prefill"]


@pytest.mark.parametrize("name", sorted(IMPLEMENTATIONS))
def test_prompts_have_their_own_chunks(name: str) -> None:
    settings = small_settings(name, SmallRun(3, 41, 16, 16))
    if not settings:
        pytest.skip("its settings do not suit this model")
    text = f"{name}:{settings[0]}".rstrip(":")
    whole, _ = run(text, 8192)
    parted, passes = run(text, 24)
    alone = {len(one.starts) == 1 for one in passes}
    assert alone == {name not in TOGETHER}
    if name in BY_CHUNK:
        return
    if name not in CODED:
        assert_same_run(parted, whole)
        return
    off = [apart(parted, whole, i) for i in range(whole.batch)]
    assert max(float(one[0]) for one in off) < TOLERANCE  # the prompt attends to what is not coded
    assert torch.cat(off).median() < TOLERANCE


def apart(run: Generation, other: Generation, sequence: int) -> torch.Tensor:
    """By how much logits differ, for each token until the first that is another one."""
    differs = (run.tokens[sequence] != other.tokens[sequence]).nonzero()
    until = int(differs[0]) + 1 if len(differs) else len(run.tokens[sequence])
    off = logits_of(run, sequence)[:until] - logits_of(other, sequence)[:until]
    return off.abs().nan_to_num(torch.inf).amax(-1)


def test_prompts_of_unlike_lengths_are_refused_in_one_line() -> None:
    with pytest.raises(InputError, match=r"^prompts: got 5 and 7 tokens; .* one length;.*$"):
        Generation(decoder("llama"), parse("full"), prompts(5, 7), 2)
