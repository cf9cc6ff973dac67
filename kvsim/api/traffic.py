"""The requests that ``plan``, ``simulate`` and ``capacity`` serve: from a trace or generated."""

from dataclasses import replace
from math import ceil

from kvsim.console import print_once
from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.inputs import TokenLengths
from kvsim.models.configs import load_model
from kvsim.options import Inputs, options_of
from kvsim.traces import resample, workload
from kvsim.traces.lengths import choose_lengths, choose_longest
from kvsim.traces.read import ReadOptions, load
from kvsim.traces.requests import Requests
from kvsim.traces.resample import MOST_REQUESTS, scale_clients
from kvsim.traces.workload import DEFAULT_THINK, DrawnTraffic

SECONDS_PER_TOKEN = 0.03
"""About how long users wait for a token; it only sets how many requests each user sends. [s]"""


SCALES = ("clients", "clock")
"""What a factor on a trace's rate multiplies."""

LENGTHS = ("prompt", "generate")
"""Options that say how long requests are."""


@frozen
class ServedRequests:
    """Requests to serve, and where they come from.

    Attributes
    ----------
    requests
        Arrival times and lengths.
    name
        Name of the trace, or a description of the generated workload, for reports.
    notes
        Remarks on how the trace was read, or on what was assumed in generating requests.
    workload
        The distributions that requests were generated from; None for a trace.
    clock
        Whether a rate factor speeds up the clock of a trace, rather than multiplying its clients.
    """

    requests: Requests
    name: str
    notes: tuple[str, ...]
    workload: DrawnTraffic | None = None
    clock: bool = False

    @property
    def reuses(self) -> bool:
        """Whether generated prompts share prefixes with earlier ones."""
        w = self.workload
        return w is not None and bool(w.cached or w.hit_rate or w.turns > 1)

    def with_hit_rate(self, share: float) -> "ServedRequests":
        """Return generated requests of which another share of tokens repeats earlier prompts.

        Parameters
        ----------
        share
            Share of each prompt's tokens that are found in the prefix cache, 0 to 1.
        """
        assert self.workload is not None
        workload = replace(self.workload, hit_rate=share)
        return replace(self, requests=workload.draw(), workload=workload)

    def count_at(self, rate: float | None) -> int:
        """Estimate the number of requests at a rate, without generating them.

        Parameters
        ----------
        rate
            The rate, as in :meth:`at_rate`; None for the requests as they are.
        """

        count, own, most = len(self.requests), 1.0, resample.MOST_REQUESTS
        if rate is None or (self.workload is None and self.clock):
            return count
        if self.workload is not None:
            own = self.workload.rate
            most = most if self.workload.hours is not None else workload.MOST_REQUESTS
        return max(count, ceil(min(count * rate / own, most)))

    def at_rate(self, rate: float) -> Requests:
        """Return the requests at another rate.

        Parameters
        ----------
        rate
            For generated requests, requests per second; for a trace, a factor on its number of
            clients or on its clock.

        Raises
        ------
        InputError
            If there would be too many requests, or none.
        """

        if self.workload is None and self.clock:
            return self.requests.scaled(rate)
        if self.workload is None:
            if rate * len(self.requests) > MOST_REQUESTS:
                count = rate * len(self.requests)
                raise InputError(
                    f"--rate {rate:g}x: {count:,.0f} requests; expected at most "
                    f"{MOST_REQUESTS:,}; --scale clock plays the same requests faster"
                )
            print_once(
                "a higher rate means more clients in the same time; with --scale clock, the same "
                "requests arrive faster or slower instead"
            )
            some = scale_clients(self.requests, rate)[0]
            if not len(some):
                raise InputError(
                    f"--rate {rate:g}x: leaves none of the trace's {len(self.requests):,} "
                    "requests; give a larger one, or --scale clock"
                )
            return some
        return replace(self.workload, rate=rate).draw()


