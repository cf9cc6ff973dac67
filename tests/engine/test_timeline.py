"""The timeline against its scalar twin, against bounds and against runs computed by hand."""

import os
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvsim.engine.roofline import all_ops, seconds
from kvsim.engine.timeline import makespan, steady_seconds
from kvsim.graph import Group, Op, Point, Step, Stream
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Kernel, Link
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.techniques import TECHNIQUES, parse
from kvsim.techniques.technique import Technique
from tests.support import scalar
from tests.support.sampled import some

EXAMPLES = 400 if "KVSIM_ALL_TESTS" in os.environ else 100  # random steps
STACKS = ("ideal", "fused", "hf-eager", "hf-offload-static", "flexgen")
TOLERANCE = 1e-12  # relative


def close(expected: object) -> Any:
    return pytest.approx(expected, rel=TOLERANCE, abs=0)


@cache
def deployment(model: str = "llama2-7b", gpu: str = "a6000", stack: str = "ideal") -> Deployment:
    return Deployment(load_model(model), load_hardware(gpu), load_stack(stack))


@cache
def toy() -> Deployment:
    """1 GB/s everywhere, no latencies: a byte is a nanosecond."""
    d = deployment()
    links = dict.fromkeys(d.hardware.links, Link(1e9))
    return replace(d, hardware=replace(d.hardware, links=links))


def with_stack(kernels: dict[str, Kernel] | None = None, **changes: dict[str, Any]) -> Deployment:
    """The toy with other fields in some mechanisms of its stack."""
    stack = toy().stack
    groups = {group: replace(getattr(stack, group), **fields) for group, fields in changes.items()}
    return replace(toy(), stack=replace(stack, kernels=kernels or stack.kernels, **groups))


def passes(t: Technique, d: Deployment, p: Point) -> list[Step]:
    prompt = replace(p, context=0.0 * p.context, new=p.prompt, prefill=True)
    return [t.prefill(d, prompt), *t.predecoding(d, p), *t.cycle(d, p).steps]


POINTS = [
    Point(batch, prompt + done, 1.0, prompt, prompt + 200.0)
    for batch, prompt, done in ((1.0, 100.0, 0.0), (8.0, 2047.0, 53.0), (64.0, 30000.0, 100.0))
]
SETTINGS = [*TECHNIQUES, "kcache:gpu_layers=3", "specache:speculative=false,bits=4"]


@pytest.mark.parametrize(
    ("text", "stack"), [(text, stack) for text in SETTINGS for stack in some(STACKS, text, 2)]
)
def test_techniques_match_the_scalar_twin(text: str, stack: str) -> None:
    """And lie between the busiest stream and all ops in a row."""
    t = parse(text)
    for model in some(["llama2-7b", "gemma-2-2b"], f"{text} on {stack}", 2):
        d = deployment(model, "h100" if text == "fp8" else "a6000", stack)
        for p in POINTS:
            for step in passes(t, d, p):
                whole, further = makespan(step, d), steady_seconds(step, d)
                assert whole == close(scalar.makespan(step, d))
                assert further == close(scalar.steady(step, d))
                assert min(whole, further) >= max(scalar.busy(step, d).values()) * (1 - TOLERANCE)
                assert max(whole, further) <= scalar.serial(step, d) * (1 + TOLERANCE)
                for op, _ in all_ops(step):
                    assert seconds(op, d) == close(scalar.op_seconds(op, d))


# random steps


