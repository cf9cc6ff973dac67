"""``kvsim explore``: a page with sliders over a grid that was computed before, without a server."""

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import product
from pathlib import Path

import numpy as np

from kvsim.errors import InputError
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import GIB, Link
from kvsim.prediction.generate import Prediction
from kvsim.report import page
from kvsim.report.answer import Answer, verdict
from kvsim.report.colours import mark
from kvsim.report.json import Row
from kvsim.techniques.base import Technique

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPTS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
LINKS = (0.5, 1.0, 2.0)  # times the profile's host link
KNOBS = {
    "bits": (2, 4, 8),
    "k": (16, 64, 256),
    "gamma": (1, 2, 4, 6),
    "acceptance": (0.5, 0.7, 0.9),
}
"""Settings with a slider, and the values that are computed."""
CONTEXTS = 4  # points of the sum over the generated tokens
DIGITS = 3


def grid(d: Deployment, techniques: Sequence[Technique], generate: int) -> Row:
    """Times and memory of every variant of every technique over batch, prompt and link.

    Raises
    ------
    InputError
        If no technique can run there.
    """
    able = [_unparted(t) for t in techniques if not t.refuses(d)]
    if not able:
        raise InputError("--technique: none can run there; see `kvsim techniques`")
    prompts = [
        p for p in PROMPTS if p + generate <= max(d.model.max_context, PROMPTS[0] + generate)
    ]
    variants = [(t, knobs) for t in able for t, knobs in _variants(t)]
    moved = {id(t): _uses_link(t, d, generate) for t, _ in variants}
    return {
        "batches": BATCHES,
        "prompts": prompts,
        "links": LINKS,
        "knobs": {k: v for k, v in KNOBS.items() if any(k in knobs for _, knobs in variants)},
        "variants": [
            {
                "name": t.name,
                "colour": mark(t.name).colour,
                "exact": t.exact,
                "knobs": knobs,
                "links": [
                    _table(t, _linked(d, factor), prompts, generate)
                    for factor in (LINKS if moved[id(t)] else (1.0,))
                ],
            }
            for t, knobs in variants
        ],
    }


def _unparted(t: Technique) -> Technique:
    """The technique with its batch in one part, so that small batches can be compared."""
    if t.tiles() == 1 or "parts" not in t.settings:
        return t
    return t.changed(parts=1)


def _variants(t: Technique) -> list[tuple[Technique, dict[str, float]]]:
    """A technique with each combination of the settings that have sliders."""
    names = [name for name in t.settings if name in KNOBS]
    found: list[tuple[Technique, dict[str, float]]] = []
    for values in product(*(KNOBS[name] for name in names)):
        knobs = dict(zip(names, values, strict=True))
        try:
            found.append((t.changed(**knobs), knobs))
        except InputError:  # a value that this technique does not take
            continue
    return found or [(t, {})]


def _linked(d: Deployment, factor: float) -> Deployment:
    links = {
        name: Link(link.bandwidth * factor, link.latency) if name in ("h2d", "d2h") else link
        for name, link in d.hardware.links.items()
    }
    return replace(d, hardware=replace(d.hardware, links=links))


def _uses_link(t: Technique, d: Deployment, generate: int) -> bool:
    """Whether a faster host link changes anything."""
    batch = np.array([64.0 * t.tiles()])
    before, after = (
        float(Prediction(t, _linked(d, f), batch, 8192, generate, CONTEXTS).tpot_s[0])
        for f in (1.0, 2.0)
    )
    return abs(after / before - 1) > 1e-6


def _table(t: Technique, d: Deployment, prompts: Sequence[int], generate: int) -> Row:
    """TTFT, TPOT and memory over prompts and batches, None where a batch does not fit or divide."""
    batches = np.array(BATCHES, dtype=float)
    whole = batches % t.tiles() == 0
    rows: Row = {"ttft": [], "tpot": [], "gpu": []}
    for prompt in prompts:
        p = Prediction(t, d, batches[whole], prompt, generate, CONTEXTS)
        for key, values in (("ttft", p.ttft_s), ("tpot", p.tpot_s), ("gpu", p.gpu_bytes / GIB)):
            spread = np.full(batches.size, np.nan)
            spread[whole] = np.where(p.fits, values, np.nan)
            rows[key].append([None if np.isnan(v) else float(f"{v:.{DIGITS}g}") for v in spread])
    return rows


def write_page(
    place: Path, d: Deployment, techniques: Sequence[Technique], generate: int, title: str,
    command: str, basis: Row,
) -> None:  # fmt: skip
    """The page with sliders, a live verdict, a picture and a table."""
    found = grid(d, techniques, generate)
    assets = files("kvsim.report") / "assets"
    controls = (assets / "explore.html").read_text(encoding="utf-8")
    data = json.dumps(found, allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
    extra = f'{controls}<script type="application/json" id="grid">{data}</script>'
    count = len({v["name"] for v in found["variants"]})
    said = f"{count} techniques on {d.hardware.name}: move the sliders, the answer follows."
    page.write(
        place,
        page.Page(
            title, Answer(verdict([said])), basis=basis, command=command, extra=extra,
            script=(assets / "explore.js").read_text(encoding="utf-8"), plotted=True,
            notes=[f"{generate} generated tokens per request; times of a batch that starts on an "
                   f"idle GPU, as `kvsim predict` has them."],
        ),
    )  # fmt: skip
