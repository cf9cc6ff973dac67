"""Drafting that several techniques share: rounds, acceptance, and self-drafting."""

from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from kvsim.engine import ops
from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op, Point
from kvsim.machines.deployment import WEIGHT_FORMATS, Deployment, WeightFormat
from kvsim.techniques.acceptance import ONE_MODEL, TASKS, AcceptedDrafts, find_accepted
from kvsim.techniques.axes.base import Drafting, Launches, LayerPass, Parts, Selection, Storage
from kvsim.techniques.axes.selection import gather_kept, kept_tokens, observe, select
from kvsim.techniques.axes.settings import param

# Accepted over drafted tokens at each gamma, means over the four model and dataset pairs that
# the QuantSpec paper measured at 8k context (table 6). Other models and texts differ: the
# acceptance of a prediction is an input, and these are its defaults.
PUBLISHED_ACCEPTANCE = {
    "quantspec": {1: 0.9456, 2: 0.9398, 4: 0.9041, 6: 0.8454},
    "streamingllm": {1: 0.8683, 2: 0.8213, 3: 0.7732},
    "snapkv": {1: 0.8119, 2: 0.7536, 3: 0.7141},
    "mtp": {1: 0.875},  # DeepSeek-V3 technical report, section 5.4.3: 85 to 90 %
}
MOST_DRAFTS = 32  # a round drafts in a row
Acceptance = float | str
SINK = 4  # first tokens that a StreamingLLM draft keeps
WINDOW = 32  # SnapKV's observing queries
GATHERED = 2.5  # copies of the chosen tokens alive at once: gathered, reordered, one part joined
READS = ("upper", "streamingllm", "snapkv", "all")
RING = Launches(draft={"attn": 30})
DRAFTS_OVER = {
    "upper": Launches(decode={"attn": 2}),
    "streamingllm": Launches(prefill={"compact": 16}, decode={"attn": 18}),
    "snapkv": Launches(prefill={"observe": 9, "select": 10, "compact": 12}, decode={"attn": 9}),
    "all": Launches(decode={"attn": 5}),
}


def acceptance_param() -> Any:
    """Return the field for ``acceptance``: accepted over drafted tokens, or by position."""
    return param(
        "auto", "accepted over drafted tokens, by position such as 0.8/0.6/0.5, or a kind of text "
        "for which it was measured",
        high=1, choices=("auto", *TASKS), whole=False, also=lists_shares,
    )  # fmt: skip


def lists_shares(text: str) -> bool:
    """Return whether a text lists shares of rounds that accept at least 1, 2, ... drafts.

    Parameters
    ----------
    text : as 0.8/0.6/0.5.

    Raises
    ------
    InputError
        If a share is above the one before it.
    """
    try:
        shares = [float(item) for item in text.split("/")]
    except ValueError:
        return False
    if not all(0 <= share <= 1 for share in shares):
        return False
    rising = next((i for i, (a, b) in enumerate(pairwise(shares), 2) if b > a), 0)
    if rising:
        raise InputError(
            f"acceptance={text}: draft {rising} is accepted in more rounds than the one before it; "
            f"a round ends at the first draft that fails, so give shares of rounds that never rise"
        )
    return True


def accepted_drafts(name: str, given: Acceptance, gamma: int, published: str = "") -> float:
    """Return the mean number of drafts accepted per round.

    Published rates are interpolated in gamma and held constant outside their range.

    Parameters
    ----------
    name : of the technique, for messages.
    given : the setting.
    gamma : tokens drafted per round.
    published : the row of ``PUBLISHED`` that "auto" refers to.

    Raises
    ------
    InputError
        If nothing is published for such drafts, or shares are given for fewer than gamma.
    """
    if not gamma:
        return 0.0
    if not isinstance(given, str):
        return gamma * given
    if given in ("auto", *TASKS):
        if given != "auto" or published not in PUBLISHED_ACCEPTANCE:
            raise InputError(
                f"{name}: no acceptance is published for such drafts; set acceptance=SHARE, "
                f"accepted over drafted tokens"
            )
        known = PUBLISHED_ACCEPTANCE[published]
        return gamma * float(np.interp(gamma, list(known), list(known.values())))
    shares = [float(item) for item in given.split("/")]
    if len(shares) < gamma:
        raise InputError(
            f"{name}: acceptance={given} has {len(shares)} positions, but gamma is {gamma}; "
            f"give one share per drafted token"
        )
    return sum(shares[:gamma])


