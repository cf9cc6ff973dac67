"""The plan of a service: which deployment, technique and engine settings carry the largest rate.

Candidates are the best settings of every technique that an engine can start, on every deployment
asked for. Equal requests in closed form rank them; the best play requests with drawn lengths that
arrive one by one, and the largest rate that keeps the targets decides. Of what no engine runs the
best is shown beside the choice, or chosen with ``--research``.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment, list_layouts
from kvsim.options import OPTION_RANGES
from kvsim.planner.compositions import CompositionSearch
from kvsim.planner.load import (
    IDLE,
    RATE_STEP,
    Carried,
    Load,
    RateSearch,
    ServiceLevel,
    Slower,
    known_factors,
    load_of_trace,
    quantiles,
)
from kvsim.planner.question import Question, narrower_formats, needed_option, simplicity_rank
from kvsim.planner.table import (
    Options,
    TableSearch,
    as_good_as_best,
    tabulate,
)
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import decode_point, weights_bytes
from kvsim.quality.evidence import KNOWN_BAD, Evidence, combine
from kvsim.serving.costs import StepCosts
from kvsim.serving.outcome import Outcome
from kvsim.serving.rules import Rules
from kvsim.techniques import parse
from kvsim.techniques.released import CACHE, FULL, engine_refusal, engines_running, served_by
from kvsim.techniques.technique import Technique
from kvsim.traces.resample import scale_clients

RESEARCH_LOSS = 0.05  # what the best that no engine runs may lose, where nothing was admitted
MOST_COMPOSED = 120  # compositions of a deployment that are evaluated
MOST_RESEARCHED = 48  # where they are only shown beside the choice
PLAYED = 8  # candidates that play, of those that may be chosen
LOSSY_PLAYED = 2  # and of those that lose more than was admitted
GENTLE_PLAYED = 4  # and of the gentlest of those, as their layouts differ
AS_GOOD = 0.01  # of the objective, within which the simpler one is chosen
WORTH_A_LOSS = 0.03  # of the objective, which a loss of quality must gain at least
WORTH_UNKNOWN = 0.1  # the same for a loss that was never measured, over a measured one or none
ROUGH_STEP = 1.03  # of rates between candidates; that of the choice is found to a third of it
GAIN_STEP = 1.015  # for what looser targets bring: gains of ten plans move by 0.03 with twice it
ROUGH_DENSITY = 2  # points per octave of contexts and prompts, for rates of many candidates
ROUGH_ERROR = 0.06
"""Of a rough rate: those of 28 candidates of four questions were as near to the exact ones."""
WORTH_PLAYING = 0.2
"""Of the best rate: what is further behind is no choice, as what is simpler may be a tenth behind
and rough rates are off."""
BUDGETS = (512, 1024, 2048, 4096, 8192, 16384)
"""Tokens of a pass that are tried for the choice: what users of vLLM and SGLang set."""
SEQUENCES = (4.0, 3.0, 2.5, 2.0, 1.6, 1.3, 1.0, 0.8)
"""Times the mean number that decode at once: limits of sequences that are tried for the choice."""
ROUND_COUNTS = 32  # sequences, from which limits are multiples of 8, as people set them
RIVALS_TUNED = 2  # deployments beside the best that are tuned: 1 and 4 choose alike in ten plans
MOST_AT_ONCE = int(OPTION_RANGES["--max-seqs"].most)
WORTH_SHOWING = 0.5  # of the objective: less is no alternative
LARGER_CACHE = 4  # times the KV cache: what does not help then is not memory
MATTERS = 0.05  # relative gain from a target a tenth looser, with which one twice as long is tried
SHORTEST_ANSWER = 2  # tokens, the fewest that have a time per output token
QUEUEING_FACTOR = 2.0  # times a long prompt's own time: what it takes among others
MAX_ALTERNATIVES = 5
LAYOUTS_TRIED = 4  # the best in closed form: of ten plans, 2 and 8 find the same, 1 misses two
CLIFF = 1.0  # relative gain from a target a tenth looser, from which it is said to be barely met
ROOMIER = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # times such a target, tried in turn
SATURATED = 0.7  # of the rate of equal requests without a gap, where a search of rates begins
NEARLY_FITS = 1.01  # times the memory: up to there the play, which counts blocks, decides


Settings = tuple[int, int]  # tokens per pass and sequences at once, of each rank; 0: the engine's
ENGINES_OWN: Settings = (0, 0)


@frozen
class ServiceQuestion:
    """What a service is asked for.

    Attributes
    ----------
    deployments
        One question per deployment, the simplest first: limits, admitted techniques, objective.
    load
        What requests look like.
    asked
        What must be kept, by how many and how surely.
    rules
        The engine's limits.
    tuned
        Which of them (``max_tokens``, ``max_seqs``) are tried at other values, as none was given.
    total_gpus
        GPUs that all serve; 0: deployments are compared by what one GPU of them carries.
    research
        Whether what no engine runs may be chosen.
    given
        Targets that the user set; the others are kvsim's defaults.
    raised
        Default targets that are longer than usual, as the usual ones leave no room for load.
    """

    deployments: tuple[Question, ...]
    load: Load
    asked: ServiceLevel
    rules: Rules = field(default_factory=Rules)
    tuned: tuple[str, ...] = ("max_tokens", "max_seqs")
    total_gpus: int = 0
    research: bool = False
    given: tuple[str, ...] = ()
    raised: tuple[str, ...] = ()

    @property
    def objective(self) -> str:
        """What is made as good as it can be."""
        return self.deployments[0].objective

    def with_each(self, change: Callable[[Question], Question]) -> "ServiceQuestion":
        """The question with something changed in that of every deployment."""
        return replace(self, deployments=tuple(map(change, self.deployments)))

    def under(self, **times: float) -> "ServiceQuestion":
        """The question with other targets. [s]"""
        asked: ServiceLevel = replace(self.asked, **times)
        return replace(self.with_each(lambda q: q.with_limits(**times)), asked=asked)

    def replicas(self, deployment: Deployment) -> int:
        """Replicas of a deployment that serve, one where GPUs are not given in all."""
        return max(self.total_gpus // deployment.gpus, 1)


@frozen
class Candidate:
    """A technique with its settings on a deployment.

    Attributes
    ----------
    question
        The question for this deployment.
    technique
        The technique with its settings.
    guess
        Requests per second of one replica, from equal requests in closed form. [1/s]
    value
        The objective from the same estimate; more is better.
    evidence
        Evidence for the loss of quality, that of the weights included.
    needs
        Command-line option that would admit it; empty where it may be chosen.
    """

    question: Question
    technique: Technique
    guess: float
    value: float
    evidence: Evidence
    needs: str = ""

    @property
    def deployment(self) -> Deployment:
        """Model, machine and software."""
        return self.question.deployment

    @property
    def engines(self) -> list[str]:
        """Names of the released engines that can serve the candidate."""
        if self.question.admission.engine:
            return engines_running(self.technique.name, self.deployment)
        return served_by(self.technique.name, self.deployment)


@frozen
class PlayedOption:
    """A candidate that was played.

    Attributes
    ----------
    value
        The objective, more is better.
    rough
        Whether it was played with few points of its times.
    """

    candidate: Candidate
    carried: Carried
    value: float
    rough: bool = False

    @property
    def rank(self) -> tuple[int, ...]:
        """How simple: fewer GPUs, a known loss, weights as released, lossless, a plain cache."""
        d = self.carried.deployment
        changed, unknown = d.weights != d.model.released, self.candidate.evidence.unknown
        return d.gpus, int(unknown), int(changed), *simplicity_rank(self.carried.technique)

    def margin(self, best: "PlayedOption") -> float:
        """How far it may fall behind the best and still be chosen, as it is simpler. [1]"""
        if best.candidate.evidence.unknown and not self.candidate.evidence.unknown:
            return WORTH_UNKNOWN
        worse = self.candidate.technique.exact and not best.candidate.technique.exact
        return WORTH_A_LOSS if worse else AS_GOOD


@frozen
class Rejected:
    """An option that was not chosen, and why."""

    option: PlayedOption
    reason: str


@frozen
class BarelyMet:
    """A target that a request alone nearly misses, so that a little more of it admits far more.

    Attributes
    ----------
    target
        ``ttft`` or ``tpot``.
    alone
        Time of the request that the share asked for does not exceed, if no other is served. [s]
    roomier
        The nearest target tried that a tenth more raises by less than half. [s]
    per_s
        The rate with it, of all replicas. [1/s]
    """

    target: str
    alone: float
    roomier: float
    per_s: float


@frozen
class ServicePlan:
    """The answer for a service."""

    question: ServiceQuestion
    choice: PlayedOption
    stretch: float  # the rate if passes take as long as predicted [1/s]
    alternatives: list[Rejected]
    narrower: PlayedOption | None  # full KV with narrower weights there, where it is better
    layout: PlayedOption | None  # the best other layout of as many GPUs, where no other row has one
    research: PlayedOption | None  # the best that no engine runs, where it is better
    prices: dict[str, float]  # a looser target -> relative gain of the rate
    barely: BarelyMet | None  # the target that leaves hardly any room for load
    considered: int  # settings and batches in closed form
    plays: int
    fills_cache: bool  # whether the KV cache ends the rate: a larger one would raise it
    missing: list[Question]  # of those asked for, on which nothing keeps the targets
    replicas: int = 0  # that carry a trace at its own rate; 0 where the largest rate was asked for

    @property
    def prediction(self) -> Prediction:
        """The choice for equal requests of mean lengths, as many at once as while it computes."""
        c, w = self.choice.carried, self.choice.candidate.question.workload
        parts = c.technique.tiles() * c.deployment.dp
        batch = max(np.ceil(c.batch / parts), 1.0) * parts
        return w.predict(c.technique, c.deployment, np.array([batch]))

    def curve(self) -> Iterator[dict[str, object]]:
        """Times at rates from a tenth of the stretch to all of it, if predictions are exact."""
        search, c = RateSearch(self.question.load, self.question.asked), self.choice.carried
        for tenth in range(1, 11):
            rate = tenth / 10 * self.stretch / c.replicas
            o = search.play(c.costs, rate)
            yield {
                "requests_per_s": rate * c.replicas,
                "kept_share": float(o.meets_targets.mean()),
                "ttft_s": quantiles(o.ttft_s),
                "tpot_s": quantiles(o.tpot_s),
            }


def value_of_rate(question: ServiceQuestion, deployment: Deployment) -> float:
    """The objective for each request per second of a replica; 0 where rates do not decide. [s]"""
    d, replicas = deployment, question.replicas(deployment)
    if question.objective == "latency":
        return 0.0
    if question.objective == "cost":
        return 1 / (d.hardware.price * d.gpus) if d.hardware.price else 0.0
    return replicas if question.total_gpus else 1 / d.gpus


@dataclass
class _Evaluations:
    """What searches have evaluated, by the identity of the objects that it is about.

    Attributes
    ----------
    kept
        The questions, kept alive so that no other object gets their identity.
    """

    kept: list[ServiceQuestion] = field(default_factory=list)
    tables: dict[tuple[int, bool, str], TableSearch] = field(default_factory=dict)
    costs: dict[tuple[str, int, bool], StepCosts] = field(default_factory=dict)
    slower: dict[tuple[int, str, float], Slower] = field(default_factory=dict)
    alone: dict[tuple[str, int, int, float], dict[str, float]] = field(default_factory=dict)
    idle: dict[tuple[str, int, int, float], Outcome | None] = field(default_factory=dict)


class ServiceSearch:
    """Candidates of one question, and what they carry.

    Parameters
    ----------
    question
        What the service is asked for.
    before
        A search for another question, whose evaluations are used again.
    """

    def __init__(self, question: ServiceQuestion, before: "ServiceSearch | None" = None) -> None:
        self.q = question
        self.rates = RateSearch(question.load, question.asked)
        self.considered = 0
        self._known: _Evaluations = before._known if before else _Evaluations()
        self._known.kept.append(question)

    def under(
        self, times: Mapping[str, float], raised: tuple[str, ...] | None = None
    ) -> "ServiceSearch":
        """Return the same search under other targets, with what is known whatever they are.

        Parameters
        ----------
        times
            The targets by name. [s]
        raised
            Which of them are defaults that were raised; as before if None.
        """
        question = self.q.under(**times)
        other = ServiceSearch(
            replace(question, raised=question.raised if raised is None else raised), self
        )
        pairs = zip(self.q.deployments, other.q.deployments, strict=True)
        moved = {id(before): after for before, after in pairs}
        self._known.tables |= {
            (id(moved[key]), every, named): table.under(**times)
            for (key, every, named), table in self._known.tables.items()
            if key in moved
        }
        return other

    def slower(self, question: Question, technique: Technique) -> Slower:
        """How much longer passes may take than predicted."""
        d, sure = question.deployment, self.q.asked.sure
        key, known = (id(d), technique.name, sure), self._known.slower
        if key not in known:
            known[key] = known_factors(d, technique, sure)
        return known[key]

    # closed form

    def table(self, question: Question, every: bool = False, named: str = "") -> TableSearch:
        """Settings and batches on one deployment for equal requests.

        Parameters
        ----------
        every
            Whether what no engine runs is considered too.
        named
            The only technique to consider; empty for all.
        """
        q, key = question, (id(question), every, named)
        if key not in self._known.tables:
            names = [
                t.name for t in q.admission.candidates() if q.admission.has_drafter(t, q.deployment)
            ]
            names = [n for n in names if n == named] if named else names
            if not (every or q.admission.only or q.admission.engine):
                names = [n for n in names if served_by(n, q.deployment)]
                names = [] if full_weights(q.deployment) >= q.limits.gpu_memory else names
            search = TableSearch(q, tabulate(q, tuple(names)) if names else Options())
            search.drafts()
            self.considered += 0 if named else len(search.table)
            self._known.tables[key] = search
        return self._known.tables[key]

    def plain(self, question: Question) -> Candidate | None:
        """Full KV at its best batch on one deployment; None where it may not run or not fit."""
        if question.weights_lose:
            return None
        return next(self.candidates(question, self.q.research, FULL), None)

    def candidates(
        self, question: Question, every: bool = False, named: str = ""
    ) -> Iterator[Candidate]:
        """The best settings of each technique on one deployment, admitted or not.

        The parameters are those of :meth:`table`.
        """
        q, search = question, self.table(question, every, named)
        columns, table = search.table.columns, search.table
        for name in table.names:
            for row in self._best_rows(q, search, name):
                t, evidence = table.technique[row], table.evidence[row]
                known = combine([evidence, q.weights_evidence])
                judged = known if q.admission.judges_weights else evidence
                lossy, guessed = q.admission.loss(judged), columns["assumed"][row]
                needs = "" if lossy <= q.limits.loss else needed_option(judged)
                needs = needs if guessed <= q.limits.assumed else "--acceptance"
                per_s = -float(columns["throughput"][row]) * q.deployment.gpus / q.workload.generate
                yield Candidate(q, t, per_s, -float(columns[q.objective][row]), known, needs)

    def _best_rows(self, q: Question, search: TableSearch, name: str) -> Iterator[int]:
        """The best row of a technique within the limits; else the quickest that fits in memory.

        And the best of those that lose no more than was admitted, where the best loses more.
        """
        slower = self.slower(q, parse(name))
        times = {"ttft": q.limits.ttft / slower.prefill, "tpot": q.limits.tpot / slower.decode}
        memory = {k: v for k, v in q.limits.finite().items() if k.endswith("memory")}
        mild = {"harm": max(KNOWN_BAD, q.limits.loss), "idle": 0.0}
        asked = {"loss": q.limits.loss, "assumed": q.limits.assumed}
        found: dict[int, None] = {}
        for limits in (mild, mild | asked):
            row = search.best(memory | times | limits, name)
            if row is None:
                rows = search.table.rows_of(name)
                fits = [r for r in rows.tolist() if _within(search, r, memory | limits)]
                if not fits:
                    near = {k: NEARLY_FITS * v for k, v in memory.items()}
                    fits = [r for r in rows.tolist() if _within(search, r, near | limits)]
                row = min(fits, key=lambda r: search.table.columns["tpot"][r], default=None)
            if row is not None:
                found[row] = None
        yield from found

    # play

    def costs(
        self, candidate: Candidate, settings: Settings = ENGINES_OWN, rough: bool = False
    ) -> StepCosts:
        """Times of passes of a candidate.

        Parameters
        ----------
        settings
            Tokens per pass and sequences at once, in place of the question's.
        rough
            Whether lines between few points will do: rates are then within 6 %, where tables of
            every batch take up to ten times as long.

        Raises
        ------
        InputError
            If the model leaves no memory for a cache.
        """
        c = candidate
        rules = replace(self.q.rules, prefix_caching=self.q.load.reuses)
        tokens, seqs = settings
        rules = replace(
            rules, max_tokens=tokens or rules.max_tokens, max_seqs=seqs or rules.max_seqs
        )
        batch, limits = c.question.workload.batch, c.question.limits
        if batch is not None and not seqs:
            rules = replace(rules, max_seqs=min(batch, MOST_AT_ONCE))
        rules = rules.scale_to(c.deployment)
        costs = StepCosts.for_requests(
            c.technique, c.deployment, rules, self.q.load.requests, limits.gpu_memory
        )
        assert costs.capacity > 0
        key = str(c.technique), id(c.deployment), rough
        known = self._known.costs.get(key)
        if known is None or not known.reaches(costs):
            most = BUDGETS[-1] * c.deployment.lanes if known else 0  # others are then asked for too
            wide = replace(costs, rules=replace(rules, max_tokens=max(most, rules.max_tokens)))
            if rough:
                known = wide.with_density(ROUGH_DENSITY, work=False)
            else:
                known = wide.times_alone(known)
            self._known.costs[key] = known
        return costs.sharing(known)

    def play(
        self,
        candidate: Candidate,
        settings: Settings = ENGINES_OWN,
        guess: float = 0.0,
        rough: bool = False,
        least: float = 0.0,
        kept: float = 0.0,
    ) -> PlayedOption | None:
        """What a candidate carries; None where it cannot keep the targets.

        Parameters
        ----------
        least
            The least value that is of interest; None if it is worth less.
        kept
            A rate of a replica that is known to keep the targets, from which a finer search
            begins; 0 if none is. [1/s]
        """
        try:
            c, costs = candidate, self.costs(candidate, settings, rough)
        except InputError:
            return None
        block = self.q.load.requests.block_tokens
        unable = self.q.load.reuses and not costs.shares_prefixes(block)
        if unable and not (c.engines or c.question.admission.only):
            return None
        each, replicas = value_of_rate(self.q, c.deployment), self.q.replicas(c.deployment)
        least = least / each if each else 0.0
        slower = self.slower(c.question, c.technique)
        begin = 0.0 if kept else guess or SATURATED * c.guess
        step = RATE_STEP if kept else ROUGH_STEP
        found = self.rates.carried(costs, begin, slower, replicas, step, least, kept)
        if found is None:
            return None
        value = found.each_per_s * each
        if self.q.objective == "latency":
            value = 1 / self.rates.alone(costs)
        return PlayedOption(c, found, value, rough)

    def may_keep(self, candidate: Candidate) -> bool:
        """Whether enough requests would keep the targets if each were served alone.

        A request waits and shares passes only where there are others, so what fails here need
        not be played.
        """
        times, asked = self.times_alone(candidate), self.q.asked
        return times["ttft"] <= asked.ttft and times["tpot"] <= asked.tpot

    def times_alone(self, candidate: Candidate) -> dict[str, float]:
        """Least TTFT and TPOT of the prompt that the share asked for do not exceed. [s]"""
        key = self._key(candidate)
        if key not in self._known.alone:
            self._known.alone[key] = self._time_alone(candidate)
        return self._known.alone[key]

    def _key(self, c: Candidate) -> tuple[str, int, int, float]:
        """What the times of a candidate for these requests depend on, whatever the targets."""
        return str(c.technique), id(c.deployment), id(self.q.load), self.q.asked.sure

    def _time_alone(self, candidate: Candidate) -> dict[str, float]:
        c = candidate
        prompts, share = self.q.load.requests.prompt, self.q.asked.share
        prompt = max(int(np.quantile(prompts, share)), 1)
        longer = replace(c.question.workload, prompt=prompt, generate=SHORTEST_ANSWER)
        found = longer.predict(c.technique, c.deployment, np.ones(1))
        slower = self.slower(c.question, c.technique)
        ttft = 0.0 if self.q.load.reuses else float(found.prefill_s[0])  # a part may be cached
        tpot = 0.0 if c.technique.drafts else float(np.nan_to_num(found.tpot_s)[0])
        return {"ttft": ttft * slower.prefill, "tpot": tpot * slower.decode}

    def play_idle(self, where: Question) -> Outcome | None:
        """What happens at light load on a deployment; None where nothing fits."""
        c = self.plain_or_best(where)
        if c is None:
            return None
        key = self._key(c)
        if key not in self._known.idle:
            self._known.idle[key] = self._play_idle(c)
        return self._known.idle[key]

    def _play_idle(self, c: Candidate) -> Outcome | None:
        try:
            costs = self.costs(c)
        except InputError:
            return None
        o = self.rates.play(self.slower(c.question, c.technique).apply(costs), IDLE)
        return o if o.finished.any() else None

    def idle_times(self, where: Question) -> dict[str, float] | None:
        """TTFT and TPOT that enough requests keep at light load; None where nothing fits. [s]

        Infinite where more requests are larger than the cache than may be late.
        """
        o = self.play_idle(where)
        if o is None:
            return None
        share, refused = self.q.asked.share, float(o.refused.mean())
        if refused > 1 - share:
            return {"ttft": np.inf, "tpot": np.inf}
        able = share / (1 - refused)  # of the others
        return {
            "ttft": float(np.nanquantile(o.ttft_s, able)),
            "tpot": float(np.nanquantile(o.tpot_s, able)) if np.isfinite(o.tpot_s).any() else 0.0,
        }

    def _promise(self, c: Candidate) -> float:
        """What equal requests promise, less where long prompts alone would miss their target."""
        room = min(
            1.0, self.q.asked.ttft / max(QUEUEING_FACTOR * self.times_alone(c)["ttft"], IDLE)
        )
        worth = room**2
        return c.value * worth if c.value > 0 else c.value / worth

    def shortlist(self, every: bool = False) -> tuple[list[Candidate], list[Candidate]]:
        """Candidates worth playing: those that may be chosen, and those that lose more."""
        able = self._worth_tabulating()
        found = [c for q in able for c in self.candidates(q, every)]
        found += [c for q in able for c in self.composed(q, every)]
        ordered = sorted(found, key=lambda c: -self._promise(c))
        admitted = [c for c in ordered if not c.needs]
        plain = [c for c in admitted if c.technique.name == FULL]
        chosen = dict.fromkeys(map(id, [*admitted[:PLAYED], *plain[:PLAYED]]))
        return [c for c in admitted if id(c) in chosen], self._lossy(ordered, admitted)

    def _lossy(self, ordered: list[Candidate], admitted: list[Candidate]) -> list[Candidate]:
        """Of what loses more and promises more, the gentlest and the best."""
        able = [c for c in ordered if c.needs and c.engines]
        least = self._promise(admitted[0]) if admitted else -np.inf
        ahead = [c for c in able if self._promise(c) > least]
        gentle = min((c.evidence.column for c in ahead), default=np.inf)
        gentlest = [c for c in ahead if c.evidence.column == gentle][:GENTLE_PLAYED]
        return list({id(c): c for c in (*gentlest, *able[:LOSSY_PLAYED])}.values())

    def _worth_tabulating(self) -> list[Question]:
        """Deployments, but those on which full KV promises less than on enough others."""
        plain = [c for q in self.q.deployments if (c := self.plain(q)) is not None]
        behind = {id(c.question) for c in sorted(plain, key=lambda c: -self._promise(c))[PLAYED:]}
        return [q for q in self.q.deployments if id(q) not in behind]

    def choose(self) -> PlayedOption | None:
        """The choice alone; None where nothing keeps the targets."""
        near, _ = self._play_all(self.shortlist(self.q.research)[0], 1 - WORTH_PLAYING)
        return self.typical(self._settle(near)) if near else None

    def _play_all(
        self, admitted: list[Candidate], shown: float = 0.0
    ) -> tuple[list[PlayedOption], list[PlayedOption]]:
        """What may be chosen, and what is too far behind for that to need exact rates.

        Parameters
        ----------
        shown
            Of the best value: what is worth less is left out.
        """
        able = [c for c in admitted if self.may_keep(c)]
        if len(self.q.deployments) == 1:
            return self._play_each(able, shown), []
        roughly = self._play_each(able, shown, rough=True)
        near: list[PlayedOption] = []
        behind: list[PlayedOption] = []
        for o in sorted(roughly, key=lambda o: -o.value):
            best = max(near, key=lambda o: o.value, default=o)
            simpler = o.rank < best.rank
            least = best.value * (1 - o.margin(best)) if simpler else best.value
            if o.value * (1 + ROUGH_ERROR) < least:
                behind.append(o)
            elif (exact := self.play(o.candidate, guess=o.carried.each_per_s)) is not None:
                near.append(exact)
        return near or self._play_each(able, shown), behind

    def _play_each(
        self, candidates: list[Candidate], shown: float, rough: bool = False
    ) -> list[PlayedOption]:
        found: list[PlayedOption] = []
        for c in candidates:
            least = shown * max((o.value for o in found), default=0.0)
            o = self.play(c, rough=rough, least=least)
            found += [] if o is None else [o]
        return found

    def _simplest(self, played: list[PlayedOption]) -> PlayedOption:
        """Of what is as good as the best."""
        near = as_good_as_best(played, lambda o: -o.value, PlayedOption.margin)
        return min(near, key=lambda o: (o.rank, -o.value))

    def solve(self) -> ServicePlan | None:
        """The plan; None where nothing keeps the targets."""
        admitted, lossy = self.shortlist(self.q.research)
        near, behind = self._play_all(admitted)
        if not near:
            return None
        once = self._settle(near)  # in the first draw, as all that is compared at first
        others: dict[str, PlayedOption] = {}  # the best by what would admit it
        for c in lossy:
            o, known = self._play_against(once, c), others.get(c.needs)
            if o is not None and (known is None or o.value > known.value):
                others[c.needs] = o
        rivals = [o for o in (*near, *behind) if o.candidate is not once.candidate]
        prices, choice = self._prices(once), self.typical(once)
        shown = find_others(self, once, rivals, list(others.values()))
        rejected = [Rejected(o, compare_options(self.q, choice, o)) for o in shown]
        return ServicePlan(
            self.q,
            choice,
            self.rates.stretch(choice.carried) * choice.carried.replicas,
            rejected,
            self._narrower(choice),
            self._other_layout(choice, shown),
            self._research(choice),
            prices,
            self._barely_met(once, prices),
            self.considered,
            self.rates.plays,
            max(prices.values(), default=0.0) < MATTERS and self._fills_cache(choice),
            [] if self.q.total_gpus else self._missing(admitted, [*near, *behind]),
            self.rates.replicas_for(choice.carried) if self.q.load.per_s else 0,
        )

    def typical(self, option: PlayedOption) -> PlayedOption:
        """An option with the rate and the times of several draws, as all that is printed has."""
        carried = self.rates.typical(option.carried)
        lower = carried.each_per_s / option.carried.each_per_s
        value = option.value * (1.0 if self.q.objective == "latency" else lower)
        return replace(option, carried=carried, value=value)

    def _play_against(self, choice: PlayedOption, candidate: Candidate) -> PlayedOption | None:
        """A candidate under the choice's limits; None where even a rough rate is too far behind."""
        c, settings, least = candidate, _settings(choice), choice.value / (1 + ROUGH_ERROR)
        rough = len(self.q.deployments) > 1 and self.q.objective != "latency"
        if rough and self.play(c, settings, rough=True, least=least) is None:
            return None
        return self.play(c, settings)

    def _missing(self, tried: list[Candidate], played: list[PlayedOption]) -> list[Question]:
        """The question of each deployment on which nothing fits, or nothing keeps the targets."""
        kept = {id(o.candidate.question) for o in played}
        failed = {id(c.question) for c in tried} - kept
        return [
            q
            for q in self.q.deployments
            if id(q) in failed
            or (
                not q.weights_lose
                and self.plain(q) is None
                and all(c.needs for c in self.candidates(q))
            )
        ]

    def _settle(self, near: list[PlayedOption]) -> PlayedOption:
        """The simplest of what is as good as the best, with the engine's settings tuned.

        Settings may move another deployment ahead, so the next best ones are tuned too.
        """
        first = self._simplest(near)
        found, tried = [self._tune(first, first.value)], {id(first.candidate.question)}
        for o in sorted(near, key=lambda o: -o.value):
            if id(o.candidate.question) in tried or len(tried) > RIVALS_TUNED:
                continue
            tried.add(id(o.candidate.question))
            found.append(self._tune(o, found[0].value))
        choice = self._simplest(found)
        again = self.play(choice.candidate, _settings(choice), kept=choice.carried.each_per_s)
        return again or choice

    def _tune(self, option: PlayedOption, least: float) -> PlayedOption:
        """An option with the tokens of a pass and the sequences at once that carry most.

        Fewer sequences at once carry more where the prompts of others delay decoding.

        Parameters
        ----------
        least
            The value that other settings must exceed to be of interest.
        """
        best, (usual, _) = option, _settings(option)
        larger = [n for n in BUDGETS if n > usual]
        smaller = [n for n in reversed(BUDGETS) if n < usual]
        for some in (larger, smaller) if "max_tokens" in self.q.tuned else ():
            last = max(least, option.value)
            for tokens in some:  # as long as it carries more
                found = self.play(option.candidate, (tokens, _settings(option)[1]), least=last)
                if found is None or found.value <= last:
                    break
                best = found if found.value > best.value * (1 + AS_GOOD) else best
                last = found.value
            if best is not option:
                break
        fixed = option.candidate.question.workload.batch is not None
        if fixed or "max_seqs" not in self.q.tuned or self.q.objective == "latency":
            return best
        running = best.carried.batch / best.carried.deployment.dp
        tokens, most = _settings(best)
        counts = (max(int(share * running), 1) for share in SEQUENCES)
        for count in dict.fromkeys(n if n < ROUND_COUNTS else n - n % 8 for n in counts):
            if count < most:
                bar = max(least, best.value) * ROUGH_STEP**2  # both rates are found to a step
                best = self.play(option.candidate, (tokens, count), least=bar) or best
        return best

    def _rate_with(
        self, choice: PlayedOption, name: str, factor: float, kept: float = 0.0
    ) -> float:
        """The rate of a replica where a target is so many times as long. [1/s]"""
        c, asked = choice.carried, self.q.asked
        search = RateSearch(self.q.load, replace(asked, **{name: factor * getattr(asked, name)}))
        costs = c.slower.apply(c.costs)
        found = search.largest(costs, 0.0, GAIN_STEP, kept=kept or c.each_per_s)
        self.rates.plays += search.plays
        return found

    def _prices(self, choice: PlayedOption) -> dict[str, float]:
        """What a looser target would bring the choice, played again."""
        found, rate = {}, choice.carried.each_per_s
        names = [x for x in ("ttft", "tpot") if np.isfinite(getattr(self.q.asked, x))]
        tenth = {name: self._rate_with(choice, name, 1.1) / rate - 1 for name in names}
        for name, gain in tenth.items():
            found[f"a 10 % looser {name.upper()}"] = gain
        for name, gain in tenth.items():
            if gain > MATTERS:
                found[f"twice the {name.upper()}"] = self._rate_with(choice, name, 2.0) / rate - 1
        return found

    def _barely_met(self, choice: PlayedOption, prices: dict[str, float]) -> BarelyMet | None:
        """The target that limits the choice to a fraction of what a little more would admit."""
        for name in ("ttft", "tpot"):
            if prices.get(f"a 10 % looser {name.upper()}", 0.0) < CLIFF:
                continue
            rate = factor = 0.0
            for factor in ROOMIER:
                rate = self._rate_with(choice, name, factor, rate)
                if self._rate_with(choice, name, 1.1 * factor, rate) < (1 + CLIFF / 2) * rate:
                    break
            alone = self.times_alone(choice.candidate)[name]
            roomier = factor * getattr(self.q.asked, name)
            asked = replace(self.q.asked, **{name: roomier})
            carried = replace(choice.carried, each_per_s=rate, asked=asked)
            found = RateSearch(self.q.load, asked).typical(carried)
            return BarelyMet(name, alone, roomier, found.per_s)
        return None

    def _fills_cache(self, choice: PlayedOption) -> bool:
        """Whether a larger KV cache alone would let a replica keep the targets at a higher rate.

        At a rate above what the GPU computes any cache is full, so that tells nothing.
        """
        c = choice.carried
        costs = c.slower.apply(c.costs)
        blocks = int(LARGER_CACHE * costs.capacity / max(costs.room.block_bytes, 1.0))
        larger = costs.with_rules(replace(costs.rules, blocks=blocks))
        rate, share = 1.1 * c.each_per_s, self.q.asked.share
        return self.rates.kept(larger, rate) >= share > self.rates.kept(costs, rate)

    def composed(self, question: Question, every: bool) -> Iterator[Candidate]:
        """The best compositions on a deployment, where there is anything to compose.

        Parameters
        ----------
        every
            Whether what no engine runs is considered too.
        """
        q, names = question, {t.name for t in question.admission.candidates()}
        if not every:
            names = {n for n in names if served_by(n, q.deployment)} - {FULL}
            stored = {n for n in names if n in ("fp8", CACHE)}
            lossless = not (q.limits.loss or q.admission.unmeasured)
            if lossless or not stored or names <= stored:
                return
        some = tuple(t for t in q.admission.candidates() if t.name in names)
        of = replace(q, admission=replace(q.admission, techniques=some))
        most = MOST_RESEARCHED if every and not self.q.research else MOST_COMPOSED
        search = CompositionSearch(of, lambda t: self._limits(q, t), most)
        for found in search.solve():
            known = combine([found.evidence, q.weights_evidence])
            judged = known if q.admission.judges_weights else found.evidence
            if q.admission.loss(judged) > q.limits.loss:
                continue
            per_gpu = -found.goal if q.objective == "throughput" else 0.0
            p = per_gpu or float(search.predict(found).output_tok_s[0]) / q.deployment.gpus
            per_s = p * q.deployment.gpus / q.workload.generate
            if every or served_by(found.technique.name, q.deployment):
                yield Candidate(q, found.technique, per_s, -found.goal, known)
        self.considered += search.tried

    def _limits(self, q: Question, technique: Technique) -> dict[str, float]:
        """Memory, and the targets less what passes may take longer."""
        slower = self.slower(q, technique)
        times = {"ttft": q.limits.ttft / slower.prefill, "tpot": q.limits.tpot / slower.decode}
        return times | {k: v for k, v in q.limits.finite().items() if k.endswith("memory")}

    def _narrower(self, choice: PlayedOption) -> PlayedOption | None:
        """Full KV with the gentlest weights of known loss that carry more where it was chosen.

        None where the user asked for other weights than the released ones, or for several.
        """
        q = choice.candidate.question
        several = len({x.deployment.weights for x in self.q.deployments}) > 1
        if several or q.deployment.weights != q.deployment.model.released:
            return None
        named = replace(q.admission, judges_weights=False)
        for weights in narrower_formats(q.deployment):
            d = replace(q.deployment, weights=weights)
            other = replace(q, deployment=d, admission=named)
            if other.weights_evidence.unknown:
                continue
            search = ServiceSearch(replace(self.q, deployments=(other,)))
            plain, least = search.plain(other), (1 + MATTERS) * choice.value
            found = search.play(plain, _settings(choice), least=least) if plain else None
            self.rates.plays += search.rates.plays
            if found is not None and (found := self.typical(found)).value >= least:
                return found
        return None

    def _other_layout(self, choice: PlayedOption, shown: list[PlayedOption]) -> PlayedOption | None:
        """The best other layout of as many GPUs with the same technique and weights, played."""
        c, q = choice.carried, choice.candidate.question
        mine = c.deployment.parallelism
        spread = [o for o in shown if o.carried.deployment.parallelism != mine]
        if c.gpus == 1 or any(_same_but_layout(o.carried, c) for o in spread):
            return None
        base = replace(q.deployment, tp=1, pp=1, dp=1, ep=1)
        admission = replace(q.admission, techniques=(c.technique,), only=())
        some = tuple(
            replace(q, deployment=d, admission=admission)
            for d in list_layouts(base, c.gpus)
            if d.parallelism != mine and engine_runs(q, d)
        )
        if not some:
            return None
        search = ServiceSearch(replace(self.q, deployments=some, total_gpus=c.gpus))
        found = search.best_of_first()
        self.rates.plays += search.rates.plays
        if found is None:
            return None
        per_gpu = self.q.objective == "throughput" and not self.q.total_gpus
        return self.typical(replace(found, value=found.value / c.gpus) if per_gpu else found)

    def best_of_first(self) -> PlayedOption | None:
        """What the best of the few deployments carries that equal requests find best."""
        best = None
        some = [c for q in self.q.deployments if (c := self.plain_or_best(q)) is not None]
        some = [c for c in some if self.may_keep(c)]
        for c in sorted(some, key=lambda c: -c.guess / c.deployment.gpus)[:LAYOUTS_TRIED]:
            best = self.play(c, least=best.value if best else 0.0) or best
        return best

    def plain_or_best(self, where: Question) -> Candidate | None:
        """Full KV on a deployment, or the best other technique that may be chosen there."""
        plain = self.plain(where)
        if plain is not None or where.weights_lose:
            return plain
        found = [c for c in self.candidates(where) if not c.needs]
        return max(found, key=lambda c: c.value, default=None)

    def _research(self, choice: PlayedOption) -> PlayedOption | None:
        """The best of what no engine runs on the chosen deployment, if it is better when played.

        Equal requests choose it, of what is known to lose little unless more is admitted.
        """
        q = choice.candidate.question
        if q.admission.engine or q.admission.only or self.q.research:
            return None
        mild = q.with_limits(loss=max(q.limits.loss, RESEARCH_LOSS))
        some = [c for c in self.composed(mild, every=True) if not c.engines]
        best = max(some, key=lambda c: c.value, default=None)
        least = choice.value * (1 + AS_GOOD)
        found = self.play(best, _settings(choice), least=least) if best else None
        found = found and self.typical(found)
        return found if found is not None and found.value > least else None


