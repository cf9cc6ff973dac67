"""Which techniques run for real, and settings under which each acts in a small run.

It knows no PyTorch: a session lists its units by it.
"""

from collections.abc import Callable, Mapping

from kvsim.frozen import frozen
from kvsim.techniques import TECHNIQUES


@frozen
class SmallRun:
    """A run that a check does; techniques choose settings that act in it."""

    batch: int  # [sequences]
    prompt: int  # [tokens]
    group: int  # numbers that share a scale, a divisor of the head dimension
    weight_bits: int  # 4 where the model's widths allow it, otherwise 16
    kv_heads: int = 2  # of the model

    @property
    def quarter(self) -> int:
        """A quarter of the prompt. [tokens]"""
        return max(1, self.prompt // 4)

    @property
    def pages(self) -> int:
        """Half of the prompt in pages of four. [tokens]"""
        return 4 * max(1, self.prompt // 8)


SETTINGS: Mapping[str, Callable[[SmallRun], list[str]]] = {
    "full": lambda run: [""],
    "fp8": lambda run: [""],
    # by rows, and by columns with a part per sequence
    "offload": lambda run: ["", f"schedule=column,parts={run.batch}"],
    "kvpr": lambda run: [f"split={run.prompt // 2}"],
    # everything on the host, and half of it: whole heads of a batch can be halved more often
    "flexgen": lambda run: [f"parts={run.batch}", "weights_gpu=50,cache_gpu=50,parts=1"],
    # the batch in one part, and a part per sequence
    "fastdecode": lambda run: ["parts=1", f"parts={run.batch}"] if run.batch > 1 else ["parts=1"],
    "kcache": lambda run: [f"n={run.quarter}"],
    "specache": lambda run: [f"group={run.group},residual={run.group},k={run.quarter}"],
    # a quarter of the tokens, guessed by three tenths of the channels
    "infinigen": lambda run: [f"budget={run.quarter}"],
    # room for what a lane has besides its words; decoded, too
    "cachegen": lambda run: ["bits=16,load=true"],
    "shadowkv": lambda run: [f"budget={run.pages},chunk=4,outliers=1,rank=8"],
    "kivi": lambda run: [f"group={run.group},residual={run.group}"],
    "gear": lambda run: [f"group={run.group},residual={run.group}"],
    "mikv": lambda run: [f"salient=0.5,group={run.group}"],
    "zipcache": lambda run: [""],
    "kvquant": lambda run: ["bits=4,outliers=0.0625"],
    "turboquant": lambda run: [f"bits=4,group={run.group}"],
    "think": lambda run: ["ratio=0.4,window=6", "ratio=0.5,window=6"],
    "h2o": lambda run: [f"heavy={run.quarter},recent={run.quarter}"],
    "streamingllm": lambda run: [f"sink=4,recent={2 * run.quarter}"],
    "duoattention": lambda run: [
        f"retrieval={1 / heads:.12g},sink=4,recent={2 * run.quarter}"
        for heads in (run.kv_heads,)
        if heads > 1
    ],
    "snapkv": lambda run: [f"budget={2 * run.quarter},window=8"],
    "ada-kv": lambda run: [f"budget={2 * run.quarter},window=8"],
    # budgets from three eighths of the prompt down to an eighth
    "pyramidkv": lambda run: [f"budget={4 * max(2, run.prompt // 16)},window=4,beta=2"],
    **{
        name: lambda run: [f"budget={2 * run.quarter}"]
        for name in ("expected-attention", "keydiff", "kvzip", "tova")
    },
    "r-kv": lambda run: [f"kept={max(4, run.quarter)},buffer=4,window=3"],
    "quest": lambda run: [f"budget={run.pages},page=4,dense=1"],
    # half of the prompt of one sequence: several would have to share it
    "cascade": lambda run: [f"shared={run.prompt // 2}"] if run.batch == 1 else [],
    "minference": lambda run: ["vertical=4,slash=8,window=4"],
    "flexprefill": lambda run: ["block=8,share=0.5"],
    "xattention": lambda run: ["block=8,stride=4,share=0.5"],
    "quantspec": lambda run: [
        f"gamma=2,group={run.group},residual={2 * run.group},weight_bits={run.weight_bits}"
    ],
    "magicdec": lambda run: [f"budget={2 * run.quarter},gamma=2"],
    "eagle": lambda run: ["gamma=2,acceptance=0.5,tokens=100"],
    "mtp": lambda run: ["gamma=2,acceptance=0.5"],
    "ngram": lambda run: ["gamma=2,acceptance=0.5"],
    # none that suit every model: both need the same tokens
    "draft": lambda run: [],
}
"""Settings under which each preset acts in a small run, as the notation writes them."""

IMPLEMENTATIONS = tuple(name for name in TECHNIQUES if name in SETTINGS)
"""Presets that can be run."""
