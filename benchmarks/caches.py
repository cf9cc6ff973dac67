"""Low-bit caches as engines ship them: what their kernels take, fitted to measured pairs.

    python -m benchmarks.caches ../shared           # errors, also held out by source
    python -m benchmarks.caches ../shared --write   # and kvsim/techniques/caches.csv
    python -m benchmarks.caches --rankings          # is anything idealised above what was measured?

Rows: pairs of ``measured/low_bit_caches.csv``, all that name a card and a model; kernels are fitted
to batches that are given or follow from the load. Pages that name neither are taken to be Qwen3-8B
on an H100, and count for their own formats alone.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from kvsim import api
from kvsim.errors import InfeasibleError, InputError
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.prediction.pool import pool
from kvsim.techniques import parse
from kvsim.techniques.papers import cache
from kvsim.techniques.papers.cache import FORMATS, CacheKernel, load_kernels

Row = dict[str, str]
TABLE = Path("kvsim/techniques/caches.csv")
STACKS = {
    "vLLM": "vllm",
    "SGLang": "sglang",
    "TensorRT-LLM": "trtllm",
    "mini-sglang": "sglang",
    "llama.cpp": "llamacpp",
    "LMDeploy": "lmdeploy",
}
CARDS = {
    "A800 40G": "a800-40g",
    "A800 80G": "a800-80g",
    "RTX 4060 8G": "rtx4060",
    "RTX 5060 Ti 16G": "rtx5060ti-16g",
    "RTX 4070 12G": "rtx4070",
    "RTX 2080 Ti 11G": "rtx2080ti",
    "not said": "h100",
}
MODELS = {"not said": "qwen3-8b"}
WEIGHTS = {"Q4": "q4_k_m", "": "fp16"}
LENGTHS = 512, 128  # of rows that say none [tokens]
ROTATED = ("turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
BOTH = "vllm-turboquant-blog and vllm-53060 (main), batches given or of the load"
GROUPS: Mapping[str, tuple[str, ...]] = {
    BOTH: ("turboquant_k8v4", *ROTATED),
    "vllm-38378 and vllm-40633, whose model and card are assumed": (
        "int8_per_token_head",
        "fp8_per_token_head",
        "int4_per_token_head",
        "int2_per_token_head",
    ),
    "trtllm-1397 and lmdeploy-525, int8 of 2023 and 2024": ("int8",),
}
"""Formats that share a time per token walked, and a fixed time per layer but for rotated keys."""
RELEASES = (
    "0.20.2 (6ec9bbec3)",
    "0.25.1",
    "0.20.0",
    "0.4",
    "0.1.5",
    "0.0.x",
    "",
    "0.9.0.dev2024032600",
)


REGISTERS = ("PR 53060",)
"""Versions whose kernels unpack in registers: predicted, as all of this kind, by bytes alone."""
RANKED = ("fp8", "kivi", "kivi:bits=4", "turboquant", "kvquant", "gear", "zipcache", "eagle3+kivi")
SETTINGS = (
    ("vllm", ("h100", "a100-80g", "rtx4090", "l40s")),
    ("sglang", ("h100", "a100-80g", "rtx4090")),
    ("trtllm", ("h100", "a100-80g", "b200")),
    ("llamacpp", ("rtx3090", "rtx4090")),
)
SERVED = ("llama3.1-8b", "mistral-7b-v0.2", "qwen3-8b", "qwen3-4b", "qwen3-30b-a3b")


def check_rankings() -> None:
    """Count the rankings in which something idealised stands above what its engine has."""
    wrong, settings = 0, [(e, c, m) for e, cards in SETTINGS for c in cards for m in SERVED]
    for i, (stack, card, model) in enumerate(settings):
        where = {"model": model, "gpu": card, "stack": stack}
        batch, prompt = (1, 8, 32)[i % 3], (2048, 8192, 32000)[i // 3 % 3]
        grid = api.sweep(technique=["full", *RANKED, *FORMATS], batch=[batch], prompt=[prompt],
                         **where)  # fmt: skip
        alike = api.predict(technique="all", batch=batch, prompt=prompt, **where)
        ranked = {"sweep": [row["technique"] for row in grid.tables[0].rows],
                  "predict": [row["notation"] for row in alike.rows]}  # fmt: skip
        try:
            plan = api.plan(prompt=prompt, generate=128, offline=True, max_loss=0.1, **where)
            ranked["plan"] = [str(plan.found.choice.technique), "full"]
        except InfeasibleError:
            print(f"{model} on {card}: no plan")
        for name, order in ranked.items():
            lacks = [bool(parse(t).needs_kernel(stack)) for t in order]
            if lacks != sorted(lacks):
                wrong += 1
                print(f"{name}, {model} on {card}, {stack}, {batch} x {prompt}: {order}")
    print(f"{len(settings)} settings: {wrong} rankings with something idealised above the measured")


def main() -> None:
    if "--rankings" in sys.argv:
        check_rankings()
        return
    place = Path(sys.argv[1]) / "measured" / "low_bit_caches.csv"
    with place.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found: dict[str, CacheKernel] = {k.format + k.engine: k for k in load_kernels()}
    unseen: dict[int, float] = {}
    for source, formats in GROUPS.items():
        mine = [r for r in rows if r["technique"] in formats and _kernel_known(r)]
        fitted = fit(mine, formats, source)
        found |= {k.format + k.engine: k for k in fitted}
        print_errors(mine, [predict_pair(r, fitted) for r in mine], source)
        for left in dict.fromkeys(r["source"] for r in mine):
            others = [r for r in mine if r["source"] != left]
            kernels = fit(others, formats, source) if others else _plain(formats)
            apart = [r for r in mine if r["source"] == left]
            said = [predict_pair(r, kernels) for r in apart]
            unseen |= {id(r): x for r, x in zip(apart, said, strict=True)}
            print_errors(apart, said, f"  without {left}")
    _print_all(rows, list(found.values()), unseen)
    if "--write" in sys.argv:
        names = [f.name for f in fields(CacheKernel)]
        with TABLE.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(names)
            writer.writerows([getattr(k, n) for n in names] for k in found.values())


def _print_all(
    rows: Sequence[Row], kernels: Sequence[CacheKernel], unseen: Mapping[int, float]
) -> None:
    """All pairs whose card and model are said: fitted formats by the other sources' rows."""
    said: dict[int, float] = dict(unseen)
    for r in rows:
        if id(r) not in said and r["card"] != "not said":
            try:
                plain = r["engine_version"] in REGISTERS
                said[id(r)] = predict_pair(r, _plain((r["technique"],)) if plain else kernels)
            except InputError as problem:
                print(f"    refused: {r['source']} {r['technique']}: {str(problem)[:90]}")
    named = [r for r in rows if r["card"] != "not said" and id(r) in said]
    for source in dict.fromkeys(r["source"] for r in named):
        some = [r for r in named if r["source"] == source]
        print_errors(some, [said[id(r)] for r in some], f"  {source}")
        for r in some if "--rows" in sys.argv else ():
            load = r["batch"] or r["concurrency"] or r["request_rate"]
            print(
                f"      {r['technique']:20s} {load:4s} {r['prompt']:6s} {r['of']:12s} "
                f"{said[id(r)]:6.3f} for {float(r['value']):6.3f}"
            )
    released = [r for r in named if r["engine_version"] in RELEASES]
    for title, some in (("in releases, by source", released), ("all, by source", named)):
        print_errors(some, [said[id(r)] for r in some], title)


