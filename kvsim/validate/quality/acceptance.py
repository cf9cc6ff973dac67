"""How many drafted tokens are accepted, round by round, when a technique writes by itself."""

from collections.abc import Sequence

import torch

from kvsim.techniques.technique import Technique
from kvsim.traces.attention import GAMMAS, Acceptance
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.parts.composed import Composed
from kvsim.validate.run import Generation

MEASURED = ("gamma", "acceptance")
DIGITS = 6  # of a share in a trace


def drafting(technique: Technique, gamma: int) -> Technique:
    """The same technique with another number of drafts per round."""
    return technique.with_rounds(gamma)


@torch.inference_mode()
def accepted(run: Generation) -> dict[int, list[int]]:
    """Accepted drafts of every round until a sequence is complete, by gamma.

    Gammas take turns: a round has the one that was measured least of those that there is room for
    (QuantSpec's buffer may be nearly full), and starts where the last round ended.
    """
    impl = run.impl
    assert isinstance(impl, Composed)
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
        impl.close()
    return found


def reached(accepted: Sequence[int], gamma: int) -> tuple[float, ...]:
    """Share of rounds that accept at least 1, 2, ..., gamma drafts."""
    counts = (sum(many >= place for many in accepted) for place in range(1, gamma + 1))
    return tuple(round(count / len(accepted), DIGITS) for count in counts)


def measure_acceptance(
    decoder: Decoder,
    technique: Technique,
    prompts: Sequence[Sequence[int]],
    generate: int,
    temperature: float,
) -> Acceptance | None:
    """Shares of rounds that accept so many drafts; none if some gamma had no round."""
    most = drafting(technique, max(GAMMAS))
    found = accepted(Generation(decoder, most, prompts, generate, temperature=temperature))
    rounds = min(map(len, found.values()))
    if not rounds:
        return None
    rows = tuple(reached(found[gamma], gamma) for gamma in GAMMAS)
    return Acceptance(named(technique), temperature, rounds, rows)


def named(technique: Technique) -> str:
    """As on the command line, without what is not set but measured."""
    name, colon, given = str(technique).partition(":")
    kept = [item for item in given.split(",") if item.partition("=")[0] not in MEASURED]
    return name + colon + ",".join(kept)
