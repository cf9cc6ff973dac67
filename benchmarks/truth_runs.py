"""What kvsim says of measured runs: for truth.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.truth_rows import LARGER_GRAPHS, Row
from kvsim.errors import InputError
from kvsim.evidence.ledger import evidence_for
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Stack
from kvsim.machines.profiles import load_hardware, load_stack, with_numbers
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.prediction.pool import pool
from kvsim.serving.costs import StepCosts
from kvsim.serving.outcome import Outcome
from kvsim.serving.pools import TwoPools, simulate_pools
from kvsim.serving.rules import Rules
from kvsim.serving.simulate import simulate
from kvsim.techniques import parse
from kvsim.traces.requests import Requests

STACKS = {
    "vLLM": "vllm", "SGLang": "sglang", "TensorRT-LLM": "trtllm", "HF transformers": "hf-fa2",
    "AutoAWQ": "autoawq", "gpt-fast": "gpt-fast", "TinyChat": "tinychat", "llama.cpp": "llamacpp",
    "Splitwise": "splitwise", "DeepSpeed-MII": "mii",
}  # fmt: skip
OTHERWISE = {"hf-fa2": "hf-eager", "autoawq": "hf-eager"}
KINDS = {
    "tpot_s": "decode", "decode_tok_s": "decode", "ttft_s": "prefill", "prefill_tok_s": "prefill",
    "peak_gib": "memory",
}  # fmt: skip
PLAYED = ("closed loop", "offline all at once")
BUDGET = 8192
"""Tokens of a pass where a row says none: what the servers of all three engines take by default on
cards of 80 GB and more (vLLM's max_num_batched_tokens, A100 apart; TensorRT-LLM's max_num_tokens;
SGLang's chunked_prefill_size)."""
BLOCK = 16  # tokens per block of a prefix, vLLM's
HOST = 500e9  # of the host, for prefixes [B]
TURNS = 10  # requests of each client of a load test, as InferenceMAX sends
KEPT = 8  # tables and runs in memory; rows of one run follow one another
CONTEXTS = 16  # points of the sum over a growing context

Whole = NDArray[np.int64]


@dataclass(frozen=True)
class Said:
    """A predicted number, and its 80 % interval where there is one."""

    value: float
    low: float = 0.0
    high: float = 0.0


@cache
def stack_of(engine: str, version: str) -> Stack:
    """The stack of an engine at a version: its own, else the engine's, else the idealised one."""
    name = STACKS[engine]
    number = version.split()[0].removeprefix("v") if version else ""
    for each in (f"{name}-{number}", name, OTHERWISE.get(name, ""), "fused"):
        try:
            return load_stack(each)
        except InputError:
            continue
    raise AssertionError(name)


def deployment_of(row: Row, stack: str | Stack = "") -> Deployment:
    """Where a row ran."""
    found = load_stack(stack) if isinstance(stack, str) and stack else stack
    found = found or stack_of(row.engine, row.version)
    assert isinstance(found, Stack)
    if "--async-scheduling" in row.note and not found.time.asynchronous:
        found = _asynchronous(found)
    spread = row.tp, row.pp, row.dp, row.ep
    d = Deployment(_model(row.model), load_hardware(row.card), found, row.weights, *spread)
    if row.note == LARGER_GRAPHS:
        d = replace(d, stack=with_numbers(d.stack, {"time.graph_tokens": 2048}))
    return d if row.served else replace(d, stack=d.stack.offline)


_model = cache(load_model)


def _asynchronous(stack: Stack) -> Stack:
    """A stack with vLLM's --async-scheduling: the host's work runs beside the GPU."""
    time = stack.time
    numbers = {
        "time.step_s": 0.0,
        "time.sequence_s": 0.0,
        "time.beside_step_s": time.step,
        "time.beside_sequence_s": time.sequence,
    }
    cards = {name: with_numbers(card, numbers) for name, card in stack.cards.items()}
    return replace(with_numbers(stack, numbers), cards=cards)


def predict_rows(rows: Sequence[Row], traces: Path, stack: str | Stack = "") -> list[Said | str]:
    """What kvsim says of each row, or why it says nothing.

    Parameters
    ----------
    rows
        The rows.
    traces
        Folder of the traces that they name.
    stack
        Stack that stands in for that of each row's engine, if given.
    """
    found: list[Said | str] = []
    for kept in (_played, _costs):
        kept.clear()  # of another stack of the same name
    for row in rows:
        try:
            found.append(
                _said(replace(row, trace=str(traces / row.trace) if row.trace else ""), stack)
            )
        except InputError as error:
            found.append(str(error))
    return found


def _said(row: Row, stack: str | Stack) -> Said:
    d = deployment_of(row, stack)
    if row.table == "speedup":
        return _speedup(row, d)
    value = METRICS[row.metric](row, d)
    known = evidence_for(d, row.technique, KINDS.get(row.metric, "request"), load=row.load)
    factors = (known.low, known.high)
    if row.metric.endswith("tok_s"):  # factors are of times
        factors = (1 / known.high, 1 / known.low)
    return Said(value, value * factors[0], value * factors[1])


def _speedup(row: Row, d: Deployment) -> Said:
    if row.baseline == "no cache":
        return _from_host(row, d)
    metric = row.of if row.of in METRICS else "decode_tok_s"
    base = replace(row, technique=row.baseline or "full", batch=row.baseline_batch, metric=metric)
    value = METRICS[metric](replace(row, metric=metric), d) / METRICS[metric](base, d)
    return Said(value)


def _from_host(row: Row, d: Deployment) -> Said:
    """Time to compute a prompt over that to load its cache, once another one took its place."""
    prompt, _ = _whole(row)
    each = -(-prompt // BLOCK)
    one, other = np.arange(each), np.arange(each) + each
    requests = Requests(
        np.array([0.0, 1e3, 2e3]), np.full(3, prompt), np.full(3, 2),
        np.concatenate([one, other, one]), np.arange(4) * each, BLOCK,
    )  # fmt: skip
    rules = Rules(
        max_seqs=1, max_tokens=BUDGET, block_tokens=BLOCK, blocks=each + each // 2 + 1,
        prefix_caching=True, host_cache=HOST, prefix_load="load",
    )  # fmt: skip
    costs = StepCosts(parse("full"), d, rules, prompt + 2, prompt)
    computed, _, loaded = Outcome(simulate(requests, costs)).ttft_s
    return Said(float(computed / loaded))


def _whole(row: Row) -> tuple[int, int]:
    return max(1, round(row.prompt)), max(1, round(row.generate))


def _static(row: Row, d: Deployment) -> Prediction:
    prompt, generate = _whole(row)
    batch = np.array([float(row.batch)])
    return Prediction(parse(row.technique), d, batch, prompt, max(generate, 1), CONTEXTS)


def _waves(row: Row, d: Deployment) -> float:
    """Time of a static batch of which only as many run at once as the cache has room for. [s]"""
    prompt, generate = _whole(row)
    technique = parse(row.technique)
    together = max(1.0, np.floor(pool(technique, d, prompt, generate).concurrency))
    waves, rest = divmod(float(row.batch), together)
    took = 0.0
    for count, size in ((waves, together), (1.0 if rest else 0.0, rest)):
        if count:
            one = Prediction(technique, d, np.array([size]), prompt, generate, CONTEXTS)
            cached = (
                one.ttft_s - one.tpot_s if row.cached else 0.0
            )  # one pass is left of the prompt
            took += count * float((one.request_s - cached)[0])
    return took


_costs: dict[tuple[Row, str], StepCosts] = {}


def _closed(row: Row, d: Deployment) -> Outcome:
    """A load test as its client runs it: all clients at once, and so many requests of each."""
    loop = replace(_alike(row), concurrency=0), d.stack.name  # tables serve every load
    drawn = np.random.default_rng(0)
    count = row.requests or TURNS * row.concurrency
    prompt, generate = (
        _drawn(drawn, mean, row.spread, count) for mean in (row.prompt, row.generate)
    )
    if loop not in _costs:
        if len(_costs) == KEPT:
            _costs.clear()
        longest = [max(1, round(n * 2 / (1 + row.spread))) for n in (row.prompt, row.generate)]
        _costs[loop] = StepCosts(parse(row.technique), d, _rules(row, d), sum(longest), longest[0])
    parent = np.maximum(np.arange(count) - row.concurrency, -1)
    nothing = np.zeros(count)
    requests = Requests(nothing, prompt, generate, parent=parent, think=nothing)
    if row.readers:  # both pools are laid out as the one whose time was measured
        return Outcome(simulate_pools(requests, _costs[loop], TwoPools(row.readers, row.decoders)))
    return Outcome(simulate(requests, _costs[loop]))


def _drawn(random: np.random.Generator, mean: float, spread: float, count: int) -> Whole:
    """Lengths drawn evenly between a share of the longest and the whole. [tokens]"""
    longest = mean * 2 / (1 + spread)
    return np.maximum(1, np.rint(random.uniform(spread * longest, longest, count))).astype(np.int64)


def _rules(row: Row, d: Deployment) -> Rules:
    return Rules(max_seqs=row.max_seqs, max_tokens=row.max_tokens or BUDGET).scale_to(d)


def _alike(row: Row) -> Row:
    """The run of a row, whatever was measured of it."""
    return replace(row, metric="", value=0.0, line=0, note="", listed=False, asked="")


def _offline(row: Row, d: Deployment) -> Outcome:
    if row.mode == "closed loop":
        return _closed(row, d)
    if row.trace:
        table = np.loadtxt(row.trace, delimiter=",", skiprows=1)
        prompt, generate = table[:, 1].astype(np.int64), table[:, 2].astype(np.int64)
    else:
        prompt, generate = (np.full(row.requests, n, dtype=np.int64) for n in _whole(row))
    requests = Requests(np.zeros(prompt.size), prompt, generate)
    longest = int((prompt + generate).max())
    costs = StepCosts(parse(row.technique), d, _rules(row, d), longest, int(prompt.max()))
    return Outcome(simulate(requests, costs, row.replicas))


_played: dict[tuple[Row, str], Outcome] = {}


def _run(row: Row, d: Deployment) -> Outcome:
    same = _alike(row), d.stack.name
    if same not in _played:
        if len(_played) == KEPT:
            _played.clear()
        _played[same] = _offline(row, d)
    return _played[same]


def _output_tok_s(row: Row, d: Deployment) -> float:
    if row.mode in PLAYED:
        run = _run(row, d)
        return run.output_tokens / run.duration_s
    return row.batch * row.generate / _waves(row, d)


def _tpot(row: Row, d: Deployment) -> float:
    if row.mode in PLAYED:
        late = (row.streamed - 1) / max(row.generate - 1, 1)  # is counted as of the first token
        return (1 - late) * float(np.nanmean(_run(row, d).tpot_s))
    return float(_static(row, d).tpot_s[0])


def _ttft(row: Row, d: Deployment) -> float:
    if row.mode in PLAYED:
        run = _run(row, d)
        return float(np.mean(run.ttft_s) + (row.streamed - 1) * np.nanmean(run.tpot_s))
    return float(_static(row, d).ttft_s[0])


def _latency(row: Row, d: Deployment) -> float:
    if row.mode not in PLAYED:
        return _waves(row, d)
    return float(np.mean(_run(row, d).latency_s))


def _allocated(row: Row, d: Deployment) -> float:
    """Peak of PyTorch's allocator, which the driver's context is not in. [B]"""
    found = _static(row, d)
    return float(found.gpu_bytes[0] - found.buffers["gpu"]["context"][0])


METRICS: dict[str, Callable[[Row, Deployment], float]] = {
    "ttft_s": _ttft,
    "tpot_s": _tpot,
    "e2e_s": _latency,
    "output_tok_s": _output_tok_s,
    "decode_tok_s": lambda r, d: r.batch / _tpot(r, d),
    "prefill_tok_s": lambda r, d: r.batch * r.prompt / _ttft(r, d),
    "peak_gib": lambda r, d: d.gpus * _allocated(r, d) / 2**30,
}
