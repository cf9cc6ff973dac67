"""The stacks of llama.cpp: fitted to llama-bench, held out by card; weights on the host beside.

    python -m benchmarks.llamacpp ../shared           # fits, and what each leaves unseen
    python -m benchmarks.llamacpp ../shared --write   # and the ledger that ships

Rows: llama.cpp's of ``measured/engines.csv``; those of ``measured/cpu_experts.csv`` whose layers on
the host are said: decode where the host's bandwidth is said, too, and all others by intervals. Of
CUDA each card is predicted by a fit to the three others, of Metal each model by the other; the
numbers that ship are fitted to all.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import csv
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from benchmarks.entries import entry_of
from kvsim.evidence import ledger
from kvsim.evidence.ledger import evidence_for
from kvsim.graph import Array
from kvsim.machines.deployment import Deployment, HostLayers
from kvsim.machines.hardware import Hardware, Link, Stack
from kvsim.machines.profiles import load_hardware, load_stack, number_of, with_host, with_numbers
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.techniques import parse

FREE = {
    "decode": ("kernel.gemm.memory", "time.layer_s", "kernel.attention.memory", "time.stage_s"),
    "prefill": ("kernel.gemm.compute", "attention.score_bytes", "time.stage_overlap"),
}
METAL = {
    "decode": ("kernel.gemm.memory", "time.layer_s", "kernel.attention.memory"),
    "prefill": ("kernel.gemm.compute", "attention.score_bytes", "weights.unpack_bytes"),
}
SHARES = ("memory", "compute", "overlap")  # numbers that are at most 1
POINTS = 4  # of the sum over a growing context
SOFT = 0.1  # relative error from which on a row counts less
ASKED = ("reddit-5080", "llmfit-2080", "kt-deepseek", "wrong-historian")
"""Pages that say their host's bandwidth, or what kind of memory it has."""
HOSTS = {
    "kt-deepseek": "epyc",
    "ggml-14642": "epyc",
    "gtx1070-sweep": "desktop-ddr4",
    "llmfit-2080": "desktop-ddr4",
}
"""Profiles of pages' hosts; all others are desktops with DDR5."""
CARDS = {
    "RTX 5080 16G": "rtx5080",
    "RTX 2080 8G": "rtx2080",
    "4090D 24G": "rtx4090d",
    "GTX 1070 8G": "gtx1070",
    "RTX 3060 12G": "rtx3060",
    "not said": "rtx3090",
}
MODELS = {
    "Qwen/Qwen3.6-35B-A3B": "qwen3.6-35b-a3b",
    "Qwen/Qwen3.5-122B-A10B": "qwen3.5-122b-a10b",
    "mistralai/Mistral-Small-24B-Instruct-2501": "mistral-small-24b",
}
ENGINES = {"llama.cpp": "llamacpp", "Ollama": "ollama", "KTransformers": "ktransformers"}
KINDS = {"decode_tok_s": "decode", "prefill_tok_s": "prefill"}
DESKTOP, BANDWIDTH = "wrong-historian", "88"
"""A page whose host has two channels of DDR5 and no more said: 80 to 96 GB/s."""
EACH = 9  # quantiles of a page's rows, so that each page counts alike
PROMPT, ANSWER = 512, 128  # of rows that do not say theirs [tokens]
FULL = parse("full")


@dataclass(frozen=True)
class Run:
    """A measured rate of tokens, and where it was measured."""

    kind: str
    group: str  # what is held out together
    where: Deployment
    prompt: int
    generate: int
    rate: float

    def predicted(self, numbers: Mapping[str, float]) -> float:
        """Tokens per second with other numbers in the stack. [tokens/s]"""
        d = replace(self.where, stack=with_numbers(self.where.stack, numbers))
        p = Prediction(FULL, d, np.ones(1), self.prompt, self.generate, POINTS)
        return float(1 / p.tpot_s[0] if self.kind == "decode" else self.prompt / p.ttft_s[0])


