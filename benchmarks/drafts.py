"""Drafts as measured: the acceptance library, what rounds cost in engines, and both held out.

    python -m benchmarks.drafts ../shared           # the table
    python -m benchmarks.drafts ../shared --write   # and the library and stacks that ship

Rows: ``measured/acceptance.csv``, ``drafts.csv`` and the draft speed-ups of ``engines.csv``. The
library keeps two numbers per method, model and kind of text; a stack keeps four times per round and
the share of experts that tokens of one sequence have in common. Rows are held out by model.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import csv
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack, with_numbers
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.techniques import parse
from kvsim.techniques.acceptance import find_accepted, position_shares

Row = dict[str, str]
LIBRARY = Path("kvsim/techniques/acceptance.csv")
KINDS = {
    "code": ("humaneval", "mbpp", "livecodebench", "code", "coding", "swe"),
    "math": ("gsm8k", "math"),
    "summary": ("summar", "rag", "financeqa"),
    "knowledge": ("gpqa", "qa", "stem", "humanities", "mmmu", "mmstar", "extraction", "reasoning"),
    "chat": ("mtbench", "alpaca", "sharegpt", "writing", "roleplay", "question", "multilingual",
             "translat", "creative", "explain", "sonnet", "speedbench", "tool"),
}  # fmt: skip
"""Words of a task's name by kind of text; the first kind that has one of them counts."""
METHODS = {"medusa-1 heads": "medusa", "suffix decoding": "suffix"}
WITHOUT = ("mtp, p-min 0.6", "mtp, p-min 0.85", "quantspec", "dspark", "dfly")
"""Methods that count confident drafts alone, or that no technique stands for."""
TP = {"qwen3-30b-a3b": 4, "kimi-k2": 8, "llama3.1-8b": 1}
"""Cards of the rows of drafts.csv, which do not say: those at which their run without drafts is as
fast as predicted."""
RELEASED = {"kimi-k2": "fp8-block"}
ENGINES = {"vLLM": "vllm", "HF transformers": "hf-eager", "TensorRT-LLM": "trtllm"}
SEQUENCE = "drafts.sequence_s"
NAMES = ("drafts.draft_s", "drafts.round_s", "drafts.tree_s", "drafts.shared_experts", SEQUENCE)
UNITS = (1e-4, 1e-3, 1e-3, 1.0, 1e-5)
WIDEST = "drafts.widest"
SHARED = "drafts.shared_experts"
"""What the texts have in common whatever the engine: told by the engine with most rows."""


def main() -> None:
    folder = Path(sys.argv[1]) / "measured"
    accepted = [r for r in _read(folder / "acceptance.csv") if r["method"] not in WITHOUT]
    drafts = _read(folder / "drafts.csv")
    parallel = [r for r in drafts if r["source"] == "vllm-p-eagle"]
    drafts = [r for r in drafts if r["source"] == "specbundle" and r["kvsim_model"]]
    speedups = [r for r in _read(folder / "engines.csv") if _drafts(r)]
    if "--write" in sys.argv:
        LIBRARY.write_text(_library_text(_summaries(accepted, speedups)))
        cases = {"sglang": _sglang(drafts)}
        for engine, name in ENGINES.items():
            cases[name] = [_engine_case(r) for r in speedups if r["engine"] == engine]
        cases["vllm"] += _parallel(parallel, accepted)
        # Spec-Bench's loops are its own, over the kernels of either
        cases["hf-fa2"] = [replace(c, engine="hf-fa2") for c in cases["hf-eager"]]
        shared: dict[str, float] = {}
        for name, some in cases.items():
            known = shared if _tells(SHARED, some) else {}
            numbers = fit_rounds(some, name, known | serial(name))
            _write_stack(name, numbers, some, known)
            shared = shared or {SHARED: numbers[SHARED]}
        return
    print_errors(_sglang(drafts), speedups, _parallel(parallel, accepted))


