"""The placement programme against brute force, against replay, and as text."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pulp
import pytest

from kvsim.errors import InfeasibleError
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.planner.arrangements import Arrangement, Use
from kvsim.planner.costs import (
    FAMILIES,
    JOINED,
    Option,
    Shares,
    make_stretches,
    option_plane,
    placement_options,
)
from kvsim.planner.milp import (
    Programme,
    Streaming,
    Tangent,
    build_programme,
    solve_programme,
)
from kvsim.planner.mixed_search import Placements, batch_seconds
from kvsim.planner.placement import Coefficients, add_tangents
from kvsim.planner.question import GIB, PlanLimits, Question, Workload
from kvsim.techniques import compose
from kvsim.techniques.technique import Layers, Technique
from tests.support.mixes import bound_over_replay, lower_bound, touched

GOLDEN = Path(__file__).parent / "golden"
RELATIVE = 1e-6
ROUNDING = 1e-11


def instance(seed: int) -> Programme:
    """Options with one corner each, so that only counts are to be chosen."""
    random = np.random.default_rng(seed)
    options, shapes = int(random.integers(2, 7)), int(random.integers(1, 3))
    phases, resources = 3, 3
    layers = random.integers(1, 5, shapes)
    gpu = random.random((1, options, shapes))
    total = int(layers.sum())
    return Programme(
        names=tuple("abcdefg"[:options]),
        option_of=np.arange(options),
        layers=layers,
        resources=("gpu", "h2d", "chain"),
        phases=("prefill", "round0", "round1"),
        seconds=random.random((phases, resources, options, shapes)),
        head=random.random((phases, resources)) / 10,
        weight=np.array([1.0, 8.0, 8.0]),
        gpu=gpu,
        host=1 - gpu,
        once_gpu=random.random((1, 1, options)) / 2,
        once_host=np.zeros((1, 1, options)),
        streaming=Streaming(
            np.zeros((phases, resources, shapes)), np.zeros(shapes), np.zeros(shapes), 0.0, most=0.0
        ),
        memory=(float(random.uniform(0.3, 1.0)) * total, float(random.uniform(0.5, 1.0)) * total),
        times={"tpot": (np.array([0.0, 0.5, 0.5]), float(random.uniform(0.4, 1.2)) * total)},
    )


def counts_of(p: Programme) -> Iterator[np.ndarray]:
    """Every way to share the layers of each shape out."""

    def shared(layers: int, options: int) -> Iterator[tuple[int, ...]]:
        if options == 1:
            yield (layers,)
            return
        for first in range(layers + 1):
            for rest in shared(layers - first, options - 1):
                yield (first, *rest)

    for columns in product(*(list(shared(int(n), len(p.names))) for n in p.layers)):
        yield np.array(columns, dtype=float).T


def brute(p: Programme) -> float:
    """The least objective of all counts within the limits."""
    best = np.inf
    for n in counts_of(p):
        used = n.sum(axis=1) > 0
        gpu = float((p.gpu[0] * n).sum() + p.once_gpu[0, 0][used].max())
        host = float((p.host[0] * n).sum())
        t = lower_bound(p, n)
        late = any(weights @ t > limit for weights, limit in p.times.values())
        if gpu <= p.memory[0] and host <= p.memory[1] and not late:
            best = min(best, float(p.weight @ t))
    return best


@pytest.mark.parametrize("start", range(0, 60, 20))
def test_counts_are_those_of_brute_force(start: int) -> None:
    for seed in range(start, start + 20):
        p, expected = instance(seed), brute(instance(seed))
        if np.isinf(expected):
            with pytest.raises(InfeasibleError, match="no mix of placements"):
                solve_programme(p, gap=1e-9)
            continue
        found = solve_programme(p, gap=1e-9)
        assert found.objective == pytest.approx(expected, rel=RELATIVE), seed
        assert found.bound <= found.objective
        assert (found.counts.sum(axis=0) == p.layers).all()
        assert solve_programme(p, whole=False).bound <= expected * (1 + RELATIVE)


def test_a_bound_is_what_the_solver_proved_not_its_solution_less_the_gap() -> None:
    for seed in range(5):
        p = replace(instance(seed), times={}, memory=(100.0, 100.0))
        best = solve_programme(p, gap=1e-9).objective
        found = solve_programme(p, gap=0.5)
        assert 0.5 * best <= found.bound <= best * (1 + 1e-9)
        assert found.bound <= found.objective


def example() -> Programme:
    """One of each family: counts, shares, streams, chain, memory, buffers, times."""
    return Programme(
        names=("full", "copied"),
        option_of=np.array([0, 1, 1]),
        layers=np.array([2]),
        resources=("gpu", "h2d", "chain"),
        phases=("prefill", "round0"),
        seconds=np.array([[[1, 1, 1], [0, 0.25, 1], [1, 1, 1]],
                          [[0.5, 0.5, 0.5], [0, 0.5, 2], [0.5, 0.5, 0.75]]])[..., None],
        head=np.array([[0.125, 0, 0.125], [0.25, 0, 0.25]]),
        weight=np.array([1.0, 4.0]),
        gpu=np.array([[[4.0], [3.0], [1.0]]]),
        host=np.array([[[0.0], [1.0], [3.0]]]),
        once_gpu=np.array([[[0.5, 1.0, 2.0], [0.25, 0.0, 0.0]]]),
        once_host=np.zeros((1, 1, 3)),
        streaming=Streaming(
            np.array([[0, 0.5, 0], [0, 0.5, 0]])[..., None], np.array([2.0]), np.array([4.0]), 1.0
        ),
        memory=(8.0, 16.0),
        times={"ttft": (np.array([1.0, 0.0]), 8.0), "tpot": (np.array([0.0, 1.0]), 4.0)},
    )  # fmt: skip


BOTH = np.array([[1.0], [1.0]])


def texts() -> dict[str, pulp.LpProblem]:
    """Programmes of placements that golden texts are of; the second tangent is nowhere higher."""
    p = example()
    higher = np.zeros((2, 3, 2))
    higher[1, 1:] = [[1.0, 1.5], [0.25, 1.0]]
    touched = replace(p, tangents=(Tangent(1, 0, higher), Tangent(0, 0, np.zeros((2, 3, 1)))))
    every = {
        "placement": build_programme(p),
        "relaxation": build_programme(p, whole=False),
        "blocks": build_programme(p, apart=True),
        "counted": build_programme(p, counts=BOTH),
        "planes": build_programme(touched, whole=False),
        "planes_blocks": build_programme(touched, apart=True),
    }
    return {name: built.problem for name, built in every.items()}


@pytest.mark.parametrize("name", texts())
def test_the_programme_as_text(name: str, tmp_path: Path) -> None:
    file = tmp_path / f"{name}.lp"
    texts()[name].writeLP(str(file))
    assert file.read_text() == (GOLDEN / f"{name}.lp").read_text()


# on the engine


def small(model: str, layers: int, gpu: str, host_share: float = 1.0) -> Deployment:
    whole = load_model(model)
    m = replace(whole, layout=((whole.layout[0][0][:1], layers),))
    h = load_hardware(gpu)
    return Deployment(m, replace(h, host_memory=host_share * h.host_memory), load_stack("fused"))


GRID = [
    Option("full", (Shares(),)),
    Option("copied0", (Shares(0.5),)),
    Option("copied1", (Shares(1.0),)),
    Option("recomputed0", (Shares(1.0, 0.5),)),
]


@pytest.mark.parametrize(("seed", "layers"), [(0, 2), (1, 3), (2, 3)])
def test_bounds_are_below_every_assignment_replayed(seed: int, layers: int) -> None:
    random = np.random.default_rng(seed)
    d, batch = small("llama2-7b", layers, "a6000"), float(random.integers(4, 32))
    w = Workload(int(random.integers(512, 4096)), 2, int(batch))
    kinds = {f"{o.name}": o for o in GRID}
    c = Coefficients(d, w, np.array([batch]), GRID)
    every = {
        some: w.predict(_technique([kinds[name] for name in some], w.prompt), d, c.batches)
        for some in product(kinds, repeat=layers)
    }
    sizes = {some: float(found.gpu_bytes[0]) for some, found in every.items()}
    memory = float(np.quantile([*sizes.values()], random.uniform(0.1, 0.9)))
    p = c.programme(
        0, PlanLimits(memory, d.hardware.host_memory), frozenset({"full", "copied", "recomputed"})
    )
    everything = {
        some: batch_seconds(found) if sizes[some] <= memory else np.inf
        for some, found in every.items()
    }
    assert solve_programme(p, gap=1e-9).bound <= min(everything.values()) * (1 + RELATIVE)
    for n in counts_of(p):
        some = [name for name, x in zip(p.names, n[:, 0], strict=True) for _ in range(round(x))]
        least = min(everything[order] for order in set(permutations(some)))
        if np.isfinite(least):
            assert solve_programme(p, counts=n).bound <= least * (1 + RELATIVE)


def _technique(options: list[Option], prompt: int) -> Technique:
    uses = [Arrangement(((Use(o.corners[0], o.parts, 1),),)) for o in options]
    layers = []
    for i, a in enumerate(uses):
        term = a._term(a.uses[0][0], prompt)
        layers.append(Layers((term,), i, i))
    return Technique(tuple(layers)) if len(layers) > 1 else compose(layers[0].terms[0])


CASES = [
    ("llama2-7b", "a6000", 64, 3500, 500),
    ("opt-30b", "a6000", 32, 1024, 64),
    ("llama3.1-8b", "rtx4090", 4, 32000, 64),
    ("gemma-3-4b", "l4", 8, 8000, 64),
]


@pytest.mark.parametrize("stack", ["fused", "vllm"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]} {c[1]}")
def test_bounds_are_below_every_replay(case: tuple[str, str, int, int, int], stack: str) -> None:
    """Random mixes in random orders, with some weights streamed, every token replayed."""
    model, gpu, batch, prompt, generate = case
    random = np.random.default_rng(7)
    d = Deployment(load_model(model), load_hardware(gpu), load_stack(stack))
    w = Workload(prompt, generate, batch)
    c = Coefficients(d, w, np.array([float(batch)]), placement_options(d, halves=True))
    for family in FAMILIES:
        p = touched(c, c.programme(0, PlanLimits(1e18, 1e18), family), random, each=1)
        for _ in range(4):
            assert max(bound_over_replay(c, p, random)) <= 1 + ROUNDING


def test_planes_at_a_solution_raise_its_bound_to_what_it_costs() -> None:
    """GPU and CPU share the attention: at its middle alone a box is priced too low."""
    d = Deployment(load_model("llama2-7b"), load_hardware("t4"), load_stack("fused"))
    c = Coefficients(d, Workload(512, 128, 64), np.array([64.0]), placement_options(d, halves=True))
    p = c.programme(0, PlanLimits(d.hardware.gpu_memory, d.hardware.host_memory), JOINED[1])
    more = add_tangents(c, p, lambda x: solve_programme(x, whole=False))
    before, after = (solve_programme(x, whole=False) for x in (p, more))
    assert after.bound > before.bound * 1.001
    for x, mix in ((p, before), (more, after)):  # rows and formula say the same
        took = lower_bound(x, mix.corners, mix.streamed.sum(axis=0))
        assert x.weight @ took == pytest.approx(mix.objective, rel=1e-9)


@pytest.mark.parametrize("cost", ["convex", "bent", "concave"])
def test_planes_and_means_are_below_costs(cost: str) -> None:
    """Also where a cost has a kink right beside the point whose slope is taken."""
    box = placement_options(small("llama2-7b", 2, "a6000"), halves=False)[6]
    middle = box.middle

    def seconds(s: Shares) -> np.ndarray:
        beside = middle.host + 0.4e-5
        kinks = np.array([0.3, middle.host, beside])
        value: np.ndarray = np.maximum(s.host - kinks, 0.2 * s.split) + 0.1 * (1 - s.split) ** 2
        return value

    corners = np.array([[c.host, c.split] for c in box.corners])
    values = option_plane(box, seconds, 1000)
    random = np.random.default_rng(0)
    for weight in random.dirichlet(np.ones(4) / 2, 200):
        host, split = weight @ corners
        assert (values @ weight <= seconds(Shares(host, split)) + 1e-12).all()
    shape = {
        "convex": lambda x: 1e4 + x**2,
        "bent": lambda x: np.maximum(x, 40.0),
        "concave": lambda x: np.sqrt(100 + x),
    }
    s = make_stretches(100, kinks=(33.5,))
    assert s.rounds.sum() == 100 and 34 in s.first
    means = [shape[cost](np.arange(a, b + 1)).mean() for a, b in zip(s.first, s.last, strict=True)]
    below = s.below(shape[cost](s.tokens)[:, None])[:, 0]
    assert (below <= np.array(means) * (1 + 1e-12)).all()
    assert below == pytest.approx(means, rel=0.1)


def test_weights_that_do_not_fit_are_streamed_at_any_batch() -> None:
    h = load_hardware("rtx4090")
    d = Deployment(
        load_model("llama3.1-70b"), replace(h, host_memory=256 * GIB), load_stack("fused")
    )
    for batch in (1, 3, 7):
        q = Question(d, Workload(2048, 8, batch), "throughput", PlanLimits(h.gpu_memory, 256 * GIB))
        placements = Placements(q)
        found = list(placements.better_than(np.inf, placements.bounds()))
        assert found and found[-1].prediction.gpu_bytes[0] <= h.gpu_memory
        assert found[-1].replay >= found[-1].bound


def test_a_programme_without_an_end_is_said_in_one_line() -> None:
    p = instance(0)
    with pytest.raises(InfeasibleError, match=r"^no mix of placements .* \(unbounded\)$"):
        solve_programme(replace(p, weight=-p.weight), whole=False)


def test_what_no_mix_meets_is_said_in_one_line() -> None:
    p = replace(instance(3), memory=(0.0, 0.0))
    with pytest.raises(
        InfeasibleError, match=r"no mix of placements is within the limits \(infeas"
    ):
        solve_programme(p)
