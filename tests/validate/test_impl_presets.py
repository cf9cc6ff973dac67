"""Newer techniques, each against its paper's algorithm put down in plain words."""

import pytest
import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques import parse
from kvsim.techniques.papers.kvquant import Kvquant as Settings
from kvsim.validate.counter import NULL_COUNTER
from kvsim.validate.model.architecture import rotate
from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.normal import levels
from kvsim.validate.parts.store import CacheRoom
from kvsim.validate.run import Generation
from kvsim.validate.techniques.kvquant import Kvquant
from kvsim.validate.techniques.turboquant import Levels
from tests.support.decoders import decoder, prompts
from tests.support.naive_caches import assert_like_naive
from tests.support.runs import assert_same, assert_same_run, complete
from tests.validate.test_impl_counts import counted, short
from tests.validate.test_impl_eviction import Choosing

PAGE, PAGES = 4, 3


class NaiveQuest(Choosing):
    """The newest page, and the two others whose bounds promise most to a head of the group."""

    def attend(self, layer: int, x: Tensor, q: Tensor, k: Tensor, v: Tensor, step: Pass) -> Tensor:
        self.queries = q
        return super().attend(layer, x, q, k, v, step)

    def kept(self, layer: int, i: int, g: int, new: int) -> list[int]:
        keys = self.k[layer][i][g]
        shared = self.queries.shape[1] // self.k[layer][i].shape[0]
        heads = self.queries[i, g * shared : (g + 1) * shared, 0]
        promised = []
        for first in range(0, new - new % PAGE, PAGE):
            page = keys[first : first + PAGE]
            low, high = page.min(0).values, page.max(0).values
            promised.append(float(torch.maximum(heads * low, heads * high).sum(1).max()))
        best = sorted(range(len(promised)), key=lambda page: -promised[page])[: PAGES - 1]
        if len(promised) > PAGES - 1:
            ordered = sorted(promised, reverse=True)
            self.decide(i, new, ordered[PAGES - 2], ordered[PAGES - 1])
        pages = sorted([*best, new // PAGE])
        return [n for page in pages for n in range(page * PAGE, page * PAGE + PAGE) if n <= new]


@pytest.mark.parametrize("lengths", [(90, 90), (10, 10), (5,), (25,), (24,)])
def test_quest_attends_to_the_pages_that_promise_most(lengths: tuple[int, ...]) -> None:
    text = f"quest:budget={PAGE * PAGES + 1},page={PAGE},dense=0"
    assert_like_naive(complete(text, prompts(*lengths), 20), NaiveQuest)


class NaiveDuoattention(Choosing):
    """The first head keeps every token, the second the first 4 and the latest 8."""

    def attend_prompt(self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: Pass) -> Tensor:
        out, shared = torch.empty_like(q), q.shape[1] // k.shape[1]
        for h in range(q.shape[1]):
            for place in range(q.shape[2]):
                kept = self.kept(layer, 0, h // shared, place)
                keys, values = k[:, h // shared, kept], v[:, h // shared, kept]
                scores = (keys @ q[:, h, place, :, None]) / q.shape[3] ** 0.5
                out[:, h, place] = (scores.softmax(1) * values).sum(1)
        return out

    def kept(self, layer: int, i: int, g: int, new: int) -> list[int]:
        return [n for n in range(new + 1) if g == 0 or n < 4 or n > new - 8]


@pytest.mark.parametrize("lengths", [(40, 40), (10, 10), (5,), (12,), (11,)])
def test_duoattention_keeps_all_for_some_heads(lengths: tuple[int, ...]) -> None:
    text = "duoattention:retrieval=0.5,sink=4,recent=8"
    assert_like_naive(complete(text, prompts(*lengths), 20), NaiveDuoattention)


def test_duoattention_needs_whole_heads() -> None:
    with pytest.raises(InputError, match="of 2 heads; choose a multiple of 1/2"):
        Generation(decoder("llama"), parse("duoattention:retrieval=0.3"), prompts(20), 4)


def test_kvquant_keeps_outliers_and_packs_keys_without_their_positions() -> None:
    own = decoder("llama")
    m, generator = own.arch.model, torch.Generator().manual_seed(0)
    sizes = 2, m.kv_heads, m.head_dim, torch.float32, torch.device("cpu")
    kv = Kvquant(CacheRoom(Settings(4, 0.125), 40, NULL_COUNTER, *sizes, own.turns))
    before, values = torch.randn(2, 2, m.kv_heads, 30, m.head_dim, generator=generator)
    before[:, 1, :, 3] *= 50  # a channel
    keys = rotate(before, *own.turns(torch.arange(30)[None]) or ())
    kv.fill(keys, values)
    (wide_k, wide_v), width = kv.widen(30), m.kv_heads * m.head_dim
    for wide, rows, at in ((wide_k, before, 1), (wide_v, values, 3)):
        error = (wide - rows.transpose(1, 2).flatten(2)).abs()
        kept = kv.apart_from[at][:, :30].long()
        assert kept.shape[2] == width / 8
        assert error.gather(2, kept).max() < 0.05, "fp16"
        each = rows.transpose(1, 2).flatten(2).std((0, 1)) if at == 1 else 1.0
        assert (error / each).max() < 1, "a channel's spread widens no other's steps"
        assert error.median() < 0.1


def test_kvquant_with_more_bits_is_closer_to_full_kv() -> None:
    off = []
    for text in ("full", "kvquant:bits=4,outliers=0.125", "kvquant:bits=2,outliers=0.125"):
        run = complete(text, prompts(40, 40), 2)
        off.append(torch.stack([rows[1] for rows in run.logits]))
    near, far = ((off[0] - some).abs().max() for some in off[1:])
    assert 0 < 2 * near < far < 2


@pytest.mark.parametrize(
    ("bits", "published"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)]
)
def test_turboquant_distorts_as_published(bits: int, published: float) -> None:
    """Squared error of unit vectors: theorem 1 of the paper, digits by J. Max, 1960, table 1."""
    vectors = torch.randn(1, 1, 4000, 128, generator=torch.Generator().manual_seed(0))
    vectors /= vectors.norm(dim=-1, keepdim=True)
    codec = Levels(bits, 128)
    wide = codec.widen(codec.encode(vectors))
    assert (wide - vectors).square().sum(-1).mean().item() == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_levels_are_the_nearest(bits: int) -> None:
    table, borders = (torch.tensor(some) for some in levels(bits))
    numbers = torch.linspace(-4, 4, 801)
    off = (numbers[:, None] - table).abs()
    chosen = off.gather(1, torch.bucketize(numbers, borders)[:, None])[:, 0]
    least = off.min(1).values
    assert (chosen <= least + 1e-6).all()  # a number half-way, as processors round, goes either way
    assert (chosen != least).sum() <= 4


@pytest.mark.parametrize("text", ["turboquant:bits=8,group=16", "turboquant:bits=8,group=8"])
def test_a_rotated_cache_of_eight_bits_gives_nearly_full_kv(text: str) -> None:
    runs = []
    for technique in (text, "full"):
        run = complete(technique, prompts(40, 40), 2)
        runs.append(torch.stack([rows[1] for rows in run.logits]))
    assert 0 < (runs[0] - runs[1]).abs().max() < 0.2


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalogue's draft model is the toy model's first layer."""
    small = short("llama").arch.cut(1)
    monkeypatch.setattr("kvsim.validate.techniques.draft.load_architecture", lambda name: small)
    monkeypatch.setattr("kvsim.techniques.papers.draft.load_model", lambda name: small.model)


@pytest.mark.parametrize("beside", ["", " + fp8", " + grouped:bits=4,group=8"])
@pytest.mark.usefixtures("drafting")
def test_a_draft_model_is_as_stated(beside: str) -> None:
    text = f"draft:model=smollm2-135m,gamma=2,acceptance=0.5{beside}"
    result = counted(text, "llama", 1, 31, 9)
    assert [line for line in result.lines if not line.holds] == []
    passes = [line for line in result.lines if line.op in ("qkv", "attn", "out", "up", "down")]
    assert all(line.equal for line in passes if not (beside and line.op == "attn"))
    assert all(buffer.equal for buffer in result.buffers)
    assert {"draft weights", "draft embedding", "draft kv"} <= {b.name for b in result.buffers}


@pytest.mark.parametrize("lengths", [(40, 40, 40), (5,)])
@pytest.mark.usefixtures("drafting")
def test_a_draft_model_loses_nothing(lengths: tuple[int, ...]) -> None:
    assert_same("draft:model=smollm2-135m,gamma=3,acceptance=0.5", "full", prompts(*lengths), 16)


def test_a_draft_model_that_is_the_model_is_always_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """It catches up with drafts it has not read itself; else it would soon be wrong."""
    own = decoder("llama")
    monkeypatch.setattr("kvsim.validate.techniques.draft.load_architecture", lambda name: own.arch)
    monkeypatch.setattr("kvsim.validate.parts.heads.random_weights", lambda *_: own.weights)
    monkeypatch.setattr("kvsim.techniques.papers.draft.load_model", lambda name: own.arch.model)
    technique = parse("draft:model=smollm2-135m,gamma=3,acceptance=1")
    run = Generation(own, technique, prompts(40, 40), 21, keep=True)
    run.complete()
    full = Generation(own, parse("full"), prompts(40, 40), 21, keep=True)
    full.complete()
    assert_same_run(run, full)
    assert all(given == 4 for counts in run.yielded for given in counts)