def _same_but_layout(one: Carried, other: Carried) -> bool:
    """Whether two serve alike on as many of the same GPUs, however these are divided."""
    mine, its = (
        (c.gpus, c.deployment.hardware.name, c.deployment.weights, c.technique.name)
        for c in (one, other)
    )
    return mine == its


def _settings(option: PlayedOption) -> Settings:
    """What an option was played with."""
    rules, d = option.carried.costs.rules, option.carried.deployment
    return int(rules.max_tokens // d.lanes), int(rules.max_seqs // d.dp)


def engine_runs(asked: Question, deployment: Deployment) -> bool:
    """Whether the engine that is asked for, or any, runs the model on another deployment."""
    engine = asked.admission.engine
    return not engine_refusal(engine, deployment) if engine else bool(served_by(FULL, deployment))


def full_weights(deployment: Deployment) -> float:
    """Bytes of the weights on a GPU. [B]"""
    return weights_bytes(parse(FULL).resident(deployment, decode_point(1.0, np.ones(1), 1.0, 0.0)))


def _within(search: TableSearch, row: int, limits: dict[str, float]) -> bool:
    return all(bool(search.table.columns[k][row] <= v * (1 + 1e-9)) for k, v in limits.items())


def find_others(
    search: ServiceSearch,
    choice: PlayedOption,
    rivals: list[PlayedOption],
    lossy: list[PlayedOption],
) -> list[PlayedOption]:
    """Return the other options that a person would weigh, at most five.

    Lossy options that would otherwise be chosen come first, the smallest loss of quality leading.
    Then follows the best option of each technique and deployment, unless it carries less and is
    better at nothing. What carries less than half as much is left out, except on another card or
    with other weights that the user has named.

    Parameters
    ----------
    search
        The search that played the options.
    choice
        The option that is recommended.
    rivals
        Options that may be chosen.
    lossy
        Options that lose quality and were not admitted.

    Returns
    -------
    list of PlayedOption
        The options, played with several draws.
    """
    q, shown = search.q, list[PlayedOption]()
    mine = search.times_alone(choice.candidate)
    for other in sorted(lossy, key=lambda o: (o.candidate.evidence.column, -o.value)):
        if choice.value < other.value * (1 - choice.margin(other)):  # it would be chosen
            shown.append(other)
    seen: set[tuple[str, int]] = set()
    for other in sorted(rivals, key=lambda o: -o.value):
        c = other.carried
        key = c.technique.name, id(other.candidate.question)
        compared = other.candidate.question is not choice.candidate.question and not q.total_gpus
        its = search.times_alone(other.candidate)
        quicker = any(its[name] < mine[name] for name in mine)
        dominated = other.value <= choice.value and other.rank >= choice.rank and not quicker
        dominated &= not (compared and c.technique.name == FULL)
        d, plain = choice.carried.deployment, c.technique.name == FULL
        named = c.deployment.hardware.name != d.hardware.name
        named |= plain and c.deployment.weights != d.weights
        dominated |= other.value < WORTH_SHOWING * choice.value and not named
        if key in seen or len(shown) >= MAX_ALTERNATIVES or dominated:
            continue
        seen.add(key)
        shown.append((search.play(other.candidate) or other) if other.rough else other)
    return list(map(search.typical, shown))


def compare_options(question: ServiceQuestion, choice: PlayedOption, other: PlayedOption) -> str:
    """Say how an option compares with the choice, in a clause.

    Parameters
    ----------
    question
        What was asked, whose objective is compared.
    choice, other
        The chosen option and another.
    """
    gain = other.value / choice.value - 1
    several = choice.carried.gpus != other.carried.gpus
    what = {
        "throughput": "{} {} requests/s",
        "cost": "costs {} {} per request",
        "latency": "requests take {} {}",
    }
    words = ("more", "fewer")
    if question.objective != "throughput":
        gain = 1 / (1 + gain) - 1
        words = ("longer", "less") if question.objective == "latency" else ("more", "less")
    said = what[question.objective].format(
        f"{100 * abs(gain):.0f} %", words[0] if gain > 0 else words[1]
    )
    return said + (
        " per GPU"
        if several and not question.total_gpus and question.objective == "throughput"
        else ""
    )


LENGTH_CLASSES = 3  # of prompts by their length, each with as many requests


@frozen
class ClassPlan:
    """What would serve requests with prompts of some lengths best, if they were alone.

    Attributes
    ----------
    least, most
        Their shortest and longest prompt. [tokens]
    share
        Of all requests.
    plan
        None where nothing keeps the targets.
    """

    least: int
    most: int
    share: float
    plan: ServicePlan | None


def plan_classes(question: ServiceQuestion) -> list[ClassPlan]:
    """Plan for each third of a trace's requests, by the length of their prompts, alone.

    Parameters
    ----------
    question
        The question about all of them.
    """
    requests = question.load.requests.without_sessions()
    edges = np.quantile(requests.prompt, np.arange(1, LENGTH_CLASSES) / LENGTH_CLASSES)
    of, found = np.searchsorted(edges, requests.prompt), []
    for one in range(LENGTH_CLASSES):
        rows = np.flatnonzero(of == one)
        if not rows.size:
            continue
        some = requests.take(rows)
        # as many as in the whole trace: of fewer the first tokens meet a target at any rate
        many = scale_clients(some, len(requests) / rows.size)[0]
        load = load_of_trace(many, question.load.words)
        mean, answers = max(round(load.prompt), 1), max(round(load.generate), 1)
        asked = tuple(
            replace(q, workload=replace(q.workload, prompt=mean, generate=answers))
            for q in question.deployments
        )
        plan = plan_service(replace(question, deployments=asked, load=load))
        ends = int(some.prompt.min()), int(some.prompt.max())
        found.append(ClassPlan(*ends, rows.size / len(requests), plan))
    return found


def plan_service(question: ServiceQuestion) -> ServicePlan | None:
    """Choose deployment, technique and engine settings for requests that keep coming.

    Returns
    -------
    ServicePlan or None
        None where nothing keeps the targets; `remedies.explain_no_service` says what would.
    """
    return ServiceSearch(question).solve()
