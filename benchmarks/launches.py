"""Kernels that a real step dispatches, against those stated for kvsim's own stack.

    python -m benchmarks.launches            every technique that can be run
    python -m benchmarks.launches kivi h2o   some of them

A GPU is pretended (``tests/support/pretended.py``), so that the implementations take the paths that
they have there. What PyTorch's dispatcher runs is a kernel, but for views and allocations; Triton's
kernels and copies between the memories are counted with it. A kernel of PyTorch may be several on a
GPU (a sort), which no dispatcher tells.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from dataclasses import dataclass, replace

import numpy as np

from kvsim.engine.roofline import all_ops
from kvsim.graph import Op, Step
from kvsim.prediction.memory import decode_point, prefill_point
from kvsim.techniques import parse
from kvsim.validate.counter import Kind, NullCounter, Watch
from kvsim.validate.parts.normal import tables
from kvsim.validate.registry import IMPLEMENTATIONS, SmallRun, small_settings
from kvsim.validate.run import Generation
from tests.support.pretended import decoder, pretended

LAYERS = (1, 2)
BATCH, PROMPT, GENERATE = 4, 136, 7
RUN = SmallRun(BATCH, PROMPT, 16, 16)
DIFFER = {
    ("h2o", "prefill"): "the prompt is read in as many parts as its scores have room for",
    ("zipcache", "decode"): "steps that probe are drawn, here none",
    ("quantspec", "decode"): "the residual is packed in some rounds, here in none",
    ("r-kv", "decode"): "a cut comes every few steps, here in one of six",
    ("xattention", "prefill"): "every row of blocks has kernels of its own",
    ("ngram", "decode"): "what a pass looks up follows from the text so far, here at random",
    ("flexprefill", "prefill"): "every row of blocks has kernels of its own",
    ("cachegen", "prefill"): "a token is coded after another, each by kernels of its own",
    ("eagle", "draft"): "the first draft reads as many tokens as were accepted, here at random",
}
"""Passes whose kernels depend on sizes or chance, and why."""
MORE = [
    "offload:host_share=0.5",
    "magicdec:draft=snapkv,budget=68,gamma=2",
    "cascade:shared=68",
]
"""Further settings of the techniques."""


class Kernels(NullCounter):
    """Counts kernels and copies pass by pass, those between ops included."""

    def __init__(self) -> None:
        self.watch: Watch | None = None
        self.begun: list[tuple[Kind, int]] = []  # passes, and the kernels before each
        self.copies = 0

    def begin(self, kind: Kind) -> None:
        """Note that a pass starts."""
        assert self.watch
        self.begun.append((kind, self.watch.kernels + self.copies))

    def of(self, kind: str) -> float:
        """Kernels of a pass of that kind, the mean over those that it has; of prompts, the sum."""
        ends = [before for _, before in self.begun[1:]]
        found = [
            end - begin
            for (name, begin), end in zip(self.begun, ends, strict=False)
            if kind == ("decode" if name == "verify" else name)
        ]
        return sum(found) / (1 if kind == "prefill" else len(found))


@dataclass(frozen=True)
class Launches:
    """Those stated and those dispatched in one kind of pass, by layer and for the whole pass."""

    stated: tuple[float, float]
    real: tuple[float, float]

    @property
    def off(self) -> float:
        """Kernels per layer that are dispatched beyond those stated, or fewer."""
        return self.real[0] - self.stated[0]


def launches(text: str) -> dict[str, Launches]:
    """What a technique states and dispatches on a pretended GPU, by kind of pass.

    Models of two sizes tell what a layer adds from what the pass has.
    """
    few, many = (_launches(text, layers) for layers in LAYERS)
    found = {}
    for kind, at_few in few.items():
        sides = []
        for one, other in zip(at_few, many[kind], strict=True):
            each = (other - one) / (LAYERS[1] - LAYERS[0])
            sides.append((each, one - LAYERS[0] * each))
        found[kind] = Launches(*sides)
    return found


def _launches(text: str, layers: int) -> dict[str, tuple[float, float]]:
    """By kind of pass, kernels stated and dispatched in a whole pass."""
    technique = parse(text)
    tables.cache_clear()  # so that what a process copies once counts for both sizes, or for none
    with pretended(interpreted=False):
        small, kernels = decoder(layers), Kernels()
        run = Generation(
            replace(small, counter=kernels),
            technique,
            [list(range(1, PROMPT + 1))] * BATCH,
            GENERATE,
        )
        with Watch() as kernels.watch:
            run.complete()
            kernels.begin("prefill")  # the last pass is over
    assert small.deployment
    technique = run.impl.technique
    middle = decode_point(BATCH, PROMPT, GENERATE, GENERATE / 2)
    *drafts, last = technique.cycle(small.deployment, middle).steps
    prompt = technique.prefill(small.deployment, prefill_point(BATCH, PROMPT, GENERATE))
    steps = {"prefill": prompt, "decode": last} | ({"draft": drafts[0]} if drafts else {})
    return {kind: (_stated(step), kernels.of(kind)) for kind, step in steps.items()}


def _stated(step: Step) -> float:
    return float(sum(float(times * op.launches) for op, times in all_ops(step) if _works(op)))


def _works(op: Op) -> bool:
    return bool(np.any(op.flops) or any(np.any(n) for n in op.bytes.values()))


def every() -> list[str]:
    """Techniques that can be run, at settings that suit a small run."""
    texts = [(name, text) for name in IMPLEMENTATIONS for text in small_settings(name, RUN)]
    # the CPU attends on a thread of its own, which the dispatcher does not see
    texts.remove(("fastdecode", f"parts={BATCH}"))
    # blocks of keys that fill up are packed in between; here none does
    whole = [f"{name}:{text}".rstrip(":") for name, text in texts] + MORE
    return [
        text.replace("residual=16", "residual=128").replace("parts=4", "parts=2") for text in whole
    ]


def main() -> None:
    """Print one line per technique and kind of pass; exit 1 where they differ."""
    wanted, wrong = sys.argv[1:], 0
    print("kernels per layer, and of the pass besides its layers: stated / dispatched")
    for text in every():
        if wanted and text.partition(":")[0] not in wanted:
            continue
        for kind, found in launches(text).items():
            differs = abs(found.off) >= 0.5 and (text.partition(":")[0], kind) not in DIFFER
            wrong += differs
            each, rest = zip(found.stated, found.real, strict=True)
            print(
                f"{text} {kind}: {each[0]:.1f} / {each[1]:.1f}, {rest[0]:.1f} / {rest[1]:.1f}"
                + ("  DIFFERS" if differs else "")
            )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