def _kernel_known(row: Row) -> bool:
    """Rows of kernels that ship: no pull requests, whose kernels differ, but where they are all."""
    mine = row["engine"] in STACKS and row["card"] != "not said"
    alone = row["card"] == "not said" and row["of"] == "tpot_s"
    return alone or (mine and "PR" not in row["engine_version"] and bool(row["prompt"]))


def _plain(formats: Sequence[str]) -> list[CacheKernel]:
    """Kernels that take what their bytes take."""
    base = [k for k in load_kernels() if k.format in formats and k.engine in STACKS.values()]
    return [replace(k, layer_s=0.0, walk_s=0.0, unpack_ops=0.0) for k in base]


def predict_pair(row: Row, kernels: Sequence[CacheKernel]) -> float:
    """Predict the speed-up of a cache over one of 16 bits.

    Under load a request's tokens wait for the prompts of those that run beside it, and as many run
    as the rate and a request's time give, or as there is room for.

    Parameters
    ----------
    row : of low_bit_caches.csv.
    kernels : in place of the shipped ones.
    """
    shipped = cache.find_kernel
    cache.find_kernel = lambda stack, name: _kernel_of(kernels, stack, name)  # type: ignore[assignment]
    try:
        card = "a100-80g" if "A100" in row["card"] else CARDS.get(row["card"], row["card"])
        if row["engine"] not in STACKS:
            raise InputError(f"{row['engine']} has no stack")
        name = STACKS[row["engine"]]
        stack = load_stack("vllm" if name == "lmdeploy" else name).for_gpu(card)
        weights = WEIGHTS.get(row["weights"], row["weights"])
        model = load_model(MODELS.get(row["model"], row["model"]))
        d = Deployment(
            model, load_hardware(card), replace(stack, name=name), weights, int(row["tp"])
        )
        low = _Served(row, d, row["technique"])  # an engine's own name is a technique
        return low.speed() / _Served(row, d, "full").speed()
    finally:
        cache.find_kernel = shipped


def _kernel_of(kernels: Sequence[CacheKernel], stack: str, name: str) -> CacheKernel | None:
    """That of the engine, or another's of the same format."""
    alike = [k for k in kernels if k.format == name]
    own = [k for k in alike if stack.partition("@")[0] == k.engine]
    return next(iter(own or alike), None)