@st.composite
def layers(draw: st.DrawFn, elements: int, alone: bool) -> tuple[Op, ...]:
    """Ops "a", "b", ... with durations in whole microseconds, so that ties are common.

    ``alone``: one after another on the GPU.
    """
    ops: list[Op] = []
    size = draw(st.integers(1, 5))
    names = "abcde"[:size]
    early = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    for name, ahead in zip(names, early, strict=True):
        number = st.lists(st.integers(0, 6), min_size=elements, max_size=elements)
        fixed = 1e-6 * np.array(draw(number), dtype=float)
        moved = 1e3 * np.array(draw(number), dtype=float) * draw(st.booleans())
        stream: Stream = draw(st.sampled_from(("gpu", "gpu", "h2d", "d2h", "cpu")))
        ahead, stream = (False, "gpu") if alone else (ahead, stream)
        waits = [f"{other}@-2" for other in names]
        waits += [op.name for op in ops if op.prefetch or not ahead]
        if not ahead:
            waits += [f"{other}@-1" for other in names] + [f"{other}@step-1" for other in names]
        ops.append(
            Op(
                name,
                stream,
                "relay" if stream in scalar.COPIES and draw(st.booleans()) else "copy",
                bytes={"hbm": moved},
                fixed=fixed,
                launches=draw(st.sampled_from((0.25, 1.0, 3.0))),
                after=tuple(draw(st.lists(st.sampled_from(waits), max_size=3))),
                prefetch=ahead,
                sync=draw(st.integers(0, 5)) == 0 and not alone,
            )
        )
    return tuple(ops)


