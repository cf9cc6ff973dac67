"""ShadowKV run for real: chunks as the paper chooses them, keys of low rank, nothing else lost."""

import pytest
import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques import parse
from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.composed import Composed
from kvsim.validate.run import Generation
from kvsim.validate.techniques.shadowkv import Lowrank
from tests.support.decoders import decoder, prompts
from tests.support.naive_caches import assert_like_naive
from tests.support.runs import assert_same, complete
from tests.validate.test_impl_eviction import Choosing

CHUNK, CHOSEN = 4, 2
EXACT = "rank=31"  # of 32 numbers: exact for prompts of up to 31 tokens


class NaiveShadowkv(Choosing):
    """The chunk least like its mean, two that the mean promises most of, and all since then."""

    def store_prompt(self, layer: int, k: Tensor, v: Tensor) -> None:
        super().store_prompt(layer, k, v)
        self.prompts = {**getattr(self, "prompts", {}), layer: [x.clone() for x in self.k[layer]]}

    def attend(self, layer: int, x: Tensor, q: Tensor, k: Tensor, v: Tensor, step: Pass) -> Tensor:
        self.queries = q
        return super().attend(layer, x, q, k, v, step)

    def kept(self, layer: int, i: int, g: int, new: int) -> list[int]:
        keys = self.prompts[layer][i][g]
        chunks = list(keys.split(CHUNK))
        means = torch.stack([chunk.mean(0) for chunk in chunks])
        like = [
            torch.cosine_similarity(c, m[None]).min() for c, m in zip(chunks, means, strict=True)
        ]
        outlier = int(torch.stack(like).argmin())
        others = [n for n in range(len(chunks)) if n != outlier]
        shared = self.queries.shape[1] // self.k[layer][i].shape[0]
        heads = self.queries[i, g * shared : (g + 1) * shared, 0]
        shares = (heads @ means[others].T / keys.shape[1] ** 0.5).softmax(1).max(0).values
        order = sorted(range(len(others)), key=lambda n: -float(shares[n]))
        if len(others) > CHOSEN:
            taken, left = (float(shares[order[n]]) for n in (CHOSEN - 1, CHOSEN))
            self.decide(i, new, taken, left)
        chosen = sorted([outlier, *(others[n] for n in order[:CHOSEN])])
        tokens = [n for c in chosen for n in range(c * CHUNK, c * CHUNK + CHUNK) if n < len(keys)]
        return [*tokens, *range(len(keys), new + 1)]


@pytest.mark.parametrize("lengths", [(31, 31), (10, 10), (5,), (24,)])
def test_chunks_are_chosen_by_their_means(lengths: tuple[int, ...]) -> None:
    text = f"shadowkv:budget={CHUNK * CHOSEN + 1},chunk={CHUNK},outliers=1,{EXACT}"
    assert_like_naive(complete(text, prompts(*lengths), 16), NaiveShadowkv)


@pytest.mark.parametrize("lengths", [(31, 31, 31), (5,), (30,), (2,)])
@pytest.mark.parametrize(
    "settings", ["budget=400,chunk=4,outliers=2", "budget=8,chunk=8,outliers=99"]
)
def test_every_chunk_and_the_whole_rank_give_full_kvs_tokens(
    settings: str, lengths: tuple[int, ...]
) -> None:
    assert_same(f"shadowkv:{settings},{EXACT}", "full", prompts(*lengths), 12)


def test_no_product_of_that_rank_is_closer_to_the_prompts_keys() -> None:
    """Eckart and Young: what is lost is the sum of the squares of the other singular values."""
    run = Generation(decoder("llama"), parse("shadowkv:rank=8,chunk=4"), prompts(40), 2)
    with torch.inference_mode():
        run.start()
        assert isinstance(run.impl, Composed)
        kv = run.impl.layers[1].kv
        assert isinstance(kv, Lowrank)
        full = Generation(decoder("llama"), parse("full"), prompts(40), 2)
        full.start()
        keys = full.impl.layers[1].kv.prompt(40)[0]  # with positions
        slots = torch.arange(40).expand(1, 2, -1)
        lost = (kv.restored(slots) - keys).square().sum().item()
        cos, sin = run.impl.decoder.turns(slots[0, :1]) or (torch.ones(1), torch.zeros(1))
        half = keys.shape[3] // 2
        before = keys * cos - torch.cat([-keys[..., half:], keys[..., :half]], 3) * sin
        sizes = torch.linalg.svdvals(before[0].transpose(0, 1).flatten(1).double())
    run.impl.shutdown()
    assert lost == pytest.approx(sizes[8:].square().sum().item(), rel=1e-4)
    assert lost > 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("landmarks", "run shadowkv"),
        ("landmarks + place:values_host=1", "run shadowkv"),
        ("landmarks:chunk=4 + lowrank:rank=8", "has values on the host"),
        ("quest:page=4,dense=0 + lowrank:rank=8 + place:values_host=1", "single rows of lowrank"),
        ("quest:page=4,dense=0 + place:values_host=1", "without values on the host"),
    ],
)
def test_pieces_that_do_not_run_alone_are_named(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Generation(decoder("llama"), parse(text), prompts(20), 4)