def _read(place: Path) -> list[Row]:
    with place.open(newline="") as file:
        return list(csv.DictReader(file))


def _drafts(row: Row) -> bool:
    name = row["technique"].partition(":")[0]
    return row["table"] == "speedup" and name in ("eagle", "draft", "ngram", "mtp", "medusa")


# the library


def kind_of(task: str) -> str:
    """Return the kind of text that a task's name stands for.

    Parameters
    ----------
    task : as a page writes it; empty where it says nothing.
    """
    words = task.lower()
    return next((k for k, some in KINDS.items() if any(w in words for w in some)), "mixed")


def _points(row: Row) -> list[tuple[int, float]]:
    """Tokens accepted per round by drafts per round: (drafts, accepted)."""
    if row["by_position"]:
        shares = [float(x) for x in row["by_position"].split(";")]
        return [(i + 1, sum(shares[: i + 1])) for i in range(len(shares))]
    if not row["drafts"].isdigit():
        return []
    drafts = int(row["drafts"])
    if row["tokens_per_round"]:
        return [(drafts, float(row["tokens_per_round"]) - 1.0)]
    return [(drafts, drafts * float(row["accept_rate"]))] if row["accept_rate"] else []


def _shape(row: Row) -> str:
    if row["method"].startswith("medusa"):
        return "heads"
    if row["shape"].startswith("tree"):
        return "tree"
    return {"dflash": "block", "p-eagle": "parallel"}.get(row["method"], "chain")


def _summaries(rows: Sequence[Row], speedups: Sequence[Row]) -> list[Row]:
    """Two numbers per method, model, kind of text and shape; ``kept`` is the method's own."""
    groups: dict[tuple[str, ...], list[tuple[int, float]]] = defaultdict(list)
    counts: dict[tuple[str, ...], set[int]] = defaultdict(set)
    sources: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for i, r in enumerate([*rows, *map(_from_speedup, speedups)]):
        heat = "greedy" if r["temperature"] in ("", "0") else f"temperature {r['temperature']}"
        method = METHODS.get(r["method"], r["method"])
        model = r["kvsim_model"] or r["target"]
        key: tuple[str, ...] = (method, model, kind_of(r["task"]), heat, _shape(r))
        points = _points(r)
        if points and method:
            groups[key] += points
            counts[key].add(i)
            sources[key].add(r["source"])
    for key in [k for k, points in groups.items() if len(points) == 1]:  # a row is no summary
        pooled = (key[0], "several models", "mixed", *key[3:])
        groups[pooled] += groups.pop(key)
        counts[pooled] |= counts.pop(key)
        sources[pooled] |= sources.pop(key)
    groups = {key: points for key, points in groups.items() if len(points) > 1}
    found = []
    for method, shape in dict.fromkeys((k[0], k[4]) for k in groups):
        mine = {k: v for k, v in groups.items() if (k[0], k[4]) == (method, shape)}
        kept = _fit_kept(list(mine.values()))
        for key, points in sorted(mine.items()):
            first = _fit_first(points, kept)
            off = [np.log((1 + a) / (1 + _sum(first, kept, n))) for n, a in points]
            drafts = sorted({n for n, _ in points})
            found.append({
                "method": key[0], "model": key[1], "task": key[2], "temperature": key[3],
                "shape": key[4], "first": f"{first:.3f}", "kept": f"{kept:.3f}",
                "spread": f"{float(np.sqrt(np.mean(np.square(off)))):.3f}",
                "rows": str(len(counts[key])),
                "drafts": str(drafts[0]) if len(drafts) == 1 else f"{drafts[0]} to {drafts[-1]}",
                "source": " and ".join(sorted(sources[key])),
            })  # fmt: skip
    return sorted(found, key=lambda r: tuple(r.values())[:5])


