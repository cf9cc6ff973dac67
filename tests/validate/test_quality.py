"""Quality, attention kept and drafts accepted, against transformers and plain counting."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.techniques import parse
from kvsim.techniques.technique import Technique
from kvsim.traces import attention
from kvsim.traces.attention import GAMMAS, AttentionTrace, Retrieval
from kvsim.validate.counts.check import sort_runnable
from kvsim.validate.parts.composed import Composed
from kvsim.validate.quality.measure import PlantedFacts, measure
from kvsim.validate.quality.runs import (
    WATCHED,
    Forced,
    Watched,
    accepted,
    measure_acceptance,
    named,
    powers,
    reached,
)
from kvsim.validate.quality.settings import Reading, list_default_techniques, sort_out, widest_run
from kvsim.validate.quality.text import read_text, windows
from kvsim.validate.run import Generation
from kvsim.validate.techniques.specache import Pairs
from tests.support.decoders import decoder, oracle_attentions, oracle_logits, prompts

PROMPT, SCORED = 60, 12
LENGTH = PROMPT + 1 + SCORED


def forced(text: str, texts: list[list[int]], truth: list[Tensor] | None = None) -> Forced:
    technique = parse(text)
    kind = WATCHED.get(technique.name, Composed)
    run = Forced(decoder("llama"), technique, texts, PROMPT, truth, kind)
    run.complete()
    return run


def test_perplexity_is_that_of_transformers() -> None:
    texts = prompts(LENGTH, LENGTH)
    losses = []
    for text in texts:  # the token behind the prompt is given
        logits = oracle_logits("llama", text[: PROMPT + 1], text[PROMPT + 1 :])
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(text[PROMPT + 1 :])))
    run = forced("full", texts)
    assert run.perplexity == pytest.approx(float(torch.stack(losses).mean().exp()), rel=1e-4)
    assert len(run.kept) == SCORED
    assert torch.equal(run.tokens, torch.tensor(texts)[:, PROMPT:])


def test_divergence_is_from_full_precision() -> None:
    texts = prompts(LENGTH, LENGTH)
    truth = forced("full", texts).kept
    run = Forced(decoder("llama"), parse("streamingllm:sink=1,recent=5"), texts, PROMPT, truth)
    shares: list[Tensor] = []
    score = run._score

    def spy(logits: Tensor, place: int) -> None:
        shares.append(logits.softmax(-1))
        score(logits, place)

    run._score = spy  # type: ignore[method-assign]
    run.complete()
    p, q = torch.stack(truth).exp(), torch.stack(shares)
    plainly = sum(float(a * (a / b).log()) for a, b in zip(p.flatten(), q.flatten(), strict=True))
    assert run.divergence == pytest.approx(plainly / (2 * SCORED), rel=1e-4)
    assert run.divergence > 0.01
    for lossless in ("full", "specache:group=16,residual=16,k=500"):  # but for their rounding:
        assert forced(lossless, texts, truth).divergence < 1e-6  # logarithms near 8 end at 5e-7


def test_mass_of_the_largest_is_that_of_transformers_attention() -> None:
    texts = prompts(LENGTH, LENGTH)
    impl: Any = forced("full", texts).impl
    assert powers(PROMPT) == [1, 2, 4, 8, 16]
    found = torch.stack([oracle_attentions("llama", text[:-1]) for text in texts])[..., PROMPT:, :]
    largest = found.sort(-1, descending=True).values.cumsum(-1)
    expected = largest.mean((0, 2, 3))[:, torch.tensor(powers(PROMPT)) - 1]
    assert impl.noted_means() == pytest.approx(expected.double(), abs=1e-5)
    assert [powers(n)[-1] for n in (1, 2, 3, 4, 1024)] == [1, 1, 1, 2, 512]


def test_prefetch_is_compared_with_the_true_attention(monkeypatch: Any) -> None:
    """In the first layer, whose queries and keys no approximation has touched."""
    (text,) = prompts(LENGTH)
    fetched: list[Tensor] = []
    attend = Pairs.attend

    def spy(self: Pairs, *rest: Any) -> Tensor:
        if self.layer == 0 and rest[-1].kind == "decode":
            fetched.append(self.index[0].clone())
        return attend(self, *rest)

    monkeypatch.setattr(Pairs, "attend", spy)
    impl: Any = forced("specache:bits=1,group=16,residual=16,k=7", [text]).impl
    assert isinstance(impl, Watched)
    true = oracle_attentions("llama", text[:-1])[0, :, PROMPT:].view(2, 2, SCORED, -1).mean(1)
    pairs, mass = [], []
    for step, index in enumerate(fetched):
        for head in range(2):
            shares = true[head, step, : PROMPT + step]  # all before the token itself
            best, chosen = set(shares.topk(7).indices.tolist()), set(index[head].tolist())
            pairs.append(len(best & chosen) / 7)
            held = [sum(float(shares[i]) for i in some) for some in (chosen, best)]
            mass.append(held[0] / held[1])
    assert len(fetched) == SCORED
    expected = [sum(pairs) / len(pairs), sum(mass) / len(mass)]
    assert impl.noted_means()[0].tolist() == pytest.approx(expected, abs=1e-5)
    assert expected[0] < expected[1] < 1


def test_probes_are_compared_with_every_query() -> None:
    texts = prompts(LENGTH, LENGTH)
    every: Any = forced("zipcache:probe=1,salient=0.4", texts).impl
    assert every.noted_means().tolist() == [1.0] * 3
    some: Any = forced("zipcache:probe=0.1,salient=0.4", texts).impl
    many, probes = round(0.4 * PROMPT), some.layers[0].kv.probing.prompt.positions
    overlap = torch.zeros(3)
    for text in texts:
        seen = (
            oracle_attentions("llama", text[:PROMPT]).view(3, 2, 2, PROMPT, PROMPT).mean(2)
        )  # per KV head
        truth = seen.sum(2) / torch.arange(PROMPT, 0, -1)
        asked = seen[:, :, probes].sum(2)
        counts = (torch.arange(PROMPT) <= probes[:, None]).sum(0).clamp(min=1)
        for layer in range(3):
            for head in range(2):
                best = set(truth[layer, head].topk(many).indices.tolist())
                found = set((asked[layer, head] / counts).topk(many).indices.tolist())
                overlap[layer] += len(best & found) / many / 4
    assert some.noted_means().tolist() == pytest.approx(overlap.tolist(), abs=1e-6)
    assert overlap.max() < 1


@pytest.mark.parametrize("draft", ["streamingllm", "snapkv"])
def test_a_draft_that_keeps_everything_is_always_accepted(draft: str) -> None:
    for heat in (0.0, 1.0):
        text = f"magicdec:draft={draft},budget=300,gamma=2,acceptance=0.5"
        found = measure_acceptance(decoder("llama"), parse(text), prompts(50, 50), 100, heat)
        assert found
        assert found.technique == f"magicdec:draft={draft},budget=300"
        assert found.temperature == heat and found.rounds >= 6
        assert found.reached == tuple((1.0,) * gamma for gamma in GAMMAS)


def test_rounds_are_counted_by_gamma() -> None:
    assert reached([0, 1, 3, 3], 3) == (0.75, 0.5, 0.5)
    draft = parse("magicdec:draft=streamingllm,budget=8")
    found = measure_acceptance(decoder("llama"), draft, prompts(90, 90, 90, 90), 80, 0.0)
    assert found
    assert 0 < found.reached[0][0] < 1
    assert [len(row) for row in found.reached] == list(GAMMAS)
    few = measure_acceptance(decoder("llama"), parse("magicdec:budget=30"), prompts(40), 4, 0.0)
    assert few is None


def test_rounds_have_the_gamma_they_count_for() -> None:
    """Also where a buffer of 8 tokens has no room for many drafts."""
    most = parse("quantspec:group=8,residual=16").with_rounds(6)
    run = Generation(decoder("llama"), most, prompts(70, 70), 150)
    found = accepted(run)
    impl: Any = run.impl
    counted = [drafted for drafted in impl.drafted if drafted]
    assert {gamma: len(many) for gamma, many in found.items()} == {
        gamma: 2 * counted.count(gamma) for gamma in GAMMAS
    }
    assert min(map(len, found.values())) > 0
    yielded = [n for n, drafted in zip(run.yielded, impl.drafted, strict=True) if drafted]
    assert sum(map(sum, yielded)) == sum(sum(many) + len(many) for many in found.values())


def test_a_whole_measurement_is_a_trace(tmp_path: Path) -> None:
    asked = [
        parse(text)
        for text in (
            "kivi:group=16,residual=16", "specache:group=16,residual=16,k=9", "zipcache",
            "streamingllm:sink=4,recent=16",
            "quantspec:group=16,residual=32,gamma=3", "magicdec:budget=20",
        )
    ]  # fmt: skip
    settings, reading = sort_out(asked), Reading(2, PROMPT, SCORED)
    texts = windows(prompts(400)[0], 2, reading.length, ())
    about = {"model": "m", "weights": "w", "text": "t", "settings": reading.description}
    facts = PlantedFacts([t[:PROMPT] for t in texts], [t[PROMPT:] for t in texts], [range(2, 5)])
    *told, trace = measure(decoder("llama"), settings, reading, texts, about, facts)
    assert isinstance(trace, AttentionTrace)
    assert [str(line).split(": ")[0] for line in told] == [f"{i} of 12" for i in range(1, 13)]
    assert trace.retrieval == Retrieval(2, 0.0)  # random weights find nothing
    assert [q.found for q in trace.quality] == [None, None, None, 0.0, None]
    assert [q.technique for q in trace.quality] == [
        "kivi:bits=2,group=16,residual=16",
        "specache:bits=2,group=16,k=9,residual=16,speculative=true",
        "zipcache:salient=0.6,high=4,low=2,probe=0.1,window=100",
        "streamingllm:sink=4,recent=16",
        "quantspec:group=16,residual=32,weight_bits=4",
    ]
    assert all(str(parse(q.technique)).startswith(q.technique[:8]) for q in trace.quality)
    assert trace.quality[4].kl < trace.quality[0].kl / 100  # eight bits against two
    assert (trace.tokens, trace.layers, len(trace.acceptance)) == (2 * LENGTH, 3, 4)
    path = tmp_path / "trace.json"
    attention.write(path, trace)
    assert attention.load(path) == trace


def rehearsed(name: str, techniques: list[Technique]) -> tuple[list[Technique], list[str]]:
    arch = decoder(name).arch
    machine = Deployment(arch.model, load_hardware("a6000"), load_stack("kvsim"))
    reading = Reading(2, PROMPT, SCORED)
    able, refused = sort_runnable(arch, techniques, lambda t: widest_run(t, reading), machine)
    return able, list(map(str, refused))


def test_what_is_measured_by_default_can_be_run() -> None:
    techniques = list_default_techniques(decoder("llama").arch.model, PROMPT)
    assert rehearsed("llama", techniques) == (techniques, [])
    settings = sort_out(techniques)
    names = [named(t) for t in settings.lossy]
    assert len(set(names)) == len(names) > 25
    assert [t.name for t in settings.drafts] == ["quantspec", "magicdec", "magicdec"]


def test_what_a_model_does_not_allow_is_told_before_anything_is_loaded() -> None:
    able, refused = rehearsed(
        "mistral", list_default_techniques(decoder("mistral").arch.model, PROMPT)
    )
    assert {t.name for t in able} == {"offload", "kcache", "streamingllm", "magicdec"}
    assert all("sliding windows" in why for why in refused) and len(refused) > 10
    able, refused = rehearsed("llama", [parse("quantspec"), parse("kivi:group=16,residual=16")])
    assert [t.name for t in able] == ["kivi"]
    assert refused[0].startswith("hierarchical: group=128 does not divide the head dim 16")


def test_settings_that_lose_nothing_or_are_not_implemented_are_refused() -> None:
    for text in ("full", "kvpr", "offload"):
        with pytest.raises(InputError, match="no loss of quality to measure; omit it"):
            sort_out([parse("kivi"), parse(text)])
    with pytest.raises(InputError, match="unknown real implementation 'infllm'"):
        sort_out([parse("infllm")])


def test_windows_are_spread_over_the_text() -> None:
    assert windows(list(range(100)), 3, 10, ()) == [list(range(i, i + 10)) for i in (0, 33, 66)]
    assert windows(list(range(100)), 2, 3, (7,)) == [[7, 0, 1], [7, 50, 51]]
    with pytest.raises(InputError, match="29 tokens, but 3 windows of 10 need 30"):
        windows(list(range(29)), 3, 10, ())


def test_of_html_the_text_is_read(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        "<html><head><title>no</title><style>no</style></head><body><h1>One &amp; two</h1>"
        "<script>no()</script><p>A <b>bold</b>\n word.</p><ul><li>x<li>y</ul>"
        "<pre>a\n b</pre></body></html>"
        "<html><head><title>no</title></head><body>second</body></html>"
    )
    assert read_text(str(page)).content == "One & two\n\nA bold word.\n\nx\ny\na\nb\nsecond"
    plain = tmp_path / "page.txt"
    plain.write_bytes(page.read_bytes())
    read = read_text(str(plain))
    assert read.content == page.read_text()
    assert read.source.startswith("page.txt; sha256 ") and len(read.source) == 17 + 64
    assert read_text(None).source.startswith("manual of Python 3.")
