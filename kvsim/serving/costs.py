"""Step costs: the time that a technique takes for a pass with a given composition.

:func:`pass_seconds` is the documented interface; the compiled simulator reads the same tables
through the functions above it. A ``cost`` array has an entry for the time and one for each resource
in COSTS, or only for the time.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvsim.frozen import frozen
from kvsim.graph import Array, Number
from kvsim.serving.core import jit_entry, jit_function
from kvsim.serving.kv_budget import ReplicaMemory
from kvsim.serving.passes import Passes
from kvsim.serving.records import PerCost, Records, make
from kvsim.serving.rules import Rules
from kvsim.serving.tables import Nodes, PerNode, Tables, make_nodes, make_tables, refine

Cost = Annotated[Array, "a number for each of COSTS, or for the first"]  # [s]
Costs = Annotated[Array, "a row of them for each node"]
Below = NDArray[np.int32]


class Decoding(NamedTuple):
    """The sequences that decode in a pass: how many, and their mean context."""

    batch: int  # number of sequences
    context: float  # mean context [tokens]
    growth: float  # increase of the mean context per round [tokens]


class Prompts(NamedTuple):
    """Totals over the chunks of prompts that a pass prefills."""

    tokens: int  # prompt tokens of the lane with most of them [tokens]
    every: int  # prompt tokens of all lanes [tokens]
    finished: int  # prompts that the pass completes


class OnePass:
    """A pass over decoding sequences and prompt chunks."""

    batch: int  # number of decoding sequences
    context: float  # their mean context [tokens]
    first: int  # index of its first prompt chunk
    last: int  # index after its last prompt chunk
    cost: PerCost  # cost of the pass, by COSTS [s]
    scratch: PerCost  # work space


class PromptPart:
    """A chunk of a prompt that a pass prefills."""

    tokens: int  # length of the chunk [tokens]
    start: float  # prompt tokens before it [tokens]
    finished: int  # 1 if it is the last chunk of its prompt
    after: float  # prompt length if the passes after prefill are included, else 0 [tokens]


@jit_function
def node_below(below: Below, position: float) -> int:
    """Return the index of the last grid point at or below a position that has a next grid point.

    Parameters
    ----------
    below : for each integer, the index of the grid point at or below it.
    position : position on the axis, in its units.

    Returns
    -------
    int
        Index of the grid point.
    """
    return int(below[min(int(position), below.size - 1)])


@jit_function
def add_between_nodes(cost: Cost, values: Costs, node: int, above: float) -> None:
    """Interpolate a value between two nodes and add it to the cost; extrapolate beyond the last.

    Parameters
    ----------
    cost : the cost, changed in place. [s]
    values : costs at the nodes. [s]
    node : index of the lower node.
    above : distance from it, in distances between the two nodes.
    """
    for k in range(min(cost.size, values[node].size)):
        cost[k] += (1 - above) * values[node, k] + above * values[node + 1, k]


@jit_function
def add_per_token(tables: Tables, cost: Cost, values: Costs, span: tuple[int, int]) -> None:
    """Add the cost of a pass of more tokens (or rows of logits) over one of fewer.

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    cost : the cost, changed in place. [s]
    values : costs at the nodes of tokens. [s]
    span : the fewer and the more tokens. [tokens]
    """
    nodes, below = tables.nodes.tokens, tables.below.tokens
    i, j = node_below(below, span[0]), node_below(below, span[1])
    low = (span[0] - nodes[i]) / (nodes[i + 1] - nodes[i])
    high = (span[1] - nodes[j]) / (nodes[j + 1] - nodes[j])
    for k in range(min(cost.size, values[i].size)):
        cost[k] += (1 - high) * values[j, k] + high * values[j + 1, k]
        cost[k] -= (1 - low) * values[i, k] + low * values[i + 1, k]


@jit_function
def count_fullest_lane(tables: Tables, count: int) -> int:
    """Return how many of a count fall to the fullest lane if it is divided evenly over the lanes.

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    count : sequences or tokens of all lanes.

    Returns
    -------
    int
        The count divided by the number of lanes, rounded up.
    """
    return (count + tables.lanes - 1) // tables.lanes


@jit_function
def add_pass(tables: Tables, cost: Cost, decoding: Decoding, prompts: Prompts) -> None:
    """Add the cost that the decoding sequences and the prompt chunks of a pass share.

    Costs of single chunks are added by :func:`add_chunk`. A pass takes no less time than the host
    needs to launch its kernels, than streaming the weights, or than decoding alone.

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    cost : the cost, changed in place. [s]
    decoding : sequences that decode.
    prompts : totals over the prompt chunks.
    """
    nodes, below = tables.nodes, tables.below
    least = tables.streamed[0]
    if decoding.batch > 0:
        before = cost[0]
        i = node_below(below.contexts, decoding.context)
        above = (decoding.context - nodes.contexts[i]) / (nodes.contexts[i + 1] - nodes.contexts[i])
        add_between_nodes(cost, tables.costs.round[decoding.batch], i, above)
        least = max(least, cost[0] - before)
        if prompts.tokens > 0:
            add_between_nodes(cost, tables.costs.beside[decoding.batch], i, above)
    if prompts.tokens > 0:
        own = count_fullest_lane(tables, decoding.batch * tables.width)
        finished = count_fullest_lane(tables, prompts.finished)
        add_per_token(tables, cost, tables.costs.token, (own, own + prompts.tokens))
        add_per_token(tables, cost, tables.costs.head, (own, own + finished))
        if tables.ranks > 1:  # decoding ranks are padded to the fullest; prompts are as they come
            padded, stages = own * tables.ranks, tables.lanes // tables.ranks
            read = max(prompts.tokens, (prompts.every + stages - 1) // stages)
            add_per_token(tables, cost, tables.costs.routed, (padded, padded + read))
        if tables.streamed[0] > 0:  # weights, once in a pass, beside which it computes
            for k in range(1, cost.size):
                cost[k] += tables.streamed[k]
            cost[0] = max(cost[0], least)
        if own + prompts.tokens > tables.graph_tokens:  # of the fullest rank
            cost[0] = max(cost[0], tables.issued)


@jit_function
def add_chunk(tables: Tables, cost: Cost, tokens: float, start: float) -> None:
    """Add the cost of one prompt chunk that it does not share with the rest of the pass.

    Parameters
    ----------
    tokens, start : its length, and the tokens of its prompt before it. [tokens]
    """
    chunks, starts, values = tables.nodes.chunks, tables.nodes.starts, tables.costs.chunk
    i, j = node_below(tables.below.chunks, tokens), node_below(tables.below.starts, start)
    longer = (tokens - chunks[i]) / (chunks[i + 1] - chunks[i])
    later = (start - starts[j]) / (starts[j + 1] - starts[j])
    for k in range(min(cost.size, values[i, j].size)):
        short = (1 - later) * values[i, j, k] + later * values[i, j + 1, k]
        long = (1 - later) * values[i + 1, j, k] + later * values[i + 1, j + 1, k]
        cost[k] += (1 - longer) * short + longer * long


@jit_function
def add_part(tables: Tables, costs: tuple[Cost, Cost], tokens: float, start: float) -> float:
    """Add a prompt chunk's own cost, averaged over the lanes, and return its time. [s]

    Parameters
    ----------
    costs : the pass's cost, changed in place, and a scratch record. [s]
    tokens, start : its length, and the tokens of its prompt before it. [tokens]
    """
    cost, own = costs
    for k in range(own.size):
        own[k] = 0.0
    add_chunk(tables, own, tokens, start)
    for k in range(own.size):
        cost[k] += own[k] / tables.lanes
    return float(own[0])


@jit_function
def add_after_prompt(tables: Tables, cost: Cost, prompt: float) -> None:
    """Add the cost of the passes between a prompt and its first decoding round.

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    cost : the cost, changed in place. [s]
    prompt : its length. [tokens]
    """
    if tables.pauses:
        nodes = tables.nodes.contexts
        i = node_below(tables.below.contexts, prompt)
        above = (prompt - nodes[i]) / (nodes[i + 1] - nodes[i])
        add_between_nodes(cost, tables.costs.between, i, above)


@jit_function
def find_linear_span(tables: Tables, context: float, growth: float, most: int) -> tuple[int, int]:
    """Return the grid node below a growing context, and the rounds until it reaches the next node.

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    context : mean context. [tokens]
    growth : increase per round. [tokens]
    most : rounds at most.

    Returns
    -------
    tuple of int
        Index of the node, and the number of rounds.
    """
    nodes = tables.nodes.contexts
    i = node_below(tables.below.contexts, context)
    count = most
    if growth > 0 and i < nodes.size - 2:
        fit = (nodes[i + 1] - context) / growth
        if fit < most:
            count = max(int(np.ceil(fit)), 1)
    return i, count


@jit_function
def add_rounds(tables: Tables, cost: Cost, decoding: Decoding, rounds: int) -> None:
    """Add many decoding rounds in a row by a closed form, as the mean context grows linearly.

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    cost : the cost, changed in place. [s]
    decoding : sequences that decode.
    rounds : number of rounds.
    """
    nodes, values = tables.nodes.contexts, tables.costs.round[decoding.batch]
    context, left = decoding.context, rounds
    while left > 0:
        i, count = find_linear_span(tables, context, decoding.growth, left)
        gap = nodes[i + 1] - nodes[i]
        above = count * ((context - nodes[i]) / gap)
        above += decoding.growth / gap * (count * (count - 1.0) / 2)
        for k in range(min(cost.size, values[i].size)):
            cost[k] += (count - above) * values[i, k] + above * values[i + 1, k]
        context += count * decoding.growth
        left -= count


@jit_function
def get_round_seconds(tables: Tables, batch: int, context: float) -> float:
    """Return the time of a decoding round at a mean context.

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    batch : sequences that decode. [sequences]
    context : their mean context. [tokens]

    Returns
    -------
    float
        Time of the round. [s]
    """
    nodes, row = tables.nodes.contexts, tables.costs.round[batch]
    i = node_below(tables.below.contexts, context)
    slope = (row[i + 1, 0] - row[i, 0]) / (nodes[i + 1] - nodes[i])
    return float(row[i, 0] + slope * (context - nodes[i]))


@jit_function
def _count_rounds(first: float, slope: float, seconds: float) -> int:
    """Return the fewest rounds k with first k + slope k (k - 1) / 2 >= seconds; at least 1."""
    need = seconds / first
    if slope > 0:
        b = first - slope / 2
        need = 2 * seconds / (b + np.sqrt(b * b + 2 * slope * seconds))
    k = max(int(np.ceil(need)), 1)
    while k > 1 and (k - 1) * first + slope * ((k - 1) * (k - 2.0) / 2) >= seconds:
        k -= 1
    while k * first + slope * (k * (k - 1.0) / 2) < seconds:
        k += 1
    return k


@jit_function
def count_rounds_within(tables: Tables, decoding: Decoding, rounds: int, seconds: float) -> int:
    """Return the rounds that begin before some time has passed.

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    decoding : sequences that decode.
    rounds : rounds at most.
    seconds : the time. [s]

    Returns
    -------
    int
        Number of rounds, from 1 to ``rounds``.
    """
    nodes, row = tables.nodes.contexts, tables.costs.round[decoding.batch]
    context, done, left = decoding.context, 0, seconds
    while done < rounds:
        i, count = find_linear_span(tables, context, decoding.growth, rounds - done)
        slope = (row[i + 1, 0] - row[i, 0]) / (nodes[i + 1] - nodes[i])
        first = row[i, 0] + slope * (context - nodes[i])
        slope *= decoding.growth
        took = count * first + slope * (count * (count - 1.0) / 2)
        if took >= left:
            return done + min(_count_rounds(first, slope, left), count)
        left -= took
        done += count
        context += count * decoding.growth
    return rounds


@jit_entry
def add_passes(tables: Tables, passes: Records[OnePass], parts: Records[PromptPart]) -> None:
    """Add up the cost of each of many passes.

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    passes : the passes, whose ``cost`` is changed in place.
    parts : their parts of prompts.
    """
    for i in range(passes.size):
        one = passes[i]
        tokens, most, finished = 0, 0, 0
        longest, total = 0.0, 0.0
        for j in range(one.first, one.last):
            part = parts[j]
            tokens += part.tokens
            most = max(most, part.tokens)
            finished += part.finished
            if part.tokens > 0:
                took = add_part(
                    tables, (one.cost, one.scratch), float(part.tokens), float(part.start)
                )
                longest = max(longest, took)
                total += took
            if part.after > 0:
                add_after_prompt(tables, one.cost, part.after)
        one.cost[0] += max(longest - total / tables.lanes, 0.0)
        prompts = Prompts(max(most, count_fullest_lane(tables, tokens)), tokens, finished)
        add_pass(tables, one.cost, Decoding(one.batch, one.context, 0.0), prompts)


def pass_seconds(
    tables: Tables, cached: ArrayLike = (), chunks: ArrayLike = (), finished: ArrayLike = False
) -> float:
    """Return the time of one pass over decoding sequences and parts of prompts.

    The simulator takes the same for a pass of the same composition, so that a scheduler of one's
    own can be played on the same costs.

    Parameters
    ----------
    tables : those of ``StepCosts.tables``.
    cached : tokens in the cache of each sequence that decodes. (n,) [tokens]
    chunks : of each part of a prompt, the tokens that are read and those of its prompt before
        them. (m, 2) [tokens]
    finished : whether it is the last part of its prompt, which then yields a token. (m,)

    Returns
    -------
    float
        The time of the pass; 0 for one that has nothing in it. [s]

    Examples
    --------
    >>> from kvsim.machines.deployment import Deployment
    >>> from kvsim.machines.profiles import load_hardware, load_stack
    >>> from kvsim.models.configs import load_model
    >>> from kvsim.serving.rules import Rules
    >>> from kvsim.techniques import parse
    >>> where = Deployment(load_model("llama3-8b"), load_hardware("h100"), load_stack("fused"))
    >>> tables = StepCosts(parse("full"), where, Rules(), 4096, 2048).tables
    >>> decoding = pass_seconds(tables, cached=[1000, 2000, 3000])
    >>> both = pass_seconds(tables, [1000, 2000, 3000], chunks=[[512, 0], [256, 1024]])
    >>> f"{1e3 * decoding:.1f} ms, {1e3 * both:.1f} ms"
    '6.9 ms, 18.7 ms'
    """
    lengths, parts = np.asarray(cached, float), np.asarray(chunks, float).reshape(-1, 2)
    ends = np.broadcast_to(np.asarray(finished, bool), len(parts))
    one = make(
        OnePass,
        1,
        batch=lengths.size,
        context=lengths.mean() if lengths.size else 0.0,
        last=len(parts),
    )
    after = np.where(ends, parts.sum(axis=1), 0.0)
    read = make(
        PromptPart, len(parts), tokens=parts[:, 0], start=parts[:, 1], finished=ends, after=after
    )
    add_passes(tables, one, read)
    return float(one.cost[0, 0])


def simple_pass_seconds(
    tables: Tables, batch: Number = 0, context: Number = 0.0, **part: Number
) -> Array:
    """Return the times of many passes with at most one part of a prompt each.

    Parameters
    ----------
    batch, context : sequences that decode, and their mean context. [sequences], [tokens]
    part : fields of ``PromptPart``; those that are left out are zero.

    Returns
    -------
    Array
        The time of each pass. (n,) [s]
    """
    count = max(np.size(values) for values in (batch, context, *part.values()))
    number = np.arange(count)
    passes = make(OnePass, count, batch=batch, context=context, first=number, last=number + 1)
    add_passes(tables, passes, make(PromptPart, count, **part))
    return np.asarray(passes.cost[:, 0])


Samples = Mapping[str, tuple[Callable[[Tables], Array], Array]]
"""By kind of pass: what tables say of random points, and what direct evaluation says. [s]"""

SAMPLES_PER_KIND = 200  # points of each kind


def draw_samples(passes: Passes, max_seqs: int, longest: int, longest_chunk: int) -> Samples:
    """Draw random passes of each kind, with the times that direct evaluation gives.

    Parameters
    ----------
    passes : predictions of the engine.
    max_seqs : the largest batch. [sequences]
    longest : the longest context. [tokens]
    longest_chunk : the longest part of a prompt. [tokens]

    Returns
    -------
    Samples
        By kind: decoding rounds, prompts, and both at once where their ops can be stated.
    """
    random = np.random.default_rng(0)
    batch = random.integers(1, max_seqs, SAMPLES_PER_KIND, endpoint=True).astype(float)
    context = _log_uniform(random, longest)
    new = _log_uniform(random, longest_chunk)
    start = np.minimum(_log_uniform(random, longest) - 1, longest - new)
    one: Mapping[str, Number] = {"tokens": new, "start": start, "finished": 1}

    def rounds(tables: Tables) -> Array:
        return simple_pass_seconds(tables, batch=batch, context=context)

    def prompts(tables: Tables) -> Array:
        return simple_pass_seconds(tables, **one)

    def mixed(tables: Tables) -> Array:
        return simple_pass_seconds(tables, batch=batch, context=context, **one)

    found: dict[str, tuple[Callable[[Tables], Array], Array]] = {
        "rounds": (rounds, passes.round(batch, context)),
        "prompts": (prompts, passes.prompt(new, start)),
    }
    if passes.mixes_plainly:
        found["mixed"] = (mixed, passes.mixed(batch, context, new, start))
    return found


def worst_errors(found: Samples, tables: Tables) -> dict[str, float]:
    """Return the largest relative error of the tables for each kind of pass.

    Parameters
    ----------
    found : random passes with the times of direct evaluation.
    tables : the tables that are judged.

    Returns
    -------
    dict
        Relative error by kind.
    """
    return {
        kind: float(np.max(np.abs(read(tables) / direct - 1)))
        for kind, (read, direct) in found.items()
    }


def _log_uniform(random: np.random.Generator, most: float) -> Array:
    """Draw integers from 1 to ``most``, equally many in every octave."""
    return np.floor(np.exp(random.uniform(0, np.log(most + 1), SAMPLES_PER_KIND)))


GOOD = 2e-3  # error of rounds and prompts at which the tables are fine enough
DENSITY = 8  # nodes per octave to begin with


@frozen
class StepCosts(ReplicaMemory):
    """Tables of the step costs of a technique in a deployment, under an engine's rules."""

    @cached_property
    def passes(self) -> Passes:
        """Predictions of single passes, from which the tables are made."""
        return Passes(self.technique, self.deployment)

    @property
    def rate(self) -> float:
        """Mean number of tokens that a decoding round yields per sequence."""
        return self.passes.rate

    @cached_property
    def tables(self) -> Tables:
        """Tables, refined until linear interpolation is accurate."""
        make: Callable[[], Tables] | None = vars(self).get("_make")
        return make_tables(self.passes, self._refined, self.room) if make is None else make()

    @cached_property
    def _refined(self) -> Nodes:
        return refine(self._nodes(DENSITY), self.passes.replayed, GOOD / 2)

    @cached_property
    def error(self) -> dict[str, float]:
        """Largest relative error of the tables at random points, by kind of pass."""
        origin: StepCosts | None = vars(self).get("_origin")
        if origin is not None:
            return origin.error
        samples = draw_samples(self.passes, self.rules.max_seqs, self.longest, self.longest_chunk)
        if self.rules.prefill != "chunked" or not self.deployment.single_pass:
            # prompts share no pass with decoding, or only those of their own lane
            samples = {kind: found for kind, found in samples.items() if kind != "mixed"}
        return worst_errors(samples, self.tables)

    def _changed(self, make: Callable[[], Tables], rules: Rules | None = None) -> "StepCosts":
        """Return a copy whose tables ``make`` computes when they are first needed.

        What makes them can be pickled: a method, or a part of one.
        """
        costs = replace(self, rules=rules or self.rules)
        object.__setattr__(costs, "_make", make)
        object.__setattr__(costs, "_origin", self)
        return costs

    def _own_tables(self) -> Tables:
        return self.tables

    def times_alone(self, before: "StepCosts | None" = None) -> "StepCosts":
        """Return these costs with times only; the use of resources takes longer to compute.

        Parameters
        ----------
        before : earlier result for the same passes with other limits, whose values for rounds are
            reused.
        """
        return self._changed(partial(self._times, before))

    def _times(self, before: "StepCosts | None") -> Tables:
        mine = self.rules.max_seqs, self.longest
        if before is None or mine != (before.rules.max_seqs, before.longest):
            return make_tables(self.passes, self._refined, self.room, work=False)
        known, start = before.tables, self._nodes(DENSITY)
        nodes = refine(start, self.passes.replayed, GOOD / 2, known.nodes.contexts)
        return make_tables(self.passes, nodes, self.room, False, known.seconds)

    def with_fewer(self, max_seqs: int) -> "StepCosts":
        """Return these costs for smaller batches; the tables are reused.

        Parameters
        ----------
        max_seqs : sequences in a step at most. [sequences]
        """
        return self.with_rules(replace(self.rules, max_seqs=max_seqs))

    def with_rules(self, rules: Rules) -> "StepCosts":
        """Return these costs under other rules with the same passes; the tables are reused.

        Parameters
        ----------
        rules : the other rules.
        """
        return self._changed(self._own_tables, rules)

    def least_growth(self, tokens: int) -> int:
        """Return the least memory on a GPU that a sequence takes for some more tokens. [B]

        Parameters
        ----------
        tokens
            How many more; counted in whole blocks of the cache, at least one. [tokens]
        """
        blocks = max(tokens // self.rules.block_tokens, 1)
        tables = (self.tables.gpu_bytes, self.tables.prompt_bytes)
        return min(int((t[blocks:] - t[:-blocks]).min(initial=t[-1])) for t in tables)

    def shares_prefixes(self, tokens: int) -> bool:
        """Whether every token of a prompt stays on the GPU, so that prompts can share prefixes.

        Parameters
        ----------
        tokens
            Tokens of a block that prompts may share. [tokens]
        """
        return self.least_growth(tokens) >= tokens // self.rules.block_tokens

    def reaches(self, other: "StepCosts") -> bool:
        """Whether these tables hold all that other costs of the same passes need.

        Parameters
        ----------
        other : costs of the same technique in the same deployment.
        """
        mine, its = self.rules, other.rules
        return (
            self.longest >= other.longest
            and self.longest_chunk >= other.longest_chunk
            and mine.max_tokens >= its.max_tokens
            and mine.max_seqs >= its.max_seqs
        )

    def sharing(self, wider: "StepCosts") -> "StepCosts":
        """Return these costs, computed from the wider tables of other costs of the same passes.

        Parameters
        ----------
        wider : costs of the same passes, whose tables are taken.
        """
        return self._changed(wider._own_tables)

    def slowed(self, prefill: float, decode: float) -> "StepCosts":
        """Return these costs with passes that take longer than predicted.

        Parameters
        ----------
        prefill : factor on the time that prompts add to a pass.
        decode : factor on rounds of sequences that decode.
        """
        factors = dict.fromkeys(PerNode._fields, prefill) | {"round": decode}
        return self._changed(partial(self._slower, factors))

    def _slower(self, factors: Mapping[str, float]) -> Tables:
        slower = PerNode(*(getattr(self.tables.costs, k) * x for k, x in factors.items()))
        return self.tables._replace(costs=slower)

    def with_density(self, density: int, work: bool = True) -> "StepCosts":
        """Return these costs with tables of a given density, whose accuracy is not checked.

        Parameters
        ----------
        work : whether the tables hold the use of resources besides the times.
        """
        costs = replace(self)
        object.__setattr__(
            costs, "tables", make_tables(costs.passes, costs._nodes(density), costs.room, work)
        )
        object.__setattr__(costs, "error", {})
        return costs

    def _nodes(self, density: int) -> Nodes:
        rules, longest_chunk = self.rules, self.longest_chunk
        decoding = self.passes.width * rules.max_seqs
        most_tokens = max(rules.max_tokens, longest_chunk) + decoding + rules.max_seqs
        every = most_tokens * self.deployment.dp
        return make_nodes(density, rules.max_seqs, self.longest, longest_chunk, every)
