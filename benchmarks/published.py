"""Error of the stacks that nothing was fitted to, on rows that others measured.

    python benchmarks/published.py

The stacks' ``error`` fields quote what this prints.
"""

from typing import NamedTuple

import numpy as np

from kvsim.configs import load_model
from kvsim.deployment import Deployment
from kvsim.generate import Prediction
from kvsim.profiles import load_hardware, load_stack
from kvsim.techniques import parse


class Measured(NamedTuple):
    """Decoded tokens per second of a published run."""

    source: str
    model: str
    gpu: str
    stack: str
    batch: int
    prompt: int
    generate: int
    tok_s: float
    weights: str = "fp16"
    technique: str = "full"


KCACHE = [
    Measured("KCache table 3, KV", "llama2-7b", "kcache-64g", "fused", b, p, 1024, x)
    for p, b, x in (
        (1024, 1, 55.3), (1024, 8, 321.0), (1024, 16, 485.9), (4096, 1, 50.7),
        (4096, 8, 212.0), (4096, 14, 251.2), (15360, 1, 38.3), (15360, 3, 65.9),
    )
]  # fmt: skip
KCACHE_N = [
    Measured(
        "KCache table 3, KCache", "llama2-7b", "kcache-64g", "fused", b, p, 1024, x,
        technique=f"kcache:n={n},gpu_layers=1",
    )
    for p, b, published in (
        (1024, 1, (43.7, 43.4, 42.9)), (1024, 8, (277.1, 256.2, 222.2)),
        (1024, 16, (441.0, 389.7, 315.7)), (4096, 1, (41.9, 41.7, 41.2)),
        (4096, 8, (225.9, 211.8, 188.0)), (4096, 14, (290.8, 267.8, 231.4)),
        (4096, 23, (349.2, 316.2, 266.2)), (15360, 1, (36.5,)), (15360, 3, (76.6,)),
        (15360, 5, (102.5,)),
    )
    for n, x in zip((32, 64, 128), published, strict=False)
]  # fmt: skip
GPT_FAST = [
    Measured(f"gpt-fast README, A100, {w}", m, "a100-80g", "fused", 1, 5, 200, x, w)
    for m, w, x in (
        ("llama2-7b", "fp16", 104.9), ("llama3.1-8b", "fp16", 93.89), ("llama2-7b", "int8", 155.58),
        ("llama3.1-8b", "int8", 137.64), ("llama2-70b", "int8", 19.13),
        ("llama3.1-70b", "int8", 18.04), ("llama2-7b", "int4", 196.8),
        ("llama2-70b", "int4", 25.25),
    )
]  # fmt: skip
SPECACHE = [
    Measured("SpeCache table 3, full", "mistral-7b-v0.2", "a6000", "hf-eager", b, p, 128, x)
    for p, b, x in ((2048, 44, 190.3), (32640, 3, 10.3))
]
KVPR = [
    Measured(
        f"KVPR tables 3 and 4, {technique}", m, "a100-40g", "hf-offload-static", 64, p, g,
        64 * (g - 1) / x, technique=technique,
    )
    for m, p, g, *published in (
        ("opt-6.7b", 128, 32, 8.905, 6.651), ("opt-6.7b", 512, 32, 24.390, 20.349),
        ("opt-6.7b", 512, 128, 110.277, 93.932), ("opt-13b", 128, 32, 11.409, 9.148),
        ("opt-13b", 128, 128, 73.896, 66.119), ("opt-13b", 256, 32, 19.381, 16.654),
    )
    for technique, x in zip(("offload", "kvpr"), published, strict=True)
]  # fmt: skip
FLEXGEN = [
    Measured(
        "H2O logs, FlexGen engine on the GPU", m, "a100-80g", "flexgen", b, p, g, b * (g - 1) / x
    )
    for m, b, p, g, x in (
        ("opt-6.7b", 24, 2048, 2048, 94.936), ("opt-13b", 4, 5000, 5000, 209.101),
        ("opt-30b", 1, 7000, 1024, 53.227),
    )
]  # fmt: skip


def error(row: Measured, stack: str) -> float:
    """Predicted over measured throughput, less one."""
    model, hardware = load_model(row.model), load_hardware(row.gpu)
    d = Deployment(model, hardware, load_stack(stack), row.weights)
    batch = np.array([float(row.batch)])
    p = Prediction(parse(row.technique), d, batch, row.prompt, row.generate)
    return float(p.decode_tok_s[0]) / row.tok_s - 1


def main() -> None:
    print("predicted over measured tokens/s, less one: mean, lowest and highest, in %")
    rows = [*KCACHE, *KCACHE_N, *GPT_FAST, *SPECACHE, *KVPR, *FLEXGEN]
    for source in dict.fromkeys(row.source for row in rows):
        group = [row for row in rows if row.source == source]
        for stack in ("ideal", group[0].stack):
            errors = 100 * np.array([error(row, stack) for row in group])
            size = f"{np.abs(errors).mean():5.1f} {errors.min():+6.1f} {errors.max():+6.1f}"
            print(f"{source:38s} {len(group)} rows  {stack:18s} {size}")


if __name__ == "__main__":
    main()