@frozen
class Rounds(Drafting):
    """Base of drafting methods whose acceptance is given, or was measured for such drafts."""

    name = "rounds"
    shape: ClassVar[str] = ""  # of the drafts, where the library tells them apart
    like: ClassVar[str] = ""  # method whose acceptance stands in where none of its own is measured

    gamma: int = param(4, "tokens drafted in a row per round", high=MOST_DRAFTS)
    acceptance: Acceptance = acceptance_param()

    @property
    def drafts(self) -> int:
        """Tokens drafted per round: gamma."""
        return self.gamma

    @property
    def _measured(self) -> AcceptedDrafts | None:
        """The library's acceptance by position, where the user gives none."""
        if self.acceptance not in ("auto", *TASKS):
            return None
        task = "mixed" if self.acceptance == "auto" else str(self.acceptance)
        found = find_accepted(self.name, self.gamma, task, shape=self.shape)
        if found is not None or not self.like:
            return found
        near = find_accepted(self.like, self.gamma, task, shape=self.shape)
        if near is None:
            return None
        spread = float(np.hypot(near.spread, ONE_MODEL))
        source = f"{near.source}, as {self.name} was not measured"
        return replace(near, spread=spread, source=source)

    @property
    def _published(self) -> bool:
        return self.acceptance == "auto" and self.gamma in PUBLISHED_ACCEPTANCE.get(self.name, {})

    @property
    def _unknown(self) -> bool:
        said = self.acceptance not in ("auto", *TASKS)
        return self.gamma > 0 and not said and not self._published and self._measured is None

    @property
    def accepted(self) -> float:
        """Drafts accepted per round, on average; 0 if unknown, which ``refuses`` reports."""
        if self._unknown or not self.gamma:
            return 0.0
        found = None if self._published else self._measured
        if found is not None:
            return sum(found.shares)
        return accepted_drafts(self.name, self.acceptance, self.gamma, self.name)

    @property
    def assumes(self) -> str:
        """The assumed acceptance and its source, if it is not given."""
        found = self._measured
        if not self.gamma or (found is None and self.acceptance not in ("auto", *TASKS)):
            return ""
        if self._unknown:
            return "an acceptance rate (none is published)"
        if found is None or self._published:
            return f"an acceptance rate of {self.accepted / self.gamma:.2f}"
        by_position = "/".join(f"{share:.2f}" for share in found.shares[:4])
        more = "/..." if self.gamma > 4 else ""
        return f"acceptance rates by position of {by_position}{more} ({found.source})"

    @property
    def spread(self) -> float:
        """Relative standard deviation of tokens per round over models and texts."""
        found = self._measured
        return 0.0 if found is None or not self.gamma else found.spread

    @property
    def room(self) -> int:
        """Cache slots that verification needs per sequence besides the regular one. [tokens]"""
        return self.verified - 1

    @property
    def branching(self) -> bool:
        """Whether drafts form a tree, of which the longest accepted path is kept."""
        return self.verified > self.gamma + 1

    def round_ops(self, deployment: Deployment, point: Point) -> tuple[Op, ...]:
        """Return the engine's time per round besides the passes."""
        times = deployment.stack.drafts
        fixed = times.round + times.sequence * point.batch
        fixed = fixed + times.tree * self.branching
        if not np.any(np.asarray(fixed) > 0):
            return ()
        # the host compares, and issues the next pass once it knows which drafts stay
        return (Op("round", fixed=fixed, launches=0.0, sync=deployment.stack.eager),)

    def refuses(self, deployment: Deployment, parts: Parts) -> str:
        """Return why it cannot run, such as an unknown acceptance, or an empty string."""
        if self._unknown:
            return (
                f"the acceptance rate of {self.gamma} such drafts is unknown; give yours as "
                f"{self.name}:acceptance=0.6 (accepted over drafted), or by position as 0.8/0.6"
            )
        return can_roll_back(parts.selection) if self.gamma else ""


