"""Running a plan: its quality loss and its times, compared with full-precision KV."""

from collections.abc import Iterator, Sequence

import torch

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment
from kvsim.techniques import parse
from kvsim.techniques.technique import Technique
from kvsim.validate.counts.expected import RandomPrompts, predict, resident_bytes
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.quality.runs import Forced
from kvsim.validate.quality.settings import Reading
from kvsim.validate.times.compared import Measured
from kvsim.validate.times.timed import Timing, run_timed

PLANNED_REPEATS = 3
BASELINE = "full"


@frozen
class MeasuredLoss:
    """Quality loss of a technique on a text, relative to full-precision KV.

    Attributes
    ----------
    relative
        Relative increase in perplexity.
    divergence
        Mean KL divergence of the next token's distribution. [nat per token]
    """

    relative: float
    divergence: float


@torch.inference_mode()
def measure_loss(
    decoder: Decoder, technique: Technique, reading: Reading, texts: Sequence[Sequence[int]]
) -> MeasuredLoss:
    """Measure the quality loss of a technique on a text, relative to full-precision KV.

    Parameters
    ----------
    texts : windows of a text. (windows, reading.length)
    """
    full = Forced(decoder, parse(BASELINE), texts, reading.prompt)
    full.complete()
    run = Forced(decoder, technique, texts, reading.prompt, full.kept)
    run.complete()
    return MeasuredLoss(run.perplexity / full.perplexity - 1, run.divergence)


@frozen
class PlanTimes:
    """Times and memory of a plan and of full-precision KV, each over several runs."""

    plan: tuple[Timing, ...]
    full: tuple[Timing, ...]

    def compared(self, deployment: Deployment, work: RandomPrompts, times: bool) -> list[Measured]:
        """Compare measurements with predictions; times only if the machine is the deployment's.

        The speedup is full-precision KV's time per token divided by the plan's.
        """
        t = self.plan[0].technique
        kept = [float(run.resident) for run in self.plan]
        found = [Measured.from_runs("resident_B", resident_bytes(deployment, t, work), kept)]
        expected = [
            predict(deployment, run.technique, work) for run in (*self.plan[:1], *self.full[:1])
        ]
        own, other = ((p.ttft_s[0], p.tpot_s[0]) for p in expected)
        tpots = [run.tpot for run in self.plan]
        ratios = [b.tpot / a.tpot for a, b in zip(self.plan, self.full, strict=True)]
        every = [
            Measured.from_runs("ttft_s", own[0], [run.ttft for run in self.plan]),
            Measured.from_runs("tpot_s", own[1], tpots),
            Measured.from_runs("speedup", other[1] / own[1], ratios),
        ]
        return [*(every if times else [_unknown(m) for m in every]), *found]


@torch.inference_mode()
def time_plan(
    decoder: Decoder, technique: Technique, work: RandomPrompts
) -> Iterator[PlanTimes | str]:
    """Time a plan and full-precision KV in turns; yield progress lines, then the times.

    Raises
    ------
    InputError
        If nothing is left to time after the first token.
    """
    if work.generate < 2:
        raise InputError("--generate: got 1; expected at least 2, as times per token are compared")
    plan: list[Timing] = []
    full: list[Timing] = []
    for turn in range(PLANNED_REPEATS + 1):  # the first warms up
        yield f"times, turn {turn} of {PLANNED_REPEATS}"
        plan.append(run_timed(decoder, technique, work))
        full.append(run_timed(decoder, parse(BASELINE), work))
    yield PlanTimes(tuple(plan[1:]), tuple(full[1:]))


def _unknown(measured: Measured) -> Measured:
    return Measured(measured.name, float("nan"), measured.measured, measured.noise)
