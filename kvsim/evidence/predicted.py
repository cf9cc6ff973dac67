"""A published or measured row and its prediction."""

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np

from kvsim.engine.formats import (
    SCALE_BITS,
    compression_ratio,
    mixed_bits,
    mixed_parameters,
    separable_parameters,
)
from kvsim.engine.roofline import seconds
from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Hardware, Stack
from kvsim.machines.profiles import load_hardware, load_stack, with_numbers
from kvsim.models.configs import load_model
from kvsim.models.model import LayerShape, Model
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import decode_point, largest_batch, prefill_point
from kvsim.techniques import parse
from kvsim.techniques.axes.base import LayerPass
from kvsim.techniques.memory import layer_cache
from kvsim.techniques.papers.kvpr import Place, choose_split
from kvsim.techniques.technique import Technique


@frozen
class PublishedRow:
    """One published number and the run it belongs to.

    Attributes
    ----------
    where
        File and line, for messages.
    paper, table
        Paper and table in which it was published.
    model, hardware, stack, technique
        Names of these in kvsim.
    settings
        Settings of the technique, ``KEY=VALUE,...``.
    options
        Further options of the run.
    batch
        Sequences; None for the most that fit. [sequences]
    prompt, generate
        Tokens per sequence. [tokens]
    metric
        Name of the quantity, which gives its unit.
    published
        The published number.
    use
        "check" if nothing was fitted to the row; otherwise what the row is used for.
    note
        Remark on the row.
    """

    where: str
    paper: str
    table: str
    model: str
    hardware: str
    stack: str
    technique: str
    settings: str
    options: Mapping[str, str]
    batch: int | None
    prompt: int
    generate: int
    metric: str
    published: float
    use: str
    note: str

    def deployment(self, numbers: Mapping[str, float] | None = None) -> Deployment:
        """Build the deployment that the row was measured on.

        Parameters
        ----------
        numbers
            Values that replace some of the stack's numbers, by key.

        Returns
        -------
        Deployment
            The row's model on its hardware and stack.
        """
        stack = with_numbers(_stack(self.stack), numbers or {})
        tp = int(self.options.get("tp", 1))
        weights = self.options.get("weights", "fp16")
        return Deployment(_model(self.model), _hardware(self.hardware), stack, weights, tp)

    def ran_on(self, stack: Stack) -> bool:
        """Decide whether the row was measured on a stack.

        Parameters
        ----------
        stack
            The stack, shipped or from a file.

        Returns
        -------
        bool
            Whether the names agree.
        """
        return _stack(self.stack).name == stack.name

    def prediction(self, deployment: Deployment, technique: str) -> Prediction:
        """Predict the row's run with a technique.

        Parameters
        ----------
        deployment
            Deployment in which it runs.
        technique
            Notation of the technique, with settings.

        Returns
        -------
        Prediction
            The prediction at the row's batch, or at the largest batch that fits if it states none.
        """
        t = parse(technique)
        batch = self.batch or float(_largest_batch(t, deployment, self.prompt, self.generate))
        return Prediction(
            t, deployment, np.array([float(max(batch, 1))]), self.prompt, self.generate
        )


ONE_STEP = 2  # tokens of a row that speaks of one decoding step at its context


_model: Callable[[str], Model] = cache(load_model)
_hardware: Callable[[str], Hardware] = cache(load_hardware)
_stack: Callable[[str], Stack] = cache(load_stack)


def _largest_batch(
    technique: Technique, deployment: Deployment, prompt: int, generate: int
) -> float:
    h = deployment.hardware
    return float(
        np.ravel(
            largest_batch(technique, deployment, prompt, generate, h.gpu_memory, h.host_memory)
        )[0]
    )


def _op_s(row: PublishedRow, deployment: Deployment, technique: str) -> float:
    """Time of one op of the first layer in the round's first pass. [s]"""
    p = decode_point(float(row.batch or 1), row.prompt, row.generate, 0.0)
    step = parse(technique).cycle(deployment, p).steps[0]
    ops = [op for op in step.groups[0].layers[0] if op.name == row.options["op"]]
    if not ops:
        raise InputError(f"no op {row.options['op']!r} in a layer of {technique}; correct params")
    return float(np.ravel(seconds(ops[0], deployment))[0])