def read_traffic(inputs: Inputs) -> ServedRequests:
    """Read the trace of a command, or generate the requests that its options describe.

    Parameters
    ----------
    inputs
        The options of ``kvsim simulate`` or ``kvsim capacity``.

    Returns
    -------
    ServedRequests
        The requests; generated ones have the first of the requested rates.

    Raises
    ------
    InputError
        If both or neither are given, or the description is incomplete.
    """

    scale = read_scale(inputs)
    if inputs.trace is None:
        return _draw(inputs)
    given = inputs.given
    found = load(inputs.trace, read_options(inputs) if inputs.command == "simulate" else None)
    notes = list(found.notes)
    if not len(found.requests):
        raise InputError(f"--trace: {inputs.trace} has no requests; expected at least one")
    rates = str(given.get("rate", "x")).split(",")
    if not all(x.strip().endswith("x") for x in rates):
        notes.append(
            f"--rate {rates[0]}: with a trace, a factor; written {rates[0]}x it cannot be taken "
            "for requests per second"
        )
    return ServedRequests(found.requests, inputs.trace, tuple(notes), clock=scale == "clock")


def read_scale(inputs: Inputs) -> str:
    """Return what a rate factor multiplies: ``"clients"`` or ``"clock"`` of a trace.

    Parameters
    ----------
    inputs
        The options of the command.

    Raises
    ------
    InputError
        If ``--scale`` is neither.
    """
    if inputs.scale not in SCALES:
        raise InputError(f"--scale: got {inputs.scale[:40]!r}; expected {' or '.join(SCALES)}")
    return str(inputs.scale)


def build_traffic(
    inputs: Inputs, prompt: TokenLengths, generate: TokenLengths, context: int
) -> DrawnTraffic:
    """Build the random process that generates requests: lengths, arrivals and shared prefixes.

    Parameters
    ----------
    inputs
        The options of ``kvsim plan``, ``simulate`` or ``capacity``.
    prompt, generate
        Distributions of prompt and generated lengths. [tokens]
    context
        Maximum context of the model, which bounds the lengths. [tokens]

    Returns
    -------
    DrawnTraffic
        The process.

    Raises
    ------
    InputError
        If prefix reuse is described in two ways, or ``--lengths`` is unknown.
    """

    ways = [n for n in ("cached", "hit_rate", "turns") if n in inputs.given]
    if len(ways) > 1:
        first, second = (f"--{n.replace('_', '-')}" for n in ways[:2])
        raise InputError(f"give either {first} or {second}, not both: each describes prefix reuse")
    if inputs.lengths not in (None, "equal"):
        raise InputError(f"--lengths: got {inputs.lengths[:40]!r}; expected equal, or omit it")
    lengths = choose_lengths(prompt, generate, inputs.lengths == "equal")
    longest = choose_longest(lengths, inputs.max_model_len or context)
    reuse = inputs.select("burst", "cached", "hit_rate", "turns")
    return DrawnTraffic(lengths, longest=longest, **reuse)


def _draw(inputs: Inputs) -> ServedRequests:
    """Generate the requests that the options describe."""

    if not {"prompt", "generate", "rate", "req_s", "users"} & set(inputs.given):
        raise InputError(
            "--trace: not given; expected --trace, or --prompt, --generate and --rate or --users"
        )
    rate, users = _rates(inputs), inputs.users or 0
    if bool(rate) == bool(users):
        wrong = "give one of them, not both" if users else "neither is given"
        unsaid = [name for name in LENGTHS if name not in inputs.given]
        defaults = options_of("plan")
        also = "".join(f"; --{name} is {defaults[name].default} unless given" for name in unsaid)
        raise InputError(
            f"--rate and --users: {wrong}; give --rate 5 or --users 200 --think 20s{also}"
        )
    if users and inputs.think is None:
        raise InputError(
            "--users: the think time is missing; add it, such as --think 20s, or 0s for a server "
            "that always has this many requests"
        )
    if inputs.think is not None and not users and (inputs.turns or 1) < 2:
        raise InputError("--think: has no effect without --users or --turns; add one of them")
    if users and inputs.burst is not None:
        raise InputError("--burst: does not apply to --users; omit it, or give --rate")
    drawn = build_traffic(inputs, *_lengths(inputs), load_model(inputs.model).max_context)
    think = DEFAULT_THINK if inputs.think is None else inputs.think
    workload = replace(drawn, rate=rate, users=users, think=think, hours=inputs.hours)
    requests = workload.draw()
    if users:
        answer = SECONDS_PER_TOKEN * float(requests.generate.mean()) + 1.0
        workload = replace(workload, answer_seconds=answer)
        requests = workload.draw()
    words, notes = _describe(inputs, workload), tuple(_notes(inputs, workload))
    return ServedRequests(requests, words, notes, workload)


