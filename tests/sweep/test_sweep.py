"""Sweeps: every point once, the same bytes whatever ran them, and what was done is kept."""

import errno
import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from kvsim.api.deployments import build_deployments
from kvsim.api.fleets import list_rentable
from kvsim.api.predictions import run_sweep
from kvsim.errors import InfeasibleError, InputError
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.options import Inputs
from kvsim.planner.fleet.offers import CapacityQuestion
from kvsim.prediction.generate import Prediction
from kvsim.sweeps.chunks import SweepChunk, compute, divide_sweep
from kvsim.sweeps.spec import Spec, read
from kvsim.sweeps.workers import (
    Bundles,
    _check,
    compute_here,
    compute_in_processes,
)
from kvsim.techniques import parse
from tests.support.commands import check, line, run
from tests.support.envelope import answer_in

SPEC = """
kind = "predict"
[grid]
model = ["smollm2-135m", "llama3-8b"]
gpu = ["a6000", "l4"]
technique = ["full", "kivi:bits=4", "offload:host_share=1", "fp8"]
batch = [1, 8, 24]
context = { from = 128, to = 8192, count = 4, spacing = "log" }
"""


def spec_of(folder: Path, text: str = SPEC) -> Path:
    place = folder / "spec.toml"
    place.write_text(text)
    return place


def asked(folder: Path, text: str = SPEC) -> Spec:
    return read(spec_of(folder, text))


def coming(spec: Spec) -> Bundles:
    return Bundles(divide_sweep(spec), spec.points)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.glob("chunk-*.parquet"))}


def test_every_point_is_what_predict_says(tmp_path: Path) -> None:
    text = SPEC.replace('"smollm2-135m", ', "") + "tp = [1, 2]\n"
    place, out = spec_of(tmp_path, text), tmp_path / "out"
    result = run("sweep", str(place), "--out", str(out))
    assert result.code == 0, result
    table = pq.read_table(out).to_pandas()
    assert len(table) == 2 * 4 * 3 * 4 * 2
    assert all(pq.ParquetFile(p).num_row_groups == 1 for p in out.glob("*.parquet"))
    plain = table[(table.gpu == "a6000") & (table.batch == 8)]
    for _, row in plain.iterrows():
        d = Deployment(load_model(row.model), load_hardware(row.gpu), load_stack("vllm"), tp=row.tp)
        p = Prediction(parse(row.technique), d, np.array([8.0]), int(row.context), 2)
        for name in ("ttft_s", "tpot_s", "gpu_bytes", "host_bytes"):
            assert row[name] == pytest.approx(float(getattr(p, name)[0]), rel=1e-9), name
        assert row.fits == bool(p.fits[0])
    uneven = table[(table.technique == "offload:host_share=1") & (table.batch == 1)]
    assert uneven[uneven.tp == 1].reason.eq("").all() and plain.host_bytes.max() > 0