def _from_speedup(row: Row) -> Row:
    """The acceptance that a row of engines.csv states, as one of acceptance.csv."""
    name, _, given = row["technique"].partition(":")
    settings = dict(item.split("=") for item in given.split(",")) if given else {}
    known = name in ("draft", "ngram")
    return {
        "method": name if known else "", "kvsim_model": row["model"], "target": "", "task": "mixed",
        "temperature": "", "shape": "chain", "drafts": settings.get("gamma", ""), "by_position": "",
        "tokens_per_round": "", "accept_rate": settings.get("acceptance", ""),
        "source": row["source"],
    }  # fmt: skip


def _sum(first: float, kept: float, drafts: int) -> float:
    return float(position_shares(first, kept, drafts).sum())


def _fit_first(points: Sequence[tuple[int, float]], kept: float) -> float:
    grid = np.linspace(0.02, 1.0, 197)
    off = [[np.log((1 + a) / (1 + _sum(f, kept, n))) for n, a in points] for f in grid]
    return float(grid[np.argmin(np.square(off).sum(axis=1))])


def _fit_kept(groups: Sequence[Sequence[tuple[int, float]]]) -> float:
    """The factor that fits all groups of a method best; 1 where each has one number of drafts."""
    if all(len({n for n, _ in points}) == 1 for points in groups):
        return 1.0
    grid = np.linspace(0.7, 1.1, 41)

    def misfit(kept: float) -> float:
        total = 0.0
        for points in groups:
            first = _fit_first(points, kept)
            total += sum(np.log((1 + a) / (1 + _sum(first, kept, n))) ** 2 for n, a in points)
        return total

    return float(min(grid, key=misfit))


def _library_text(rows: Sequence[Row]) -> str:
    lines = [",".join(rows[0])] + [
        ",".join(f'"{v}"' if "," in v else v for v in r.values()) for r in rows
    ]
    return "\n".join(lines) + "\n"


# rounds


@frozen
class Case:
    """A measured speed-up: what ran, and the group that it is held out with."""

    model: str
    card: str
    technique: str
    tokens: float  # per round
    speedup: float
    group: str
    tp: int = 1
    batch: int = 1
    prompt: int = 256
    generate: int = 256
    weights: str = "fp16"
    engine: str = ""
    task: str = "mixed"
    over: tuple[str, ...] = ("full",)  # the speed-up is over the best of them
    outside: float = 0.0  # share of the run without drafts in which nothing is decoded

    def of_run(self, decoding: float) -> float:
        """Speed-up of the whole run by that of decoding: prompts are read no sooner."""
        return 1.0 / (self.outside + (1.0 - self.outside) / decoding)


def _sglang(rows: Sequence[Row]) -> list[Case]:
    """Rows of drafts.csv; lengths are not said, and 512 of each are taken.

    Rates are of whole runs. The task on which a model is quickest without drafts, one of long
    answers, stands for decoding alone; what others are slower by is taken as spent elsewhere.
    """
    found = []
    best: dict[str, float] = defaultdict(float)
    for r in rows:
        best[r["kvsim_model"]] = max(best[r["kvsim_model"]], float(r["baseline_value"]))
    for r in rows:
        gamma, tokens = int(r["drafts"]), float(r["tokens_per_round"])
        width = int(r["shape"].partition("topk=")[2][:1] or 1)
        verify = int(r["shape"].rpartition("; ")[2].split()[0])
        share = (tokens - 1) / gamma
        technique = f"eagle3:gamma={gamma},acceptance={share:.4f},width={width},verify={verify}"
        model = r["kvsim_model"]
        found.append(Case(
            model, r["card"], technique, tokens, float(r["speedup"]), model, TP[model],
            int(r["concurrency"]), 512, 512, RELEASED.get(model, "fp16"), "sglang",
            kind_of(r["task"]), outside=1 - float(r["baseline_value"]) / best[model],
        ))  # fmt: skip
    return found


