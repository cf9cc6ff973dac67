"""Generations that record what a technique loses: along a text, in attention, in its drafts."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from kvsim.techniques.technique import Technique
from kvsim.traces.attention import GAMMAS, Acceptance
from kvsim.validate.model.attention import Pass, Seen
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.parts.composed import Composed
from kvsim.validate.parts.scores import by_kv_head, scores
from kvsim.validate.parts.selection import All, LayerContext
from kvsim.validate.parts.store import CacheRoom
from kvsim.validate.run import Generation
from kvsim.validate.techniques.specache import Pairs
from kvsim.validate.techniques.zipcache import Zipcache


class Forced(Generation):
    """A generation that is forced to a given text, one token per round, and scored. The first token
    after the prompt is not scored, as every technique reads the prompt in full precision.

    Parameters
    ----------
    texts : tokens of the sequences, all of the same length; the first ``prompt`` of them are the
        prompt.
    truth : log-probabilities of a run with full-precision KV; if none are given, those of this run
        are stored.
    """

    def __init__(
        self,
        decoder: Decoder,
        technique: Technique,
        texts: Sequence[Sequence[int]],
        prompt: int,
        truth: list[Tensor] | None = None,
        kind: type[Composed] = Composed,
    ) -> None:
        prompts = [text[:prompt] for text in texts]
        super().__init__(decoder, technique, prompts, len(texts[0]) - prompt, kind=kind)
        self.text = torch.tensor([text[prompt:] for text in texts], device=decoder.device)
        self.truth = truth
        self.kept: list[Tensor] = []  # (batch, vocab) per token
        self._losses: list[Tensor] = []
        self._divergences: list[Tensor] = []

    def emit(
        self, tokens: Tensor, counts: Sequence[int] | None = None, logits: Tensor | None = None
    ) -> None:
        """Score the text's next token, and append it instead of the generated one."""
        place = self.done[0]
        if place:
            assert logits is not None
            self._score(logits.view(self.batch, -1), place)
        super().emit(self.text[:, place])

    @property
    def perplexity(self) -> float:
        """Perplexity of the scored tokens."""
        return float(torch.stack(self._losses).double().mean().exp())

    @property
    def divergence(self) -> float:
        """Mean KL divergence of the next token from that of full-precision KV. [nat]"""
        return max(0.0, float(torch.stack(self._divergences).double().mean()))

    def _score(self, logits: Tensor, place: int) -> None:
        shares = logits.float().log_softmax(-1)
        self._losses.append(-shares.gather(1, self.text[:, place, None])[:, 0])
        if self.truth is None:
            self.kept.append(shares)
            return
        meant = self.truth[place - 1]
        self._divergences.append((meant.exp() * (meant - shares)).sum(-1))


class NotingMass(All):
    """Full cache that records the attention of the k largest tokens, for several k."""

    def __init__(self, place: LayerContext) -> None:
        super().__init__(place)
        self.noted: list[Tensor] = []  # (samples, counts)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Attend to the full cache, and record the attention that the top tokens receive.

        Recorded is the share of the 1, 2, 4, ... tokens with the largest weights, up to half the
        prompt.
        """
        out = super().attend(queries, keys, values, step)
        if step.kind == "decode":
            counts = powers(self.prompt)
            shares = scores(queries, self.kv.prompt(step.length)[0])
            largest = shares.topk(counts[-1], dim=-1).values.double().cumsum(-1)
            places = torch.tensor(counts, device=queries.device) - 1
            self.noted.append(largest[..., places].clamp(max=1.0).flatten(0, 2))
        return out


class NotingPairs(Pairs):
    """SpeCache's cache, which records how well the fetched pairs match the top k of each step.

    The true attention is that of the output token's query over full-precision keys, averaged over
    the query heads that share a KV head, as in the selection itself.
    """

    def __init__(self, place: LayerContext) -> None:
        super().__init__(place)
        self.noted: list[Tensor] = []  # (samples, 2): pairs, mass

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Record the share of top tokens, and of their attention, that was fetched; attend."""
        if self.guesses and self.chosen and step.kind == "decode":
            self.host.stored.wait()
            before = step.starts[0]
            home = self.host.homes[0][:, :, :before].to(queries.device)
            cached_keys = torch.cat([home, keys[:, :, :1]], 2)
            shares = by_kv_head(scores(queries[:, :, :1], cached_keys), keys.shape[1])[
                :, :, 0, :before
            ]
            best = shares.topk(min(self.chosen, before), dim=-1)
            index = self.index.long()
            spare = torch.nn.functional.pad(torch.zeros_like(shares, dtype=torch.bool), (0, 1))
            places = torch.where(index < 0, before, index)  # nothing was fetched: the spare place
            fetched = spare.scatter(2, places, value=True)[..., :before]
            pairs = fetched.gather(2, best.indices).double().mean(-1)
            mass = (shares * fetched).double().sum(-1) / best.values.double().sum(-1)
            self.noted.append(torch.stack([pairs, mass.clamp(max=1.0)], -1).flatten(0, 1))
        return super().attend(queries, keys, values, step)