@frozen
class Selfdraft(Drafting):
    """Drafts with the model's own layers.

    They read the upper half of a hierarchical cache, or a small separate cache: attention sinks
    and a window, or the prompt tokens that SnapKV keeps and all later ones.

    References
    ----------
    .. [1] R. Tiwari et al., "QuantSpec", ICML 2025, algorithm 1 and table 6.
    .. [2] R. Sadhukhan et al., "MagicDec", ICLR 2025, section 4.
    """

    name = "selfdraft"
    preset = False

    gamma: int = param(2, "tokens drafted per round", high=16)
    acceptance: Acceptance = acceptance_param()
    reads: str = param("streamingllm", "cache that drafts read", choices=READS)
    budget: Number = param(1024, "tokens of a draft cache [tokens]", low=1, high=1e7, share=True)
    weight_bits: float = param(16, "bits per MLP weight of the draft", choices=(4, 16))

    def __post_init__(self) -> None:
        super().__post_init__()
        accepted_drafts(self.name, self.acceptance, self.gamma, self._published)

    @property
    def _published(self) -> str:
        narrow = {"upper": "quantspec", "all": "narrow weights"}.get(self.reads, self.reads)
        return narrow if self.reads == "upper" or self.weight_bits == 16 else "narrow weights"

    @property
    def drafts(self) -> int:
        """Tokens drafted per round: gamma."""
        return self.gamma

    @property
    def launch_tables(self) -> tuple[Launches, ...]:
        """Kernels of each op, which depend on the cache that drafts read."""
        return (DRAFTS_OVER[self.reads],) if self.gamma else ()

    @property
    def accepted(self) -> float:
        """Mean number of drafts accepted per round of ``gamma`` drafts."""
        return accepted_drafts(self.name, self.acceptance, self.gamma, self._published)

    @property
    def assumes(self) -> str:
        """The assumed acceptance and its source, if it is not given."""
        if self.acceptance != "auto" or not self.gamma:
            return ""
        rate = self.accepted / self.gamma
        return f"an acceptance rate of {rate:.2f}, the published mean for Llama-2-7B at 8k context"

    @property
    def _mlp(self) -> WeightFormat | None:
        return WEIGHT_FORMATS["int4"] if self.weight_bits == 4 else None

    @property
    def _has_draft_cache(self) -> bool:
        """Whether drafts have a cache of their own."""
        return self.gamma > 0 and self.reads in ("streamingllm", "snapkv")

    def refuses(self, deployment: Deployment, parts: Parts) -> str:
        """Return why it cannot draft, or an empty string."""
        selection, storage = parts.selection, parts.storage
        if not self.gamma:
            return ""
        if self.reads == "upper" and storage.upper is None:
            return f"drafts need the upper half of a hierarchical cache, not {storage.name}"
        if self.reads == "all" and self._mlp is None:
            return "drafts that read the whole cache with the same weights save nothing"
        return can_roll_back(selection)

    def own_pass(self, point: Point, parts: Parts) -> Parts:
        """Return the parts of a draft pass: the model's layers over the draft's cache."""
        plain, mlp = Drafting(), self._mlp
        if self.reads == "upper":
            upper = parts.storage.upper
            assert upper is not None
            return replace(parts, storage=upper, drafting=plain, mlp=mlp, keeps=False)
        if not self._has_draft_cache:
            return replace(parts, drafting=plain, mlp=mlp, keeps=False)
        seen = DraftCache(self.budget, 0 if self.reads == "snapkv" else self.gamma)
        place = parts.placement.weights_alone()
        return Parts(seen, Storage(), place, plain, mlp, keeps=False)

    def fill_draft_cache(self, at: LayerPass) -> list[Op]:
        """Return the ops that fill the draft cache after prefill."""
        if not self._has_draft_cache:
            return []
        if self.reads == "streamingllm":
            filled = [gather_kept(at, self.budget + self.gamma)]
        else:
            chosen = select(at, self.budget, scored=at.p.prompt)
            filled = [observe(at, WINDOW, self.budget), chosen, gather_kept(at, self.budget)]
        if at.selection.evicts == "never":
            return filled
        return [replace(op, name=f"draft_{op.name}") for op in filled]  # beside the selection's

    def extra_bytes(self, at: LayerPass) -> Number:
        """Return the bytes that verification writes into the draft cache. [B]"""
        if not self._has_draft_cache or at.p.prefill:
            return 0.0
        return ops.kv_bytes(at.d.shard, at.p.tokens)

    @property
    def room(self) -> int:
        """Cache slots of a round's drafts; a hierarchical cache has them already. [tokens]"""
        return 0 if self.reads == "upper" else self.gamma

    def resident(self, at: LayerPass) -> Buffers:
        """Return the memory of the draft cache, with room for a round's drafts. [B]"""
        if not self._has_draft_cache:
            return {}
        tokens: Number = np.minimum(at.cached, self.budget)
        if self.reads == "snapkv":
            tokens = kept_tokens(at, self.budget)
        small = ops.kv_bytes(at.d.shard, at.p.batch * (tokens + self.gamma))
        return {"gpu": {"draft kv": small}}

    def draft_weights(self, at: LayerPass) -> Buffers:
        """Return the memory of the draft's 4-bit MLP. [B]"""
        d, mlp = at.d, self._mlp
        if not self.gamma or mlp is None or d.weights == "int4" or at.shape.routed:
            return {}
        size = sum(mlp.bytes(*matrix) for matrix in d.shard.mlp_matrices(d.shard.ffn).values())
        return {"gpu": {"draft weights": size}}

    def scratch(self, at: LayerPass) -> Number:
        """Return the temporary memory for filling SnapKV's draft cache. [B]

        The layer's keys and values are copied out of their pages. Scores of the last queries come
        next, then the chosen tokens, joined with the window and reordered.
        """
        p, m = at.p, at.d.shard
        if self.reads != "snapkv" or not p.prefill or not self._has_draft_cache:
            return 0.0
        scores = p.batch * m.heads * WINDOW * p.prompt
        held = at.d.stack.attention.score_memory * scores
        chosen = ops.kv_bytes(m, p.batch * np.minimum(self.budget, p.prompt))
        ranking = np.maximum(held, ops.FP16_BYTES * scores + GATHERED * chosen)
        return ops.kv_bytes(m, p.batch * p.prompt) + ranking