def _engine_case(row: Row) -> Case:
    technique, tokens = spell(row), 1.0
    t = parse(technique)
    tokens = t.tokens_per_round
    weights = {"released": "fp16"}.get(row["weights"], row["weights"])
    return Case(
        row["model"], row["card"], technique, tokens, float(row["value"]),
        f"{row['card']} {row['model']}", int(row["tp"]), 1, int(row["prompt"]),
        int(row["generate"]), weights, stack_name(row),
    )  # fmt: skip


def _parallel(rows: Sequence[Row], accepted: Sequence[Row]) -> list[Case]:
    """P-EAGLE over the best EAGLE-3 chain, tokens per round from the same page."""
    tokens = {(r["method"], r["task"], r["drafts"]): float(r["tokens_per_round"])
              for r in accepted if r["source"] == "vllm-p-eagle"}  # fmt: skip
    found = []
    for r in rows:
        share = {k[::2]: (t - 1) / int(k[2]) for k, t in tokens.items() if k[1] == r["task"]}
        over = tuple(f"eagle3:gamma={g},acceptance={share['eagle3', g]:.4f}" for g in "37")
        technique = f"p-eagle:gamma=7,acceptance={share['p-eagle', '7']:.4f}"
        found.append(Case(
            r["kvsim_model"], r["card"], technique, tokens["p-eagle", r["task"], "7"],
            float(r["speedup"]), "b200 p-eagle", 1, int(r["concurrency"]), 512, 512, "mxfp4",
            "vllm", over=over,
        ))  # fmt: skip
    return found


def stack_name(row: Row) -> str:
    """Return the stack of a row of engines.csv: its engine's at its version.

    Parameters
    ----------
    row : of engines.csv.
    """
    name = ENGINES[row["engine"]]
    return f"vllm-{row['engine_version'].split()[0]}" if name == "vllm" else name


def spell(row: Row) -> str:
    """Return the technique of a row of engines.csv, as what its page really ran.

    Spec-Bench drafts with vicuna-68m, and its EAGLE is a tree of 25 tokens, five deep.
    """
    text = row["technique"].replace("smollm2-135m", "vicuna-68m")
    if row["source"] == "spec-bench" and text.startswith("eagle:"):
        return text + f",width=5,verify=26,tokens={load_model(row['model']).vocab}"
    return text


def make_deployment(case: Case, numbers: Mapping[str, float]) -> Deployment:
    """Return where a case ran, its engine's rounds with other numbers.

    Parameters
    ----------
    case : the measured speed-up.
    numbers : of the stack by key.
    """
    stack = with_numbers(load_stack(case.engine).for_gpu(case.card), numbers)
    return Deployment(
        load_model(case.model), load_hardware(case.card), stack, case.weights, case.tp
    )


def predict_speedup(case: Case, numbers: Mapping[str, float]) -> float:
    """Predict the speed-up of the whole run over one without drafts.

    Parameters
    ----------
    case : what ran.
    numbers : of the stack's rounds by key.
    """
    return case.of_run(_decoding_speedup(case, numbers))


def _decoding_speedup(case: Case, numbers: Mapping[str, float]) -> float:
    d, batch = make_deployment(case, numbers), np.array([float(case.batch)])
    took, *others = (
        float(Prediction(parse(t), d, batch, case.prompt, case.generate, contexts=2).tpot_s[0])
        for t in (case.technique, *case.over)
    )
    return min(others) / took