class NotingZipcache(Zipcache):
    """ZipCache's cache, which records how many of a prompt's salient tokens the probes find.

    The truly salient tokens are those found with every query as a probe (equation 8).
    """

    def __init__(self, room: CacheRoom) -> None:
        super().__init__(room)
        self.noted: list[Tensor] = []
        self._queries: list[Tensor] = []  # of the prompt, chunk by chunk

    def attend_prompt(
        self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass, seen: Seen
    ) -> Tensor:
        """Attend in full, and record every query until the prompt is complete."""
        self._queries.append(queries)
        return super().attend_prompt(queries, keys, values, step, seen)

    def pack(self, keys: Tensor, values: Tensor, saliency: Tensor, time: int) -> None:
        """Record the share of truly salient prompt tokens that the probes have found; then pack."""
        if time == 0 and self.salient:
            every, self._queries = torch.cat(self._queries, 2), []
            for queries, own, found in zip(every, keys, saliency, strict=True):
                truth = exact_saliency(queries[None], own[None])
                best = truth.topk(self.salient, dim=-1).indices
                chosen = torch.zeros_like(truth, dtype=torch.bool)
                chosen.scatter_(1, found.topk(self.salient, dim=-1).indices, value=True)
                self.noted.append(chosen.gather(1, best).double().mean(-1))
        super().pack(keys, values, saliency, time)


class Watched(Composed):
    """A composed technique whose layers record measurements."""

    instead = MappingProxyType({Zipcache: NotingZipcache, Pairs: NotingPairs})

    def noted_means(self) -> Tensor:
        """Return the mean of each layer's records, (layers, ...); 0 for a layer without any."""
        found = []
        for layer in self.layers:
            noting = layer if isinstance(layer, (NotingPairs, NotingMass)) else layer.kv
            assert isinstance(noting, (NotingPairs, NotingMass, NotingZipcache))
            noted = noting.noted or [torch.zeros(1)]
            found.append(torch.cat(noted).double().mean(0).cpu())
        return torch.stack(found)


class WatchedFull(Watched):
    """Full KV whose layers record the attention of the top tokens."""

    instead = MappingProxyType({All: NotingMass})


WATCHED: Mapping[str, type[Composed]] = {
    "full": WatchedFull,
    "specache": Watched,
    "zipcache": Watched,
}


def powers(prompt: int) -> list[int]:
    """List the powers of two up to half a prompt, and at least 1.

    Parameters
    ----------
    prompt
        Tokens of the prompt. [tokens]
    """
    return [2**i for i in range(max(prompt // 2, 1).bit_length())]


def exact_saliency(queries: Tensor, keys: Tensor) -> Tensor:
    """Compute the normalised attention of all queries of one sequence. (KV heads, tokens)

    Parameters
    ----------
    keys
        Keys, (1, KV heads, tokens, dim).

    References
    ----------
    .. [1] Y. He et al., "ZipCache", NeurIPS 2024, https://arxiv.org/abs/2405.14256, equation 8.
    """
    tokens = torch.arange(queries.shape[2], device=queries.device)
    seen = tokens <= tokens[:, None]
    shares = by_kv_head(scores(queries, keys, seen), keys.shape[1]).sum(2)[0]
    return shares / torch.arange(len(tokens), 0, -1, device=queries.device)


MEASURED = ("gamma", "acceptance")
SHARE_DIGITS = 6  # of a share in a trace


@torch.inference_mode()
def accepted(run: Generation) -> dict[int, list[int]]:
    """Run a generation, and record the accepted drafts of every round until a sequence is complete.

    Each round uses the gamma that was measured least, among those for which the cache has room
    (QuantSpec's buffer may be nearly full), and starts where the last round ended.

    Parameters
    ----------
    run
        The generation, which has not been started.

    Returns
    -------
    dict of int to list of int
        Accepted drafts of every round and sequence, by gamma.
    """
    impl = run.impl
    found: dict[int, list[int]] = {gamma: [] for gamma in GAMMAS}
    try:
        run.start()
        while max(run.done) < run.generate:
            impl.gamma = max(GAMMAS)
            room = impl.round_room(run.cached)
            fitting = [gamma for gamma in GAMMAS if gamma < room]
            impl.gamma = min(fitting, key=lambda gamma: len(found[gamma]), default=1)
            impl.decode_round(run)
            if fitting:
                found[impl.gamma] += [given - 1 for given in run.yielded[-1]]
    finally:
        impl.shutdown()
    return found


def reached(accepted: Sequence[int], gamma: int) -> tuple[float, ...]:
    """Compute the share of rounds that accept at least 1, 2, ..., gamma drafts."""
    counts = (sum(many >= place for many in accepted) for place in range(1, gamma + 1))
    return tuple(round(count / len(accepted), SHARE_DIGITS) for count in counts)


def measure_acceptance(
    decoder: Decoder,
    technique: Technique,
    prompts: Sequence[Sequence[int]],
    generate: int,
    temperature: float,
) -> Acceptance | None:
    """Measure how many drafts of a technique are accepted.

    Parameters
    ----------
    temperature
        Sampling temperature; 0 for the most likely token.

    Returns
    -------
    Acceptance or None
        Shares of rounds that accept at least 1, 2, ... drafts; None if no round was measured for
        some gamma.
    """
    most = technique.with_rounds(max(GAMMAS))
    found = accepted(Generation(decoder, most, prompts, generate, temperature=temperature))
    rounds = min(map(len, found.values()))
    if not rounds:
        return None
    rows = tuple(reached(found[gamma], gamma) for gamma in GAMMAS)
    return Acceptance(named(technique), temperature, rounds, rows)


def named(technique: Technique) -> str:
    """Write a technique in notation, without ``gamma`` and ``acceptance``, which are measured."""
    name, colon, given = str(technique).partition(":")
    kept = [item for item in given.split(",") if item.partition("=")[0] not in MEASURED]
    return name + colon + ",".join(kept)