@st.composite
def steps(draw: st.DrawFn, elements: int) -> Step:
    groups, alone = [], draw(st.integers(0, 4)) == 0
    for _ in range(draw(st.integers(1, 3))):
        some = draw(st.lists(layers(elements, alone), min_size=1, max_size=2))
        block = [layer for layer in some for _ in range(draw(st.sampled_from((1, 1, 2, 5, 9))))]
        groups.append(Group(tuple(block), draw(st.integers(1, 40 // len(block)))))
    head = Op("head", fixed=1e-6 * draw(st.integers(0, 9)), sync=draw(st.booleans()))
    return Step(tuple(groups), (head,))


def _hosted(host: float) -> dict[str, Kernel]:
    """Classes as the stack has them, each op of which takes the host some time."""
    return {name: replace(kernel, host=host) for name, kernel in with_stack().stack.kernels.items()}


@st.composite
def machines(draw: st.DrawFn) -> Deployment:
    return with_stack(
        time={"launch": draw(st.sampled_from((0.0, 0.0, 1e-6, 2.5e-6))),
              "sync": draw(st.sampled_from((0.0, 1e-6, 4e-6)))},
        kernels=_hosted(draw(st.sampled_from((0.0, 0.0, 3e-6)))),
        offload={"overlap": draw(st.sampled_from((1.0, 1.0, 0.75, 0.0))),
                 "across_steps": draw(st.booleans()),
                 "tile_sync": draw(st.integers(0, 4)) == 0},
    )  # fmt: skip


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.data())
def test_random_steps_match_the_scalar_twin(data: st.DataObject) -> None:
    elements = 3
    d, step = data.draw(machines()), data.draw(steps(elements))
    whole, further = (np.broadcast_to(f(step, d), (elements,)) for f in (makespan, steady_seconds))
    for i in range(elements):
        one = scalar.pick(step, (i,), (elements,))
        assert whole[i] == close(scalar.makespan(one, d))
        assert further[i] == close(scalar.steady(one, d))
        assert makespan(one, d) == close(whole[i])
        assert steady_seconds(one, d) == close(further[i])
        busiest = max(scalar.busy(one, d).values())
        assert whole[i] >= busiest * (1 - TOLERANCE)
        assert further[i] >= busiest * (1 - TOLERANCE)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 80])
@pytest.mark.parametrize("overlap", [1.0, 0.5])
def test_elements_converge_at_different_layers(count: int, overlap: float) -> None:
    """Link and GPU balanced but for a difference from 10 % down to below rounding."""
    d = with_stack(offload={"overlap": overlap})
    apart = np.array([s * 10.0**-e for e in range(1, 17) for s in (1, -1)] + [0.0, 2.0, -0.9])
    load = Op("load", "h2d", "relay", fixed=1e-3 * (1 + apart), after=("attn@-2",), prefetch=True)
    layer = (load, Op("qkv", fixed=4e-4), Op("attn", fixed=6e-4, after=("load", "qkv")))
    store = Op("store", "d2h", "relay", fixed=1e-3 * (1 - apart) / 2, after=("qkv",))
    step = Step((Group(((*layer, store),), count), Group((layer,), 3)), (Op("head", fixed=1e-4),))
    for i in range(apart.size):
        one = scalar.pick(step, (i,), apart.shape)
        assert np.asarray(makespan(step, d))[i] == close(scalar.makespan(one, d))
        assert np.asarray(steady_seconds(step, d))[i] == close(scalar.steady(one, d))


@pytest.mark.parametrize("stack", ["fused", "hf-offload-static", "flexgen"])
@pytest.mark.parametrize("text", ["offload", "offload:host_share=0.3", "kvpr", "specache:k=512"])
def test_grid_equals_its_points(text: str, stack: str) -> None:
    """Contexts on both sides of where the link overtakes the GPU, and close to it."""
    d, t = deployment(stack=stack), parse(text)
    batch = np.array([[1.0], [4.0], [31.0]])
    context = np.array([[64.0, 500.0, 833.0, 834.0, 835.0, 2500.0, 9000.0, 65536.0]])

    def times(b: Any, c: Any) -> Any:
        (step,) = t.cycle(d, Point(b, c, 1.0, c, c + 1.0)).steps
        return np.stack(np.broadcast_arrays(steady_seconds(step, d), makespan(step, d)))

    grid = times(batch, context)
    assert grid.shape == (2, 3, 8)
    for i, j in np.ndindex(grid.shape[1:]):
        assert grid[:, i, j] == close(times(batch[i, 0], context[0, j]))


def test_steady_is_what_every_later_step_adds() -> None:
    """Where a copy half blocks the GPU, the next step's first copies belong to each step."""
    d = with_stack(offload={"overlap": 0.5})
    layer = (
        Op("load", "h2d", "relay", fixed=4.0, after=("attn@-2",), prefetch=True),
        Op("attn", fixed=3.0, after=("load",)),
    )
    step = Step((Group((layer,), 5),), (Op("head", fixed=1.0),))
    heads = scalar.play(step, d, 8, more=True).heads
    assert [b - a for a, b in pairwise(heads)][1:] == [steady_seconds(step, d)] * 6


# computed by hand; seconds


def offloaded(load: float) -> Step:
    layer = (
        Op("load_kv", "h2d", fixed=load, after=("attn@-2",), prefetch=True),
        Op("qkv", fixed=1.0),
        Op("attn", fixed=2.0, after=("load_kv",)),
        Op("mlp", fixed=1.0),
    )
    return Step((Group((layer,), 3),), (Op("lm_head", fixed=1.0),))


def test_three_offloaded_layers() -> None:
    """Copies of 4 s a layer beside projections 1, attention 2 and MLP 1; two buffers; head 1.

    First step       load     qkv      attn     mlp
    layer 0          0-4      0-1      4-6      6-7
    layer 1          4-8      7-8      8-10     10-11
    layer 2          8-12     11-12    12-14    14-15   load waits for attn of layer 0 (6)
    head                                        15-16   makespan 16

    Second step; its copies follow one another and never wait for a buffer
    layer 0          12-16    16-17    17-19    19-20
    layer 1          16-20    20-21    21-23    23-24
    layer 2          20-24    24-25    25-27    27-28
    head                                        28-29   29 - 16 = 13, all of it GPU work

    With copies of 6 s the link is the busiest stream: 3 x 6 = 18 s a step. In the first, loads
    end at 6, 12 and 18; attn of layer 2 starts at 18, so 18 + 2 + 1 + 1 = 22.
    """
    for load, first, further in ((4.0, 16.0, 13.0), (6.0, 22.0, 18.0)):
        assert makespan(offloaded(load), toy()) == first
        assert steady_seconds(offloaded(load), toy()) == further


def test_copies_that_wait_for_the_step_to_end() -> None:
    """As above, but copies wait for the last step's head: every step takes the first one's 16 s."""
    d = with_stack(offload={"across_steps": False})
    assert makespan(offloaded(4.0), d) == steady_seconds(offloaded(4.0), d) == 16.0


def test_kcache_is_one_chain() -> None:
    """Nothing overlaps: projections 1, scores 2, top-k 1, fetch 3, sum 1, MLP 2 = 10 s a layer.

    Two layers and a head of 1 s: 21 s. The store of the new values (5 s, after the projections)
    runs beside it all: 1-6 and, in layer 1, 11-16.

    A host that waits for the top-k (at 4 s) and 2 s more issues the sum at 6 s, while the copy
    runs (4-7): 10 s a layer still. With 5 s more the sum starts at 9: 12 s a layer, 25 s.
    """
    for sync, expected in ((0.0, 21.0), (2.0, 21.0), (5.0, 25.0)):
        layer = (
            Op("qkv", fixed=1.0),
            Op("scores", fixed=2.0),
            Op("topk", fixed=1.0, sync=True),
            Op("fetch_v", "h2d", fixed=3.0, after=("topk",)),
            Op("store_v", "d2h", fixed=5.0, after=("qkv",)),
            Op("attn", fixed=1.0, after=("fetch_v",)),
            Op("mlp", fixed=2.0),
        )
        step = Step((Group((layer,), 2),), (Op("lm_head", fixed=1.0),))
        d = with_stack(time={"sync": sync})
        assert makespan(step, d) == expected
        assert steady_seconds(step, d) == expected


def test_specache_waits_for_the_previous_step() -> None:
    """Attention of a layer waits for the pairs that its top-k chose one step earlier.

    A layer: projections 1, attention 2, top-k 1, MLP 1; pairs arrive 12 s after the top-k;
    two layers and a head of 2 s: 12 s of GPU work a step.

    First step       qkv     attn    topk    mlp     pairs
    layer 0          0-1     1-3     3-4     4-5     4-16
    layer 1          5-6     6-8     8-9     9-10    16-28
    head             10-12                           makespan 28, the last copy
    Second step
    layer 0          12-13   16-18   18-19   19-20   28-40
    layer 1          20-21   28-30   30-31   31-32   40-52
    head             32-34                           34 - 12 = 22; the link needs 2 x 12 = 24
    Pairs that take 5 s are there (at 9 and 14) before they are needed: 12 s a step.
    """
    for pairs, first, further in ((12.0, 28.0, 24.0), (5.0, 14.0, 12.0)):
        layer = (
            Op("qkv", fixed=1.0),
            Op("attn", fixed=2.0, after=("prefetch@step-1",)),
            Op("topk", fixed=1.0),
            Op("prefetch", "h2d", fixed=pairs, after=("topk",)),
            Op("mlp", fixed=1.0),
        )
        step = Step((Group((layer,), 2),), (Op("lm_head", fixed=2.0),))
        assert makespan(step, toy()) == first
        assert steady_seconds(step, toy()) == further


def test_streams_share_a_channel() -> None:
    """A kernel of 3 s and a copy of 2 s that both fill the GPU's memory: 5 s a layer."""
    kernel = Op("attn", bytes={"hbm": 3e9})
    load = Op("load", "h2d", bytes={"hbm": 2e9}, after=("attn@-2",), prefetch=True)
    step = Step((Group(((load, kernel),), 4),), ())
    assert makespan(step, toy()) == close(20.0)
    assert steady_seconds(step, toy()) == close(20.0)


def test_the_power_limit_slows_passes_that_compute_for_long() -> None:
    d = Deployment(load_model("llama2-7b"), load_hardware("h100"), load_stack("ideal"))
    limited = replace(d, hardware=replace(d.hardware, sustained=0.8, boost=0.03))
    product = Op("product", kernel="gemm", flops=1e-2 * d.flops("fp16"))  # 10 ms
    read = Op("read", bytes={"hbm": 1e-2 * d.bandwidth["hbm"]})

    def slower(*ops: Op, layers: int) -> float:
        step = Step((Group((ops,), layers),), ())
        return float(makespan(step, limited) - makespan(step, d))

    assert slower(product, layers=3) == pytest.approx(0.0, abs=1e-12)
    assert slower(product, layers=11) == pytest.approx(0.08 * 0.25)
    assert slower(product, read, layers=11) == pytest.approx(0.08 * 0.25)
    assert slower(read, layers=11) == 0.0