def _step_s(row: PublishedRow, deployment: Deployment, technique: str) -> float:
    if "op" in row.options:
        return _op_s(row, deployment, technique)
    prediction = row.prediction(deployment, technique)
    once = prediction.between_s if row.generate == ONE_STEP else 0.0
    return float((prediction.tpot_s - once)[0])


def _speedup(row: PublishedRow, deployment: Deployment) -> float:
    if "op" in row.options:
        return _op_s(row, deployment, row.options["baseline"]) / _op_s(
            row, deployment, row.settings
        )
    return _tok_s(row, deployment, row.settings) / _tok_s(row, deployment, row.options["baseline"])


def _tok_s(row: PublishedRow, deployment: Deployment, technique: str) -> float:
    return float(row.prediction(deployment, technique).batch[0]) / _step_s(
        row, deployment, technique
    )


def _kv_bytes(row: PublishedRow, deployment: Deployment, technique: str) -> float:
    """Keys and values on the GPU at the end of the prompt. [B]"""
    p = prefill_point(1.0, row.prompt, 0)
    t = parse(technique)
    at = LayerPass(deployment, p, LayerShape(), t.parts[0])
    buffers = layer_cache(at)["gpu"]
    return sum(float(np.ravel(v)[0]) for k, v in buffers.items() if k in KEYS_AND_VALUES)


KEYS_AND_VALUES = ("kv", "keys", "values", "fetched pairs")


def _compression(row: PublishedRow, deployment: Deployment) -> float:
    """The closed forms by which the ZipCache paper counts mixed, uniform and windowed caches."""
    given = parse(row.settings).settings
    width, batch = float(row.options.get("width", deployment.model.k_width)), float(row.batch or 1)
    if row.technique == "kivi":
        window = given["residual"] / row.prompt
        return float(16 / (mixed_bits(window, 16, given["bits"]) + SCALE_BITS / given["group"]))
    if "salient" not in given:
        return _kv_bytes(row, deployment, "full") / _kv_bytes(row, deployment, row.settings)
    bits = mixed_bits(given["salient"], given["high"], given["low"])
    mixed = 0 < given["salient"] < 1
    parameters = (mixed_parameters if mixed else separable_parameters)(batch, width, row.prompt)
    return float(compression_ratio(batch, width, row.prompt, bits, parameters))


def _split(row: PublishedRow, deployment: Deployment) -> float:
    (parts,) = parse(row.settings).parts
    p = decode_point(float(row.batch or 1), row.prompt, row.generate, row.generate - 1.0)
    assert isinstance(parts.placement, Place)
    at = LayerPass(deployment, p, LayerShape(), parts)
    return float(np.ravel(choose_split(parts.placement, at))[0])


METRICS: dict[str, Callable[[PublishedRow, Deployment], float]] = {
    "decode_tok_s": lambda r, d: _tok_s(r, d, r.settings),
    "decode_latency_s": lambda r, d: float(r.prediction(d, r.settings).decode_s[0]),
    "step_ms": lambda r, d: 1e3 * _step_s(r, d, r.settings),
    "ttft_ms": lambda r, d: 1e3 * float(r.prediction(d, r.settings).ttft_s[0]),
    "tpot_ms": lambda r, d: 1e3 * float(r.prediction(d, r.settings).tpot_s[0]),
    "prefill_ms": lambda r, d: 1e3 * float(r.prediction(d, r.settings).prefill_s[0]),
    "speedup": _speedup,
    "peak_gib": lambda r, d: d.tp * float(r.prediction(d, r.settings).gpu_bytes[0]) / 2**30,
    "kv_ratio": lambda r, d: _kv_bytes(r, d, r.settings) / _kv_bytes(r, d, "full"),
    "compression": _compression,
    "max_batch": lambda r, d: _largest_batch(parse(r.settings), d, r.prompt, r.generate),
    "fits": lambda r, d: float(r.prediction(d, r.settings).fits[0]),
    "split": _split,
}


def predict(row: PublishedRow, numbers: Mapping[str, float] | None = None) -> float:
    """Predict the value of a row's metric.

    Parameters
    ----------
    row
        The published row.
    numbers
        Values that replace some of the stack's numbers, by key.

    Returns
    -------
    float
        The value, in the unit of the metric.

    Raises
    ------
    InputError
        If the row's run makes no sense, naming the row.
    """
    try:
        return METRICS[row.metric](row, row.deployment(numbers))
    except InputError as error:
        raise InputError(f"{row.where}: {error}") from None
