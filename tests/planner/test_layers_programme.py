"""Counts of layers per option: the programme against every count, and its layers replayed."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pulp
import pytest

from kvsim.errors import InfeasibleError
from kvsim.graph import Array
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.planner.layers import LayerCosts, MixedLayers, build_layers, choose_layers
from kvsim.planner.question import GIB, Admission, PlanLimits, Question, Workload
from kvsim.planner.table import TableSearch, tabulate
from kvsim.techniques import parse

GOLDEN = Path(__file__).parent / "golden"
HEAD = np.array([1.0, 0.5])


def costs_of(seed: int, options: int = 3, shapes: int = 2) -> LayerCosts:
    """Random layers."""
    random = np.random.default_rng(seed)
    times = random.integers(1, 17, (2, 3, options, shapes)) / 4
    gpu, host = random.integers(0, 9, (2, options, shapes)) / 2
    layers = np.array([3.0, 2.0])[:shapes]
    return LayerCosts(times, gpu, host, layers)


def seconds(costs: LayerCosts, counts: Array, rounds: float) -> float:
    work = np.einsum("qrok,ok->qr", costs.seconds, counts).max(axis=1) + HEAD
    return float(work @ [1.0, rounds])


def every_count(costs: LayerCosts, memory: tuple[float, float]) -> list[Array]:
    """All counts within the limits."""
    options, shapes = costs.gpu.shape
    some = []
    for k in range(shapes):
        most = int(costs.layers[k])
        some.append([c for c in product(range(most + 1), repeat=options) if sum(c) == most])
    found = []
    for chosen in product(*some):
        counts = np.array(chosen, dtype=float).T
        fits = (costs.gpu * counts).sum() <= memory[0] and (costs.host * counts).sum() <= memory[1]
        if fits:
            found.append(counts)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_the_programme_finds_the_best_of_all_counts(seed: int) -> None:
    costs, memory = costs_of(seed), (9.0, 12.0)
    best = min((seconds(costs, c, 4.0) for c in every_count(costs, memory)), default=None)
    if best is None:
        with pytest.raises(InfeasibleError):
            choose_layers(costs, memory, 4.0, HEAD)
        return
    found = choose_layers(costs, memory, 4.0, HEAD)
    assert seconds(costs, found, 4.0) == pytest.approx(best, rel=1e-3)


def texts() -> dict[str, pulp.LpProblem]:
    """A programme whose golden text is kept."""
    return {"layers": build_layers(costs_of(0), (8.0, 16.0), 4.0, HEAD)}


def test_the_programme_is_the_golden_one(tmp_path: Path) -> None:
    texts()["layers"].writeLP(str(tmp_path / "layers.lp"))
    assert (tmp_path / "layers.lp").read_text() == (GOLDEN / "layers.lp").read_text()


def asked(model: str, gpu: str, prompt: int, generate: int, batch: int) -> Question:
    hardware = replace(load_hardware(gpu), host_memory=128 * GIB)
    d = Deployment(load_model(model), hardware, load_stack("vllm"))
    limits = PlanLimits(0.9 * hardware.gpu_memory, 0.85 * hardware.host_memory)
    return Question(d, Workload(prompt, generate, batch), "throughput", limits)


def test_layers_that_differ_beat_every_single_technique_within_the_memories() -> None:
    q = asked("mistral-7b-v0.2", "v100-16g", 8192, 128, 4)
    search = TableSearch(q, tabulate(q))
    row = search.best(q.limits.finite())
    (found,) = MixedLayers(q, search).better(4.0)
    assert found.given_bytes[0] <= q.limits.gpu_memory
    assert found.host_bytes[0] <= q.limits.host_memory
    assert not found.technique.uniform
    assert row is None or found.output_tok_s[0] > -search.value(row)


def test_what_loses_too_much_in_all_layers_is_no_option_in_some() -> None:
    q = asked("llama2-7b", "a6000", 3500, 100, 32)
    q = replace(q, admission=Admission((parse("full"), parse("kivi"), parse("offload"))))
    for loss in (0.02, 1.0):
        known = q.with_limits(loss=loss)
        search = TableSearch(known, tabulate(known))
        kept = {str(t) for t in MixedLayers(known, search).options()}
        lost = search.table.columns["loss"]
        some = {str(t) for t, x in zip(search.table.technique, lost, strict=True) if x > loss}
        assert some and not kept & some