@frozen
class DraftCache(Selection):
    """A small KV cache for drafts: of fixed size (a ring) with ``idle`` slots, else growing."""

    name = "draft cache"
    launches = Launches(draft={"attn": 1})

    budget: Number = param(1024, "tokens [tokens]", low=1, high=1e7, share=True)
    idle: int = param(0, "padded slots that are read as well [tokens]", high=16)

    @property
    def launch_tables(self) -> tuple[Launches, ...]:
        """Kernels of each op; a ring buffer needs others than a growing cache."""
        return (RING if self.idle else self.launches,)

    def count_kept(self, at: LayerPass) -> Number:
        """Return the tokens in the draft cache. [tokens]

        A ring holds at most the budget; a growing cache also holds generated tokens.
        """
        return np.minimum(at.cached, self.limit(at))

    def limit(self, at: LayerPass) -> Number:
        """Return the tokens that a draft attends to: all tokens in the draft cache. [tokens]"""
        return self.budget if self.idle else kept_tokens(at, self.budget)

    def extra_bytes(self, at: LayerPass) -> Number:
        """Return the bytes that attention reads of idle slots beyond the budget. [B]"""
        if not self.idle:
            return 0.0
        seen = np.minimum(at.p.length, self.budget)
        idle = np.minimum(at.p.length, self.budget + self.idle) - seen
        return ops.kv_bytes(at.d.shard, at.p.batch * idle)


def can_roll_back(selection: Selection) -> str:
    """Return why rejected drafts cannot be removed from the cache, or an empty string.

    Parameters
    ----------
    selection : of the verified cache.
    """
    if selection.evicts == "always":
        return f"{selection.name} drops tokens at every step, which a rejected draft cannot undo"
    return ""
