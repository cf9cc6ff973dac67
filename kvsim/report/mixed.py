"""Passes that mix prompts with decoding: what their attention may take beyond the sum of its parts.

No measured operator is such a pass. vLLM's attention was reported to take 1.3 to 2.1 times the sum
of its parts above 16 decoding sequences; a run of vLLM 0.19 on an RTX 4090 with 32 of them on
average is met by the sum. Answers whose runs mix so say what the range would make.
"""

from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvsim.engine.roofline import all_ops, seconds
from kvsim.graph import Number, Op, Step
from kvsim.machines.deployment import Deployment
from kvsim.report import units

if TYPE_CHECKING:
    from kvsim.serving.costs import StepCosts
    from kvsim.traces.requests import Requests

ENGINE = "vllm"
FROM = 16  # decoding sequences above which it was reported
RANGE = (1.3, 2.1)  # measured over the sum of the parts
TOLD = 0.01  # of a pass, below which it is not worth a word


class PlayedRun(Protocol):
    """A run's costs and requests."""

    @property
    def costs(self) -> "StepCosts":
        """What its passes cost, and the rules that they follow."""

    @property
    def requests(self) -> "Requests":
        """Prompts and lengths that were served."""


def note(run: PlayedRun, sequences: float) -> list[str]:
    """What passes of a run may take beyond what was simulated, as a sentence; often none.

    Parameters
    ----------
    sequences : that decode at once, on average.
    """
    costs, requests, d = run.costs, run.requests, run.costs.deployment
    mixes = costs.rules.prefill == "chunked" and costs.passes.mixes_plainly and d.alone
    if d.stack.name.partition("@")[0] != ENGINE or not mixes or sequences <= FROM:
        return []
    prompt, generate = float(requests.prompt.mean()), float(requests.generate.mean())
    new = float(np.floor(min(prompt, costs.rules.max_tokens)))
    share = _share(costs, sequences, prompt + generate / 2, new)
    low, high = (share * (factor - 1) for factor in RANGE)
    if high < TOLD:
        return []
    return [
        f"Passes that read prompts beside decoding are taken as the sum of their parts, as a run "
        f"on an RTX 4090 with 32 sequences bears out. vLLM's attention was reported to take "
        f"{RANGE[0]:g} to {RANGE[1]:g} times as long above {FROM}: a pass with "
        f"{units.whole(sequences)} sequences and {units.whole(new)} tokens of a prompt would take "
        f"{units.percent(low)} to {units.percent(high)} longer than simulated."
    ]


def _share(costs: "StepCosts", sequences: float, context: float, new: float) -> float:
    """Attention's share of a pass that mixes."""
    from kvsim.serving.passes import TIME, Measure, Passes

    own = Passes(costs.technique, costs.deployment, Measure(_attention, _attention, seconds))
    at = [np.array([x]) for x in (np.round(sequences), np.round(context), new, 0.0)]
    whole = Passes(costs.technique, costs.deployment, TIME).mixed(*at)
    return float((own.mixed(*at) / whole)[0])


def _attention(step: Step, deployment: Deployment) -> Number:
    """GPU time of a step's attention, of both kinds. [s]"""
    return sum(count * seconds(op, deployment) for op, count in all_ops(step) if _attends(op))


def _attends(op: Op) -> bool:
    return op.stream == "gpu" and op.name.split()[-1] == "attn"
