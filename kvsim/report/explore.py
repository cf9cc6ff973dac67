"""The page of ``kvsim explore``: sliders that select from a precomputed grid of predictions."""

import json
from collections.abc import Sequence
from itertools import product

import numpy as np

from kvsim.errors import InputError
from kvsim.machines.deployment import Deployment, basis
from kvsim.machines.hardware import GIB
from kvsim.prediction.breakeven import linked
from kvsim.prediction.generate import Prediction
from kvsim.report.answer import Answer, verdict
from kvsim.report.colours import mark
from kvsim.report.evidence import describe_basis
from kvsim.report.json import Row
from kvsim.report.names import describe_deployment
from kvsim.report.result import Result
from kvsim.techniques.technique import Technique

SLIDER_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SLIDER_PROMPTS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
SLIDER_LINKS = (0.5, 1.0, 2.0)  # times the profile's host link
KNOBS = {
    "bits": (2, 4, 8),
    "k": (16, 64, 256),
    "gamma": (1, 2, 4, 6),
    "acceptance": (0.5, 0.7, 0.9),
}
"""Settings with a slider, and the values that are computed."""
UNPACKED_BITS = 16  # bits of a number that is not packed
CONTEXTS = 4  # points of the sum over the generated tokens
GRID_DIGITS = 3


def _grid(deployment: Deployment, techniques: Sequence[Technique], generate: int) -> Row:
    """Times and memory of every variant of every technique over batch, prompt and link."""
    able = [t for t in techniques if not t.refuses_released(deployment)]
    able = [t.changed(parts=1) if "parts" in t.settings and t.tiles() > 1 else t for t in able]
    if not able:
        raise InputError(
            "--technique: none of these techniques can run on this deployment; "
            "see `kvsim techniques`"
        )
    prompts = [
        p
        for p in SLIDER_PROMPTS
        if p + generate <= max(deployment.model.max_context, SLIDER_PROMPTS[0] + generate)
    ]
    variants = [(t, knobs) for t in able for t, knobs in _variants(t)]
    moved = {id(t): _uses_link(t, deployment, generate) for t, _ in variants}
    return {
        "batches": SLIDER_BATCHES,
        "prompts": prompts,
        "links": SLIDER_LINKS,
        "knobs": {k: v for k, v in KNOBS.items() if any(k in knobs for _, knobs in variants)},
        "variants": [
            {
                "name": t.name,
                "colour": mark(t.name).colour,
                "exact": t.exact,
                "idealised": bool(t.needs_kernel(deployment.stack.name)),
                "knobs": knobs,
                "links": [
                    _table(t, linked(deployment, factor), prompts, generate)
                    for factor in (SLIDER_LINKS if moved[id(t)] else (1.0,))
                ],
            }
            for t, knobs in variants
        ],
    }


def _variants(technique: Technique) -> list[tuple[Technique, dict[str, float]]]:
    """A technique with each combination of the settings that have sliders."""
    names = [name for name in technique.settings if name in KNOBS]
    if technique.settings.get("bits") == UNPACKED_BITS:
        names.remove("bits")  # it moves the cache as it is; narrower is another technique
    found: list[tuple[Technique, dict[str, float]]] = []
    for values in product(*(KNOBS[name] for name in names)):
        knobs = dict(zip(names, values, strict=True))
        try:
            found.append((technique.changed(**knobs), knobs))
        except InputError:  # a value that this technique does not take
            continue
    return found or [(technique, {})]


def _uses_link(technique: Technique, deployment: Deployment, generate: int) -> bool:
    """Whether a faster host link changes anything."""
    batch = np.array([64.0 * technique.tiles()])
    wheres = (linked(deployment, factor) for factor in (1.0, 2.0))
    both = [Prediction(technique, d, batch, 8192, generate, CONTEXTS) for d in wheres]
    before, after = (float(p.tpot_s[0]) for p in both)
    return abs(after / before - 1) > 1e-6


def _table(
    technique: Technique, deployment: Deployment, prompts: Sequence[int], generate: int
) -> Row:
    """TTFT, TPOT and memory over prompts and batches, None where a batch does not fit or divide."""
    batches = np.array(SLIDER_BATCHES, dtype=float)
    whole = batches % technique.tiles() == 0
    rows: Row = {"ttft": [], "tpot": [], "gpu": []}
    for prompt in prompts:
        p = Prediction(technique, deployment, batches[whole], prompt, generate, CONTEXTS)
        for key, values in (("ttft", p.ttft_s), ("tpot", p.tpot_s), ("gpu", p.gpu_bytes / GIB)):
            spread = np.full(batches.size, np.nan)
            spread[whole] = np.where(p.fits, values, np.nan)
            rows[key].append(
                [None if np.isnan(v) else float(f"{v:.{GRID_DIGITS}g}") for v in spread]
            )
    return rows


def make_result(
    deployment: Deployment,
    techniques: Sequence[Technique],
    generate: int,
) -> Result[Row]:
    """Predict the grid, and make the page with sliders, a verdict, a chart and a table.

    Parameters
    ----------
    deployment
        The deployment.
    techniques
        Techniques to compare; those that cannot run are left out.
    generate
        Generated tokens per request. [tokens]

    Raises
    ------
    InputError
        If none of the techniques can run.
    """
    found = _grid(deployment, techniques, generate)
    count = len({v["name"] for v in found["variants"]})
    card = deployment.hardware.name
    said = f"{count} techniques on {card}: move the sliders to change the answer."
    return Result(
        f"{describe_deployment(deployment)}: explore",
        Answer(verdict([said])),
        found,
        found,
        remarks=[
            f"{generate} generated tokens per request; times of a batch that starts on an "
            f"idle GPU, as `kvsim predict` has them."
        ],
        foot=[describe_basis(basis(deployment))],
        grid=json.dumps(found, allow_nan=False, separators=(",", ":")),
    )