@pytest.mark.parametrize("takers", [1, 2, 50])
def test_bundles_are_large_first_and_small_last(takers: int, tmp_path: Path) -> None:
    text = SPEC.replace("[1, 8, 24]", "{ from = 1, to = 1000, count = 1000 }")
    spec = asked(tmp_path, text.replace("count = 4", "count = 400"))
    chunks = list(divide_sweep(spec))
    found = list(Bundles(iter(chunks), spec.points, takers))
    assert [c.index for bundle in found for c in bundle.chunks] == list(range(len(chunks)))
    assert 24 <= len(found) < len(chunks)
    sizes = [sum(c.points for c in bundle.chunks) for bundle in found]
    largest = max(c.points for c in chunks)
    left = spec.points
    for size in sizes[:-1]:
        enough = min(max(left // (4 * takers), 2**14), 2**18)
        assert enough <= size < enough + largest
        left -= size


def test_dask_computes_the_same(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    from kvsim.sweeps.workers import compute_on_cluster, connect

    spec = asked(tmp_path)
    local = distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
    )
    with local, connect(local.scheduler_address) as client:
        found = dict(compute_on_cluster(coming(spec), client))
    assert found == dict(compute_here(coming(spec)))


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "tls://127.0.0.1:9", "5KB", "a://b"])
def test_a_cluster_that_is_not_there_leaves_nothing(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr("kvsim.sweeps.workers.CONNECT_TIMEOUT_S", 0.5)
    text = '[grid]\nmodel = ["llama2-7b"]\ngpu = ["a6000"]\ntechnique = ["full"]\n'
    (tmp_path / "s.toml").write_text(text + "batch = [1]\ncontext = [8]\n")
    with pytest.raises(InputError, match=r"scheduler: .* cannot be reached"):
        run_sweep(spec=tmp_path / "s.toml", out=tmp_path / "out", scheduler=address)
    assert not (tmp_path / "out").exists()


def test_a_lost_worker_loses_only_what_it_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = asked(tmp_path)
    pools: list[ProcessPoolExecutor] = []

    class Watched(ProcessPoolExecutor):
        def __init__(self, workers: int, mp_context: BaseContext) -> None:
            super().__init__(workers, mp_context=mp_context)
            pools.append(self)

    monkeypatch.setattr("kvsim.sweeps.workers.ProcessPoolExecutor", Watched)

    def kill() -> None:
        while not (pools and pools[0]._processes):
            time.sleep(0.01)
        os.kill(next(iter(pools[0]._processes)), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    found = list(compute_in_processes(coming(spec), 2))
    killer.join()
    assert len(pools) == 2  # a new one took over
    assert dict(found) == dict(compute_here(coming(spec)))
    assert len(found) == 16


def test_resume_computes_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, out = str(spec_of(tmp_path)), tmp_path / "out"
    assert run("sweep", place, "--out", str(out)).code == 0
    whole = contents(out)
    for name in list(whole)[3:7]:
        (out / name).unlink()
    computed: list[int] = []

    def noted(chunk: SweepChunk) -> bytes:
        computed.append(chunk.index)
        return compute(chunk)

    monkeypatch.setattr("kvsim.sweeps.workers.compute", noted)
    check(line("sweep", place, "--out", str(out)), "has a sweep already|--resume")
    assert run("sweep", place, "--out", str(out), "--resume").code == 0
    assert contents(out) == whole
    assert computed == [3, 4, 5, 6]
    spec_of(tmp_path, SPEC.replace("24", "32"))
    check(line("sweep", place, "--out", str(out), "--resume"), "another sweep")


SPREADS = " ".join(f"{name}_{part}_s" for name in ("ttft", "tpot") for part in ("p50", "p99"))
COMMANDS: dict[str, tuple[dict[str, str | float], str, str]] = {
    "simulate": (
        {"model": "llama3-8b", "gpu": "l40s", "technique": "full", "trace": "sample:chat",
         "rate": 0.5, "tp": 2, "replicas": 2},
        "--rate 0.5x --ttft 2s --tpot 100ms",
        f"finished refused {SPREADS} latency_p99_s good_share goodput_per_s output_tok_s "
        "busy_share kv_peak_share prefix_hit_share preemptions usd",
    ),
    "plan": (
        {"model": "llama3-8b", "gpu": "l40s", "prompt": 1024, "generate": 32, "tp": 2},
        "--offline --ttft 10s --tpot 100ms",
        "batch ttft_s tpot_s output_tok_s gpu_bytes host_bytes usd_per_million_tokens",
    ),
    "capacity": (
        {"model": "llama3-8b", "gpu": "h100", "trace": "sample:chat"},
        "--rate 1x --ttft 2s --tpot 100ms",
        "replicas gpus usd_per_hour ttft_s tpot_s likelihood",
    ),
}  # fmt: skip
"""Of a kind, the axes of a grid of one point, the options that are its defaults, and results."""


def figure(answer: dict[str, Any], name: str) -> object:
    """A result of a command by the name of a sweep's column."""
    if answer["command"].startswith("kvsim plan"):
        return answer["predicted"][name]
    answer |= {"replicas": sum(x["replicas"] for x in answer.get("fleet", ()))}
    answer |= {"likelihood": answer.get("certainty", {}).get("both_met")}
    if "fleet" in answer and name in ("ttft_s", "tpot_s"):
        return answer["simulated"][name]["at_target"]
    spread, _, part = name.removesuffix("_s").rpartition("_p")
    return answer[f"{spread}_s"][f"p{part}"] if part.isdigit() else answer[name]


def row_of(kind: str, axes: dict[str, str | float], folder: Path) -> dict[str, Any]:
    """The row of a sweep of one point."""
    grid = "".join(f"{name} = {[value]!r}\n" for name, value in axes.items())
    place, out = spec_of(folder, f'kind = "{kind}"\n[grid]\n{grid}'), folder / "out"
    assert run("sweep", str(place), "--out", str(out)).code == 0
    (row,) = pq.read_table(out).to_pylist()
    return dict(row)


@pytest.mark.parametrize("kind", ["simulate", "capacity"])
def test_a_rate_that_leaves_no_request_is_a_row_that_says_so(kind: str, tmp_path: Path) -> None:
    row = row_of(kind, COMMANDS[kind][0] | {"rate": 1e-9}, tmp_path)
    assert row["reason"].startswith("rate 1e-09: leaves none of")


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_row_is_what_the_command_says(kind: str, tmp_path: Path) -> None:
    axes, defaults, names = COMMANDS[kind]
    row = row_of(kind, axes, tmp_path)
    options = {"--gpus" if (kind, k) == ("capacity", "gpu") else f"--{k}": v
               for k, v in axes.items() if k != "rate"}  # fmt: skip
    words = [word for pair in options.items() for word in map(str, pair)]
    answer = answer_in(run(kind, *words, *defaults.split(), "--json").out)
    said = {name: figure(answer, name) for name in names.split()}
    assert {name: row[name] for name in said} == pytest.approx(said, rel=1e-9)
    assert row["reason"] == ""


@pytest.mark.parametrize("gpus", [("h100",), ("l4", "l40s", "h100"), ("l40s", "h200")])
def test_a_plan_a_sweep_and_capacity_ask_the_same_prices(
    gpus: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[CapacityQuestion] = []

    def refuse(question: CapacityQuestion) -> None:
        asked.append(question)
        raise InfeasibleError("only the prices are looked at")

    monkeypatch.setattr("kvsim.planner.fleet.answer.make_capacity", refuse)
    common = {"model": "llama3.1-8b", "ttft": 2, "tpot": 0.1}
    plan = Inputs("plan", common | {"gpu": ",".join(gpus), "trace": "sample:chat"})
    fleet = Inputs("capacity", common | {"gpus": ",".join(gpus), "trace": "sample:chat"})
    place = spec_of(
        tmp_path,
        f'kind = "capacity"\n[grid]\nmodel = ["llama3.1-8b"]\ngpu = ["{"+".join(gpus)}"]\n'
        'trace = ["sample:chat"]\n',
    )
    for chunk in divide_sweep(read(place)):
        compute(chunk)
    planned = {d.hardware.name: d.hardware.price for d in build_deployments(plan)}
    rented = {x.gpu: x.price / x.deployment.gpus for x in list_rentable(fleet)[0]}
    swept = {x.gpu: x.price / x.deployment.gpus for x in asked[0].rentable}
    assert list(planned) == list(gpus)
    assert planned == pytest.approx(rented) and planned == pytest.approx(swept)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('kind = "predict"', 'kind = "guess"'), "kind|predict"),
        (('kind = "predict"', "colour = 1"), "key|colour"),
        (("[grid]", "[grind]"), "grind"),
        (("gpu =", "gpus ="), "axis|gpus|gpu"),
        (('model = ["smollm2-135m", "llama3-8b"]\n', ""), "model is missing"),
        (('"smollm2-135m"', '"smollm9-7b"'), "unknown model"),
        (('"l4"', '"l5000"'), "unknown GPU"),
        (('"full"', '"fullest"'), "fullest"),
        (("bits=4", "bits=5x"), "kivi"),
        (("batch = [1, 8, 24]", "batch = [0]"), "batch|1 or more"),
        (("batch = [1, 8, 24]", "batch = [1.5]"), "batch|whole"),
        (("batch = [1, 8, 24]", 'batch = ["many"]'), "batch|numbers"),
        (("batch = [1, 8, 24]", "batch = [true]"), "batch|'True'|numbers"),
        (("batch = [1, 8, 24]", "batch = [1e19]"), "batch|'1e+19'|expected numbers"),
        (("batch = [1, 8, 24]", "batch = [1000000001]"), "batch|1 or more"),
        (("batch = [1, 8, 24]", "batch = []"), "batch|no values"),
        (('spacing = "log"', 'spacing = "wide"'), "spacing|log"),
        (('spacing = "log"', "steps = 3"), "steps|spacing"),
        (("count = 4", "count = 0"), "count|whole number"),
        (("count = 4", "count = true"), "count|whole number"),
        (("count = 4", "count = 1000001"), "count|whole number"),
        (("count = 4", "count = 900000"), ""),
        (("[grid]", "[grid"), "TOML"),
    ],
)
def test_bad_specs_are_one_line(change: tuple[str, str], words: str, tmp_path: Path) -> None:
    assert change[0] in SPEC
    text = SPEC.replace(*change)
    if not words:
        text, words = text.replace("[1, 8, 24]", "{from=1, to=100000, count=100000}"), "at most"
    message = line("sweep", str(spec_of(tmp_path, text)), "--out", str(tmp_path / "out"))
    check(message, words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--workers", "0"), "--workers|1 to"),
        (("--workers", "two"), "--workers|whole number"),
        (
            ("--workers", "2", "--scheduler", "tcp://127.0.0.1:9"),
            "give either --workers or --scheduler, not both",
        ),
        (("--scheduler", "tcp://127.0.0.1:9"), "--scheduler|cannot be reached"),
        (("--scheduler", "nonsense:"), "--scheduler|cannot be reached"),
    ],
)
def test_bad_options_are_one_line(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr("kvsim.sweeps.workers.CONNECT_TIMEOUT_S", 0.5)
    place = str(spec_of(tmp_path))
    check(line("sweep", place, "--out", str(tmp_path / "out"), *arguments), words)


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({}, "has no workers; start some with dask worker"),
        ({"tcp://a:1": None}, "worker tcp://a:1 cannot import kvsim; install kvsim"),
        ({"tcp://a:1": "0.0.1"}, "worker tcp://a:1 has kvsim 0.0.1; install kvsim"),
    ],
)
def test_wrong_workers_are_named(versions: dict[str, str | None], words: str) -> None:
    """benchmarks/sweeps.py does the same with real ones."""

    class Client:
        def run(self, _: object) -> dict[str, str | None]:
            return versions

    with pytest.raises(InputError, match=words):
        _check(Client(), "tcp://head:8786")


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Path, __: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    place, out = str(spec_of(tmp_path)), tmp_path / "out"
    with monkeypatch.context() as changed:
        changed.setattr(Path, "write_bytes", full)
        check(line("sweep", place, "--out", str(out)), "chunk-0000000|disk full|make room")
    assert not contents(out) and not list(out.glob(".kvsim-*"))
    assert run("sweep", place, "--out", str(out), "--resume").code == 0


def test_folder_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter.txt").write_text("x")
    place = str(spec_of(tmp_path))
    check(line("sweep", place, "--out", str(tmp_path / "out")), "other files")


def test_the_page_has_the_best_of_the_rows(tmp_path: Path) -> None:
    out, page = tmp_path / "out", tmp_path / "page.html"
    result = run("sweep", str(spec_of(tmp_path)), "--out", str(out), "--report", str(page))
    assert result.code == 0, result
    table = pq.read_table(out).to_pandas()
    able = table[table.fits.fillna(False).astype(bool)]
    text = page.read_text(encoding="utf-8")
    assert f"Of {len(table):,} points {len(able):,} have a result" in text
    lacking = able.technique.astype(str).map(lambda t: bool(parse(t).needs_kernel("vllm")))
    assert lacking.any() and sum(~lacking) >= 20
    best = sorted(able[~lacking].decode_tok_s, reverse=True)[:20]
    assert all(f'data-value="{float(rate)!r}"' in text for rate in best)
    assert "--resume</code>" in text and text.count('data-for="picture') >= 2