def _lengths(inputs: Inputs) -> tuple[TokenLengths, TokenLengths]:
    """Distributions of prompt and generated lengths, with the defaults of ``kvsim plan``."""
    plan = options_of("plan")
    prompt, generate = (
        getattr(inputs, name) if name in inputs.given else plan[name].value(plan[name].default)
        for name in LENGTHS
    )
    return prompt, generate


def _rates(inputs: Inputs) -> float:
    """Request rate, the first if several are given; 0 if none is, and 1 if it is searched for."""
    given = inputs.given.get("rate", inputs.given.get("req_s"))
    if given is None:
        return 1.0 if inputs.find == "rate" and not inputs.users else 0.0
    if str(given).rstrip().endswith("x"):
        raise InputError(
            f"--rate: got {str(given)[:40]!r}; without a trace there is nothing to multiply; "
            "expected requests per second, such as --rate 5"
        )
    found = inputs.rate if "rate" in inputs.given else inputs.req_s
    return float(found[0][1] if isinstance(found, list) else found)


def _describe(inputs: Inputs, w: DrawnTraffic) -> str:
    """Describe the workload in words, for reports."""
    given = {name: inputs.given.get(name, options_of("plan")[name].default) for name in LENGTHS}
    said = f"{given['prompt']} in and {given['generate']} out"
    if w.users:
        return f"{w.users:,} users, {said}"
    rates = inputs.given.get("rate", inputs.given.get("req_s"))
    one = rates is not None and not isinstance(rates, list | tuple) and "," not in str(rates)
    many = "" if str(rates) == "1" else "s"
    return f"{rates} request{many}/s of {said}" if one else said


def _notes(inputs: Inputs, w: DrawnTraffic) -> list[str]:
    """Remarks on what was assumed in generating requests."""
    said = []
    lengths = zip(LENGTHS, _lengths(inputs), strict=True)
    spread = [f"--{name}" for name, length in lengths if length.kind == "mean"]
    both = len(spread) > 1
    means, equal = ("these means", "the mean lengths") if both else ("this mean", "the mean length")
    if spread and inputs.lengths is None:
        said.append(
            f"{' and '.join(spread)}: lengths vary around {means} as in sample:chat, up to the "
            f"model's context of {w.longest:,} tokens; --lengths equal gives every request {equal}"
        )
    if w.users:
        said.append(f"users think {w.think:g} s on average before the next request")
    elif w.burst == 1.0:
        said.append("requests arrive independently (Poisson); --burst 2 makes them burstier")
    if w.turns > 1:
        said.append(
            f"conversations of {w.turns} turns, with {w.think:g} s between them; a prompt "
            "repeats all before"
        )
    elif not (w.cached or w.hit_rate or inputs.find == "hit-rate"):
        said.append("prompts share no prefixes; set --cached, --hit-rate or --turns if yours do")
    return said


def read_options(inputs: Inputs) -> ReadOptions:
    """Collect how to read a trace file.

    Parameters
    ----------
    inputs
        The options of a command that reads a trace.

    Returns
    -------
    ReadOptions
        Format, column names, units, and the handling of invalid or unordered rows.

    Raises
    ------
    InputError
        If ``--columns`` is malformed or names a column twice.
    """

    columns = inputs.columns or ""
    pairs = [item.partition("=")[::2] for item in columns.split(",")] if columns else []
    named = dict(pairs)
    if len(named) < len(pairs):
        raise InputError(f"--columns: got {columns[:60]!r}; expected each role once")
    if not all(named.values()):
        raise InputError(f"--columns: got {columns[:60]!r}; expected arrival=NAME,prompt=NAME,..")
    tokens = "hash_block_tokens" if inputs.command == "simulate" else "block_tokens"
    return ReadOptions(
        inputs.format or "",
        named,
        inputs.time_unit or "",
        getattr(inputs, tokens) or 0,
        inputs.chars_per_token or 0.0,
        inputs.sort,
        inputs.skip_bad,
    )
