"""The functions that Python users call: names and meanings are those of the command line.

Every value may be written as on the command line (``prompt="32k"``, ``tpot="50ms"``) or as a
number; several are a list. Errors are ``kvsim.errors.InputError`` and ``InfeasibleError``, whose
text is the line that the command prints.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from kvsim.cli.arguments import count, gib, number
from kvsim.cli.values import Given, Several, deployment_of, duration, line_of, text
from kvsim.errors import InputError, require
from kvsim.machines.hardware import DEFAULT_STACK, RELEASED
from kvsim.techniques import parse_several

if TYPE_CHECKING:
    from kvsim.report.calibrate_run import CalibratedRun
    from kvsim.report.simulate_answer import Simulations

__all__ = ["calibrate_run", "simulate"]


def simulate(
    trace: Given,
    model: Given,
    gpu: Given,
    technique: Several = "full",
    *,
    replicas: int = 1,
    route: str = "round-robin",
    rate: float = 1.0,
    max_seqs: int = 256,
    max_tokens: int = 2048,
    prefix_caching: bool = False,
    host_cache: Given | None = None,
    ttft: Given | None = None,
    tpot: Given | None = None,
    stack: Given = DEFAULT_STACK,
    tp: Given = 1, pp: Given = 1, dp: Given = 1, ep: Given = 1,
    weights: str = RELEASED, host_memory: Given | None = None,
) -> "Simulations":  # fmt: skip
    """A request trace under continuous batching, with one technique or several.

    Parameters
    ----------
    trace
        A file that ``kvsim traces inspect`` reads, or ``sample:NAME``.
    rate
        Factor of the arrival rate.
    host_cache
        Host memory for swapped and evicted cache. [GiB]
    ttft, tpot
        Targets of a good request. [s]

    Raises
    ------
    InputError
        For what the command would refuse, or if pyarrow is not installed.
    """
    require("pyarrow")
    from kvsim.cli.serve import Job
    from kvsim.report.simulate_answer import Simulations, answered
    from kvsim.serving.costs import StepCosts
    from kvsim.serving.outcome import Targets
    from kvsim.serving.rules import Rules
    from kvsim.traces.read import load

    where = deployment_of(model, gpu, stack, tp, weights, host_memory, (pp, dp, ep))
    rules = Rules(
        max_seqs=max_seqs,
        max_tokens=max_tokens,
        prefix_caching=prefix_caching,
        host_cache=0.0 if host_cache is None else gib("host_cache", text(host_cache)),
    ).over(where)
    targets = Targets(duration("ttft", ttft, 60), duration("tpot", tpot, 1))
    requests = load(text(trace)).requests.scaled(number("rate", text(rate)))
    results = []
    for kind in parse_several(text(technique)):
        costs = StepCosts(
            kind, where, rules, int((requests.prompt + requests.generate).max()),
            int(requests.prompt.max()),
        )  # fmt: skip
        job = Job(requests, costs, count("replicas", text(replicas)), route, None, targets)
        results.append(job.result(None, resume=False, check=False))
    rows = [found["row"] for found in results]
    asked = [f"{name} {text(v)}" for name, v in (("TTFT", ttft), ("TPOT", tpot)) if v is not None]
    answer = answered(rows, where, text(trace), " and ".join(asked), [])
    command = line_of(
        "simulate", trace=trace, model=model, gpu=gpu, compare=technique, replicas=replicas,
        route=route, rate=rate, max_seqs=max_seqs, max_tokens=max_tokens,
        prefix_caching=prefix_caching, host_cache=host_cache, ttft=ttft, tpot=tpot, stack=stack,
        tp=tp, pp=pp, dp=dp, ep=ep, weights=weights, host_memory=host_memory,
    )  # fmt: skip
    return Simulations(command, answer, rows, results)


def calibrate_run(
    log: Given,
    model: Given,
    gpu: Given,
    out: Given | None = None,
    technique: str = "full",
    *,
    fit_first: int = 100,
    max_seqs: int = 256, max_tokens: int = 2048, block_tokens: int = 16, blocks: int = 0,
    prefix_caching: bool = False,
    stack: Given = DEFAULT_STACK, tp: Given = 1, weights: str = RELEASED,
) -> "CalibratedRun":  # fmt: skip
    """Fit a stack to the request log of a serving run; write it if ``out`` is given.

    Raises
    ------
    InputError
        For a log that cannot be read, or too few requests.
    """
    from kvsim.evidence.logs import read_run
    from kvsim.report.calibrate_run import calibrated
    from kvsim.serving.rules import Rules

    where = deployment_of(model, gpu, stack, tp, weights)
    techniques = parse_several(technique)
    if len(techniques) != 1:
        raise InputError(f"technique: got {technique[:40]!r}; expected the one that was served")
    rules = Rules(
        max_seqs=max_seqs, max_tokens=max_tokens, block_tokens=block_tokens, blocks=blocks,
        prefix_caching=prefix_caching,
    )  # fmt: skip
    command = line_of(
        "calibrate", from_run=log, model=model, gpu=gpu, technique=technique,
        fit_first=fit_first, max_seqs=max_seqs, max_tokens=max_tokens, out=out,
    )  # fmt: skip
    run = read_run(Path(text(log)))
    place = None if out is None else Path(text(out))
    return calibrated(run, techniques[0], where, rules, fit_first, text(stack), place, command)