def read_bench(folder: Path, metal: bool) -> list[Run]:
    """Read llama-bench's rows, of Metal or of CUDA."""
    stack, found = load_stack("llamacpp-2024-05"), []
    for r in rows_of(folder / "measured" / "engines.csv"):
        if r["engine"] != "llama.cpp" or (r["card"] == "m2-ultra") != metal:
            continue
        model, card = load_model(r["model"]), load_hardware(r["card"])
        where = Deployment(model, card, stack, r["weights"], 1, int(r["pp"]))
        decoded = r["metric"] == "decode_tok_s"
        sizes = (1, int(r["generate"]) + 1) if decoded else (int(r["prompt"]), 1)
        group = r["model"] if metal else r["card"]
        kind = "decode" if decoded else "prefill"
        found.append(Run(kind, group, where, *sizes, float(r["value"])))
    return found


def read_hosts(folder: Path) -> tuple[list[Run], list[Run]]:
    """Read rows with weights on a host: decode where its bandwidth is said, and all others."""
    asked, others = [], []
    for r in rows_of(folder / "measured" / "cpu_experts.csv"):
        layers, engine = re.match(r"(\d+) of", r["layers"]), ENGINES.get(r["engine"])
        kind = KINDS.get(r["metric"])
        if not (layers and engine and kind) or "lossy" in r["note"] or r["gpus"] != "1":
            continue
        card = _host_of(r)
        model = load_model(MODELS.get(r["model"], r["model"]))
        if card is None:
            continue
        many = range(model.layers if r["on_host"].startswith("all") else int(layers[1]))
        experts = "experts" in r["on_host"]
        kept = HostLayers(**{"experts" if experts else "layers": frozenset(many)})
        stack = load_stack(engine).for_gpu(card.name)
        if r["ubatch"]:
            stack = with_numbers(stack, {"time.prompt_pass_tokens": float(r["ubatch"])})
        where = Deployment(model, card, stack, _format(r["weights"]), host=kept)
        sizes = int(r["prompt"] or PROMPT), int(r["generate"] or ANSWER)
        run = Run(kind, r["source"], where, *sizes, float(r["value"]))
        said = r["source"] in ASKED and kind == "decode" and "before PR" not in r["note"]
        mixed = r["card"] == "rtx4090"  # rows of 4090 and 4090D
        (asked if said and experts and not mixed else others).append(run)
    return asked, others


def _host_of(row: Mapping[str, str]) -> Hardware | None:
    """The card of a row in its host, or in the usual one of its kind; none for other devices."""
    name = CARDS.get(row["card"].partition(" (")[0], row["card"])
    if name == "none" or name.startswith("Intel"):
        return None
    two = "2 sockets" in row["host_GBps"] or row["source"] == "ggml-14642"
    host = HOSTS.get(row["source"], "desktop-ddr5") + "-2s" * two
    card = replace(with_host(load_hardware(name), host), host_memory=1e13)
    said = re.match(r"[0-9.]+", row["host_GBps"] or BANDWIDTH * (row["source"] == DESKTOP))
    if said is None:
        return card
    given = {**card.sources, "dram.bandwidth_Bps": "given by its page"}
    links = {**card.links, "dram": Link(float(said[0]) * 1e9)}
    return replace(card, links=links, sockets=1 + two, sources=given)


def _format(said: str) -> str:
    """A page's word for weights as the nearest type that kvsim has."""
    plain = said.lower().removeprefix("ud-").partition(" ")[0].partition("_xl")[0]
    return {"": "q4_k_m", "q4_k": "q4_k_m", "q4_k_l": "q4_k_m", "int8": "q8_0"}.get(plain, plain)


