"""What one technique's passes cost in one deployment under an engine's rules."""

from dataclasses import replace
from functools import cached_property

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment
from kvsim.serving import accuracy
from kvsim.serving.passes import Passes
from kvsim.serving.room import Room
from kvsim.serving.rules import Rules
from kvsim.serving.tables import Nodes, Tables, make_nodes, make_tables, refine
from kvsim.techniques.technique import Technique

GOOD = 2e-3  # error of rounds and prompts at which the tables are fine enough
DENSITY = 8  # nodes per octave to begin with


@frozen
class StepCosts:
    """Tables of one technique in one deployment under an engine's rules.

    Parameters
    ----------
    longest : longest sequence, prompt and generated tokens. [tokens]
    longest_prompt : longest prompt. [tokens]
    gpu_memory : what the engine may use of each GPU; None for the share that engines use unless
        told otherwise. [B]

    Raises
    ------
    InputError
        If the technique cannot run there, or the model leaves no memory for a cache.
    """

    technique: Technique
    deployment: Deployment
    rules: Rules
    longest: int
    longest_prompt: int
    gpu_memory: float | None = None

    def __post_init__(self) -> None:
        reason = self.technique.refuses(self.deployment)
        if reason:
            raise InputError(f"{self.technique.name} cannot run here: {reason}")

    @cached_property
    def passes(self) -> Passes:
        """The engine's predictions, which the tables are made of."""
        return Passes(self.technique, self.deployment)

    @property
    def rate(self) -> float:
        """Tokens that a decoding round yields per sequence, on average."""
        return self.passes.rate

    @cached_property
    def room(self) -> Room:
        """The memory that a replica has for caches."""
        return Room(
            self.technique, self.deployment, self.rules,
            self.longest, self._longest_chunk, self.gpu_memory,
        )  # fmt: skip

    @property
    def capacity(self) -> int:
        """Memory of each GPU that is left for caches. [B]

        Raises
        ------
        InputError
            If weights and workspace leave nothing.
        """
        return self.room.capacity

    @property
    def tables(self) -> Tables:
        """Tables with nodes wherever lines between fewer would be off."""
        return self._checked[0]

    @property
    def error(self) -> dict[str, float]:
        """Worst relative error of the tables at random points, by kind of pass."""
        return self._checked[1]

    @cached_property
    def _checked(self) -> tuple[Tables, dict[str, float]]:
        samples = accuracy.samples(
            self.passes, self.rules.max_seqs, self.longest, self._longest_chunk
        )
        if self.rules.prefill != "chunked" or not self.deployment.alone:
            # prompts share no pass with decoding, or only those of their own lane
            samples = {kind: found for kind, found in samples.items() if kind != "mixed"}
        nodes = refine(self._nodes(DENSITY), self.passes, GOOD / 2)
        tables = make_tables(self.passes, nodes, self.room)
        error = accuracy.worst(samples, tables)
        return tables, error

    def with_fewer(self, max_seqs: int) -> "StepCosts":
        """The same for at most as many sequences; the tables stay, and hold more than it needs."""
        costs = replace(self, rules=replace(self.rules, max_seqs=max_seqs))
        object.__setattr__(costs, "_checked", self._checked)
        return costs

    def with_rules(self, rules: Rules) -> "StepCosts":
        """The same under rules that leave passes as they are; the tables stay."""
        costs = replace(self, rules=rules)
        object.__setattr__(costs, "_checked", self._checked)
        return costs

    def with_density(self, density: int, work: bool = True) -> "StepCosts":
        """The same with tables of a given density that are not checked: for fits and estimates.

        Parameters
        ----------
        work : whether the tables hold the use of resources besides the times.
        """
        costs = replace(self)
        tables = make_tables(costs.passes, costs._nodes(density), costs.room, work)
        object.__setattr__(costs, "_checked", (tables, {}))
        return costs

    def _nodes(self, density: int) -> Nodes:
        rules, longest_chunk = self.rules, self._longest_chunk
        decoding = self.passes.width * rules.max_seqs
        most_tokens = max(rules.max_tokens, longest_chunk) + decoding + rules.max_seqs
        every = most_tokens * self.deployment.dp
        return make_nodes(density, rules.max_seqs, self.longest, longest_chunk, every)

    @property
    def _longest_chunk(self) -> int:
        """Tokens of one prompt in a pass at most."""
        chunked = self.rules.prefill == "chunked"
        part = self.rules.max_tokens // self.deployment.lanes
        return min(self.longest_prompt, part) if chunked else self.longest_prompt
