"""The stacks of llama.cpp: fitted to llama-bench, held out by card; weights on the host beside.

    KVSIM_SHARED=... python -m benchmarks.llamacpp           # fits, and what each leaves unseen
    KVSIM_SHARED=... python -m benchmarks.llamacpp --write   # and the ledger that ships

Rows: llama.cpp's of ``measured/engines.csv``; decode rows of ``measured/cpu_experts.csv`` whose
host's bandwidth is said and whose layers on the host are. Of CUDA each card is predicted by a fit
to the three others, of Metal each model by the other; the numbers that ship are fitted to all.
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

from kvsim.evidence import ledger
from kvsim.graph import Array
from kvsim.machines.deployment import Deployment, HostLayers
from kvsim.machines.hardware import Link, Stack
from kvsim.machines.profiles import load_hardware, load_stack, number_of, with_numbers
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
HOSTS = {
    "reddit-5080": "rtx5080",
    "llmfit-2080": "rtx2080",
    "kt-deepseek": "rtx4090d",
    "wrong-historian": "rtx3090",
}
"""Pages and their cards; that of wrong-historian is not said and matters little."""
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


def read_hosts(folder: Path) -> list[Run]:
    """Read decode rows with experts on a host whose bandwidth is said."""
    found = []
    for r in rows_of(folder / "measured" / "cpu_experts.csv"):
        said = r["host_GBps"] or (BANDWIDTH if r["source"] == DESKTOP else "")
        rate, layers = re.match(r"[0-9.]+", said), re.match(r"(\d+) of", r["layers"])
        if not (rate and layers) or r["metric"] != "decode_tok_s" or r["source"] not in HOSTS:
            continue
        if "lossy" in r["note"] or "before PR" in r["note"] or "experts" not in r["on_host"]:
            continue
        if r["gpus"] != "1" or r["card"] == "rtx4090":  # rows of 4090 and 4090D are mixed
            continue
        sockets = 2 if "2 sockets" in r["host_GBps"] else 1
        card = load_hardware(HOSTS[r["source"]])
        links = {**card.links, "dram": Link(float(rate[0]) * 1e9)}
        card = replace(card, links=links, sockets=sockets, host_memory=1e13)
        model = load_model(r["model"])
        many = model.layers if r["on_host"].startswith("all") else int(layers[1])
        stack = load_stack(r["engine"].lower().replace("llama.cpp", "llamacpp").split()[0])
        where = Deployment(model, card, stack, r["weights"].lower(),
                           host=HostLayers(experts=frozenset(range(many))))  # fmt: skip
        sizes = int(r["prompt"] or PROMPT), int(r["generate"] or ANSWER)
        found.append(Run("decode", r["source"], where, *sizes, float(r["value"])))
    return found


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


def entries(
    kind: str, engine: str, version: str, sides: Iterable[tuple[str, str, Array]]
) -> list[ledger.LedgerEntry]:
    """Lines of the ledger: times are the inverse of rates."""
    return [
        ledger.entry_of(
            1 / ratio, np.ones(ratio.size), engine=engine, version=version, kind=kind,
            device=device, technique="full", held_out=unseen, source="llama-bench, cpu_experts",
        )
        for device, unseen, ratio in sides
    ]  # fmt: skip


def main() -> None:
    folder, lines = Path(os.environ["KVSIM_SHARED"]), []
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
    runs = read_hosts(folder)
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