def rows_of(path: Path) -> list[dict[str, str]]:
    """Read a table's rows."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def ratios(runs: Sequence[Run], numbers: Mapping[str, float]) -> Array:
    """Predicted over measured rates."""
    return np.array([run.predicted(numbers) / run.rate for run in runs])


def fit(runs: Sequence[Run], keys: Sequence[str]) -> dict[str, float]:
    """Fit some numbers of a stack to runs."""
    stack: Stack = runs[0].where.stack
    start = np.array([number_of(stack, key) for key in keys])
    most = [1.0 if key.rpartition(".")[2].endswith(SHARES) else np.inf for key in keys]
    # some hosts hardly overlap stages: prompts said too quick count as much as they are off
    error: Callable[[Array], Array] = np.log if runs[0].kind == "decode" else lambda r: r - 1
    solved = least_squares(
        lambda x: error(ratios(runs, dict(zip(keys, x * start, strict=True)))),
        np.minimum(1.0, 0.999 * np.array(most) / start),
        bounds=(0.0, np.array(most) / start),
        loss="soft_l1",
        f_scale=SOFT,
        diff_step=1e-3,
        xtol=1e-4,
        ftol=1e-4,
    )
    return dict(zip(keys, (solved.x * start).tolist(), strict=True))


def held_out(runs: Sequence[Run], keys: Sequence[str]) -> Array:
    """Predict each group by a fit to the others. Predicted over measured, in the order of runs."""
    found = np.empty(len(runs))
    for group in sorted({run.group for run in runs}):
        mine = [i for i, run in enumerate(runs) if run.group == group]
        numbers = fit([run for run in runs if run.group != group], keys)
        found[mine] = ratios([runs[i] for i in mine], numbers)
        tell(f"    {group} unseen", found[mine])
    return found


def tell(name: str, ratio: Array) -> None:
    """Print the errors of some rows."""
    off = 100 * np.abs(ratio - 1)
    median, p90 = np.quantile(off, (0.5, 0.9))
    print(f"{name:34s} {ratio.size:4d} rows {median:6.1f} % {p90:6.1f} %", flush=True)


def tell_inside(runs: Sequence[Run], kind: str) -> None:
    """Print the errors of rows that nothing was fitted to, and how many lie in their interval."""
    found = ratios(runs, {})
    known = [evidence_for(run.where, "full", kind) for run in runs]
    inside = [k.low <= x <= k.high for k, x in zip(known, found, strict=True)]
    tell(f"{kind} of other hosts, {np.mean(inside):.0%} inside", found)


def entries(
    kind: str, engine: str, version: str, sides: Iterable[tuple[str, str, Array]]
) -> list[ledger.LedgerEntry]:
    """Lines of the ledger: times are the inverse of rates."""
    return [
        entry_of(
            1 / ratio, np.ones(ratio.size), engine=engine, version=version, kind=kind,
            device=device, technique="full", held_out=unseen, source="llama-bench, cpu_experts",
        )
        for device, unseen, ratio in sides
    ]  # fmt: skip


def main() -> None:
    folder, lines = Path(sys.argv[1]), []
    for kind in FREE:
        cuda, metal = (
            [run for run in read_bench(folder, apple) if run.kind == kind]
            for apple in (False, True)
        )
        print(f"{kind}: { ({k: float(f'{v:.4g}') for k, v in fit(cuda, FREE[kind]).items()}) }")
        print(f"  Metal: { ({k: float(f'{v:.4g}') for k, v in fit(metal, METAL[kind]).items()}) }")
        tell("  as shipped, CUDA", ratios(cuda, {}))
        tell("  as shipped, Metal", ratios(metal, {}))
        unseen, apple = held_out(cuda, FREE[kind]), held_out(metal, METAL[kind])
        both = np.concatenate([unseen, apple])
        tell("  all unseen", both)
        lines += entries(kind, "llamacpp-2024-05", "2024-05",
                         [("any", "device", both), ("m2-ultra", "model", apple)])  # fmt: skip
    runs, others = read_hosts(folder)
    for kind in FREE:
        tell_inside([run for run in others if run.kind == kind], kind)
    for engine in ("llamacpp", "ktransformers"):
        own = [run for run in runs if run.where.stack.name == engine]
        tell(f"experts on the host, {engine}", ratios(own, {}))
        if engine == "llamacpp":
            print(f"  {fit(own, ('kernel.host.memory',))}")
            unseen = held_out(own, ("kernel.host.memory",))
            pages = [unseen[[r.group == g for r in own]] for g in sorted({r.group for r in own})]
            alike = np.concatenate([np.quantile(x, np.linspace(0, 1, EACH)) for x in pages])
            tell("  by host, pages alike", alike)
            version = own[0].where.stack.version
            entry, *_ = entries("decode", engine, version, [("any", "host", alike)])
            lines.append(replace(entry, rows=len(own)))
    if "--write" in sys.argv:
        ledger.update(Path("kvsim/evidence/ledger.csv"), lines)


if __name__ == "__main__":
    main()