def fit_rounds(
    cases: Sequence[Case], engine: str, known: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Fit what rounds cost in an engine to measured speed-ups.

    Parameters
    ----------
    cases : measured speed-ups of one engine.
    engine : name of its stack.
    known : numbers that another engine's rows tell.
    """
    known = dict(known or {})
    names = [n for n in NAMES if n not in known and _tells(n, cases)]
    units = [UNITS[NAMES.index(n)] for n in names]
    distinct = _distinct(cases)

    def misfit(x: np.ndarray) -> np.ndarray:
        numbers = known | {n: float(v * u) for n, v, u in zip(names, x, units, strict=True)}
        found = {key: _decoding_speedup(c, numbers) / c.tokens for key, c in distinct.items()}
        predicted = [c.of_run(found[_key(c)] * c.tokens) for c in cases]
        return np.log([p / c.speedup for p, c in zip(predicted, cases, strict=True)])

    high = [0.99 if n.endswith("experts") else np.inf for n in names]
    start = [0.3 if n.endswith("experts") else 0.5 for n in names]
    fitted = least_squares(
        misfit, start, bounds=(0.0, high), loss="soft_l1", f_scale=0.05, diff_step=0.02, max_nfev=25
    )
    return known | {n: float(v * u) for n, v, u in zip(names, fitted.x, units, strict=True)}


def serial(engine: str) -> dict[str, float]:
    """Return the host's time per sequence, where load tests without drafts tell it.

    Parameters
    ----------
    engine : name of its stack.
    """
    told = load_stack(engine).server.token
    return {SEQUENCE: told} if told else {}


def _tells(name: str, cases: Sequence[Case]) -> bool:
    """Whether rows say anything about a number."""
    if name.endswith("experts"):
        return any(load_model(c.model).experts for c in cases)
    if name == SEQUENCE:
        return len({c.batch for c in cases}) > 1
    trees = [getattr(parse(c.technique).drafting, "branching", False) for c in cases]
    return any(trees) if name.endswith("tree_s") else True


def _key(case: Case) -> tuple[str, ...]:
    """What the time of a round depends on, up to how many tokens it yields."""
    head, _, rest = case.technique.partition("acceptance=")
    return case.model, case.card, head, rest.partition(",")[2], str(case.batch), *case.over


def _distinct(cases: Sequence[Case]) -> dict[tuple[str, ...], Case]:
    """One case for each kind of round, that with a median of tokens."""
    groups: dict[tuple[str, ...], list[Case]] = defaultdict(list)
    for c in cases:
        groups[_key(c)].append(c)
    return {
        key: sorted(some, key=lambda c: c.tokens)[len(some) // 2] for key, some in groups.items()
    }


def _write_stack(
    name: str, numbers: Mapping[str, float], cases: Sequence[Case], known: Mapping[str, float]
) -> None:
    """Put fitted numbers into a stack's file, in place of those of an earlier fit."""
    place = Path(f"kvsim/hwprofiles/stacks/{name}.toml")
    given = place.read_text().splitlines()
    lines = [x for x in given if not x.startswith('"drafts.') or WIDEST in x]
    if "[drafts]" in lines:
        start = lines.index("[drafts]")
        stop = next(i for i in range(start + 1, len(lines)) if lines[i].startswith("["))
        lines[start:stop] = []
    at = lines.index("[source]")
    numbers = {key: round(value, 8) for key, value in numbers.items() if round(value, 8)}
    told = [f"{key.partition('.')[2]} = {value:.4g}" for key, value in numbers.items()]
    told += [x for x in given if x.startswith("widest =")]
    lines[at:at] = ["[drafts]", *told, ""]
    cards = ", ".join(dict.fromkeys(c.card for c in cases))
    models = ", ".join(dict.fromkeys(c.model for c in cases))
    said = f"fitted on {date.today()} to {len(cases)} speed-ups of drafts on {cards}: {models}"
    taken = "as in sglang.toml, where 150 rows tell it: a matter of texts, not of engines"
    own = {
        SEQUENCE: "the host's time per sequence, which nothing hides with drafts: the next pass is "
        "scheduled once it is known what was accepted" + ("" if serial(name) else "; " + said)
    }
    own |= dict.fromkeys(known, taken)
    lines += [f'"{key}" = "{own.get(key, said)}"' for key in numbers]
    place.write_text("\n".join(lines) + "\n")


# errors


def print_errors(sglang: Sequence[Case], speedups: Sequence[Row], parallel: Sequence[Case]) -> None:
    """Print how far predictions are off, rows held out by model.

    Parameters
    ----------
    sglang : rows of drafts.csv.
    speedups : rows of engines.csv.
    parallel : P-EAGLE's rows.
    """
    held = _held_out(sglang, "sglang", serial("sglang"))
    _print("drafts.csv, acceptance given, by model", sglang, held)
    _print("  as shipped", sglang, [predict_speedup(c, {}) for c in sglang])
    others = [_with_others(c) for c in sglang]
    _print(
        "  acceptance of other models, same kind",
        sglang,
        [predict_speedup(c, {}) for c, _ in others],
    )
    inside = [
        abs(np.log(c.speedup / predict_speedup(o, {}))) < 1.2816 * s
        for c, (o, s) in zip(sglang, others, strict=True)
    ]
    print(f"  inside the 80 % of the library's spread: {np.mean(inside):.0%}")
    _print(
        "vllm-p-eagle over EAGLE-3, as shipped",
        parallel,
        [predict_speedup(c, {}) for c in parallel],
    )
    losses = [(p, c.speedup) for p, c in zip(held, sglang, strict=True) if c.speedup < 0.995]
    print(f"  losses said as losses: {sum(p < 1 for p, _ in losses)} of {len(losses)}")
    shipped = []
    for r in speedups:
        case = _engine_case(r)
        shipped.append(predict_speedup(case, {}))
        print(
            f"    {case.engine:9s} {case.card:10s} {case.model:12s} {case.technique[:58]:58s} "
            f"{shipped[-1]:5.2f} for {case.speedup:5.2f}"
        )
    cases = [_engine_case(r) for r in speedups]
    _print("engines.csv, all methods, as shipped", cases, shipped)
    ordered, unseen = [], []
    shared = {SHARED: load_stack("sglang").drafts.shared_experts}
    for engine in ENGINES.values():
        some = [c for c in cases if c.engine.partition("-0")[0] == engine]
        ordered += some
        more = [*some, *parallel] if engine == "vllm" else some
        unseen += _held_out(more, engine, shared | serial(engine))[: len(some)]
    _print("engines.csv, by card and model", ordered, unseen)


def _with_others(case: Case) -> tuple[Case, float]:
    """A case with the acceptance that other models have on its kind of text, and its spread."""
    t = parse(case.technique)
    settings, shape = t.settings, str(getattr(t.drafting, "shape", ""))
    found = find_accepted("eagle3", settings["gamma"], case.task, shape=shape, without=case.model)
    assert found is not None
    rate = sum(found.shares) / settings["gamma"]
    head, _, rest = case.technique.partition("acceptance=")
    technique = f"{head}acceptance={rate:.4f},{rest.partition(',')[2]}"
    return replace(case, technique=technique), found.spread


def _held_out(
    cases: Sequence[Case], engine: str, known: Mapping[str, float] | None = None
) -> list[float]:
    """Each group by the rows of the others; a group alone by an engine without such times."""
    fits = {}
    for g in dict.fromkeys(c.group for c in cases):
        others = [c for c in cases if c.group != g]
        fits[g] = fit_rounds(others, engine, known) if others else dict(known or {})
    for g, numbers in fits.items():
        print(f"    without {g}: " + ", ".join(f"{k} {v:.3g}" for k, v in numbers.items()))
    return [predict_speedup(c, fits[c.group]) for c in cases]


def _print(title: str, cases: Sequence[Case], predicted: Sequence[float]) -> None:
    off = np.abs(np.array(predicted) / np.array([c.speedup for c in cases]) - 1)
    print(
        f"{title}: {len(cases)} rows, median {np.median(off):.1%}, p90 {np.quantile(off, 0.9):.1%}"
    )


if __name__ == "__main__":
    main()