class _Served:
    """A run of a row with one cache."""

    def __init__(self, row: Row, deployment: Deployment, technique: str) -> None:
        self.row, self.d, self.technique = row, deployment, parse(technique)
        self.prompt = int(row["prompt"] or LENGTHS[0])
        self.generate = int(row["generate"] or LENGTHS[1])

    def speed(self) -> float:
        """What the row measured, more being faster."""
        row, of = self.row, self.row["of"]
        batch = self._together()
        prompt, tpot = self._times(batch)
        alone = not row["mode"].startswith(("closed", "open", "offline"))
        beside = 0.0 if alone else batch * prompt / self.generate
        beside /= 2 if row["mode"].startswith("offline") else 1
        if of in ("tpot_s", "decode_tok_s"):
            return 1 / (tpot + beside)
        if of == "ttft_s":
            return 1 / prompt
        many = batch if alone or row["mode"].startswith("offline") else 1.0
        whole = (prompt * many) + self.generate * (
            tpot + (beside if many == 1 and not alone else 0.0)
        )
        return (batch if of in ("output_tok_s", "req_s") else 1.0) / whole

    def _times(self, batch: float) -> tuple[float, float]:
        """Of one prompt, and per token at a batch. [s]"""
        one = Prediction(self.technique, self.d, np.array([1.0]), self.prompt, 2, contexts=2)
        all_ = Prediction(
            self.technique, self.d, np.array([batch]), self.prompt, self.generate, contexts=2
        )
        return float(one.prefill_s[0]), float(all_.tpot_s[0])

    def _together(self) -> float:
        """Sequences that decode at once."""
        row = self.row
        if row["batch"]:
            return float(row["batch"].split()[0])
        if row["concurrency"]:
            return float(row["concurrency"])
        room = float(np.floor(pool(self.technique, self.d, self.prompt, self.generate).concurrency))
        if row["requests"] and not row["request_rate"]:
            return max(min(float(row["requests"]), room, 1024.0), 1.0)
        if not row["request_rate"]:
            return max(min(room, 256.0), 1.0)
        batch, rate = 1.0, float(row["request_rate"])
        for _ in range(20):
            prompt, tpot = self._times(max(round(batch), 1))
            stays = prompt + self.generate * (tpot + batch * prompt / self.generate)
            batch = 0.5 * batch + 0.5 * min(rate * stays, room)
        return max(float(round(batch)), 1.0)


def fit(rows: Sequence[Row], formats: Sequence[str], source: str) -> list[CacheKernel]:
    """Fit a group of formats: times per layer and per token walked, operations of each format.

    A format without rows gets the mean of the others' operations.

    Parameters
    ----------
    rows : measured pairs.
    formats : of the group.
    source : for the table.
    """
    base = [k for k in load_kernels() if k.format in formats and k.engine in STACKS.values()]
    base = [next(k for k in base if k.format == f) for f in formats]
    seen = [f for f in formats if any(r["technique"] == f for r in rows)]
    several = len({r["prompt"] for r in rows}) > 2  # contexts, without which no walk is told

    def kernels(x: np.ndarray) -> list[CacheKernel]:
        each = dict(zip(seen, x[3:], strict=True))
        return [
            replace(
                k,
                layer_s=round(float(x[0] + x[2] * (k.format in ROTATED)) * 1e-5, 8),
                walk_s=round(float(x[1]) * 1e-9 * several, 12),
                unpack_ops=round(10 * float(each.get(k.format, np.mean(x[3:]))), 2),
                source=source,
            )
            for k in base
        ]

    def misfit(x: np.ndarray) -> list[float]:
        some = kernels(x)
        return [float(np.log(predict_pair(r, some) / float(r["value"]))) for r in rows]

    start = [1.0, 5.0, 2.0, *[1.0] * len(seen)]
    found = least_squares(
        misfit, start, bounds=(0, np.inf), loss="soft_l1", f_scale=0.1, diff_step=0.03, max_nfev=20
    )
    return kernels(found.x)


def print_errors(rows: Sequence[Row], said: Sequence[float], title: str) -> None:
    """Print how far speed-ups are off, and how many signs are right.

    Parameters
    ----------
    rows : measured pairs.
    said : their predictions.
    title : of the line.
    """
    true = np.array([float(r["value"]) for r in rows])
    off, clear = np.abs(np.array(said) / true - 1), np.abs(true - 1) > 0.05
    signs = np.mean((np.array(said) > 1) == (true > 1), where=clear) if clear.any() else np.nan
    print(
        f"{title}: {len(rows)} rows, median {np.median(off):.1%}, "
        f"p90 {np.quantile(off, 0.9):.1%}, signs right beyond 5 %: {signs:.0%} of {clear.sum()}",
        flush=True,
    )


if __name__ == "__main__":
    main()
