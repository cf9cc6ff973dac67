"""Losses layer by layer, and a plan of bits beside what it really lost."""

import numpy as np

from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.quality.layers import NORMAL, SIDES, LayerLosses, Widths
from kvsim.report.json import Row
from kvsim.report.screen import Screen
from kvsim.report.table import of_cells


@frozen
class Executed:
    """A plan of widths, and its measured loss window by window."""

    bits: float
    widths: Widths  # (2, layers), indices
    measured: Array  # (windows,) [nat per token]

    @property
    def error(self) -> float:
        """Standard error of the measured mean. [nat per token]"""
        return float(self.measured.std(ddof=1) / np.sqrt(self.measured.size))


def record(found: LayerLosses, plan: Executed | None) -> Row:
    """As ``--json`` has it."""
    each = found.alone.mean(axis=-1)
    row: Row = {
        "model": found.model, "text": found.text, "settings": found.settings,
        "bits": list(found.bits), "factor": found.growth[0],
        "power": found.growth[1],
        "kl_alone": {side: each[i].tolist() for i, side in enumerate(SIDES)},
        "kl_uniform": found.uniform.mean(axis=-1).tolist(), "plan": None,
    }  # fmt: skip
    if plan is not None:
        mean, low, high = found.expected(plan.widths)
        row["plan"] = {
            "bits": plan.bits, "technique": found.notation(plan.widths), "kl_expected": mean,
            "kl_low": low, "kl_high": high, "kl_measured": float(plan.measured.mean()),
            "kl_error": plan.error,
        }  # fmt: skip
    return row


def print_layers(found: LayerLosses, plan: Executed | None) -> None:
    """One line per layer; then the plan."""
    out, each = Screen(), found.alone.mean(axis=-1)
    out.title(f"{found.model}: KL divergence [nat per token] of each layer packed alone")
    out.say(found.settings)
    heads = [f"{side}, {bits} bits" for side in SIDES for bits in found.bits]
    rows = [
        [str(layer), *(f"{each[s, b, layer]:.2g}" for s in (0, 1) for b in range(len(found.bits)))]
        for layer in range(each.shape[-1])
    ]
    out.table(of_cells(("layer", *heads), rows, 0))
    sums = each.sum(axis=(0, 2))
    for b, bits in enumerate(found.bits):
        whole = found.uniform[b].mean()
        out.say(f"All layers at {bits} bits: {whole:.3g}, {whole / sums[b]:.2f} of their sum.")
    if plan is None:
        return
    mean, low, high = found.expected(plan.widths)
    out.blank()
    out.say(f"At {plan.bits:g} bits on average: {found.notation(plan.widths)}")
    measured = float(plan.measured.mean())
    inside = "inside" if low <= measured <= high else "outside"
    out.say(
        f"Expected {mean:.3g} ({low:.3g} to {high:.3g}), measured {measured:.3g} \u00b1 "
        f"{NORMAL * plan.error:.2g}: {inside} the interval; all layers at {found.bits[0]} bits "
        f"lose {found.uniform[0].mean():.3g}."
    )
