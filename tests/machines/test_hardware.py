"""Hardware profiles and software stacks: what is shipped, and what bad files are told."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from math import isfinite
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvsim.console import run_on_command_line
from kvsim.errors import InputError
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import KERNEL_CLASSES, STANDS_FOR, Stack
from kvsim.machines.profiles import (
    hardware_names,
    load_hardware,
    load_stack,
    number_of,
    stack_names,
)
from kvsim.machines.schema import LINK_NAMES, STACK_FILE, STACK_NUMBERS
from kvsim.models.configs import load_model

SHIPPED = Path(str(files("kvsim") / "hwprofiles"))
TOLERANCE = 1.01  # of a tensor peak: data sheets round

# What a rate may be relative to fp16 with fp32 accumulation. GeForce, L40 and A10G halve only
# the latter, so their integer and fp4 rates stand at twice the ratio; L40 and A10G list less.
RATIOS = {"tf32": 0.5, "bf16": 1, "fp8": 2, "int8": 2, "int4": 4, "fp4": 4}
HALVED = ("rtx20", "rtx30", "rtx40", "rtx50", "gtx", "p40", "h20", "mi50")


def table(name: str) -> dict[str, Any]:
    """A profile's document, over that of the card it extends."""
    own = tomllib.loads((SHIPPED / f"{name}.toml").read_text())
    if "extends" not in own:
        return own
    base = table(own.pop("extends"))
    if "fp16_FLOPps" in own.get("compute", {}):
        base["compute"] = {"cpu_fp32_FLOPps": base["compute"]["cpu_fp32_FLOPps"]}
    for key in ("price", "power", "aliases", "notes"):
        base.pop(key, None)
    sources = base.pop("source")
    for key, text in own.pop("source", {}).items():
        tables = own.get(key, ())
        sources |= {f"{key}.{entry}": text for entry in tables} if tables else {key: text}
    for key, value in own.items():
        base[key] = base[key] | value if isinstance(base.get(key), dict) else value
    known = leaves(base)
    return base | {"source": {key: text for key, text in sources.items() if key in known}}


def leaves(document: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys, by recursion where the loader has loops."""
    found: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, dict):
            found |= {f"{key}.{inner}": leaf for inner, leaf in leaves(value).items()}
        else:
            found[key] = value
    return found


def test_profile_loads_and_is_sound() -> None:
    for name in hardware_names():
        gpu = load_hardware(name)
        stated = table(name)
        sources = stated.pop("source")
        numbers = {k: v for k, v in leaves(stated).items() if isinstance(v, int | float)}
        assert set(sources) == set(numbers)
        assert "price" not in stated  # in prices.csv
        assert {k: v for k, v in gpu.sources.items() if not k.startswith("price")} == sources
        assert set(gpu.links) == set(LINK_NAMES)
        assert {"fp32", "fp16"} <= set(gpu.flops)
        assert all(isfinite(x) and x > 0 for x in gpu.flops.values())
        assert gpu.gpu_memory == stated["memory"]["gpu_capacity_B"]
        for link in ("h2d", "d2h"):
            achieved = stated[link]["bandwidth_Bps"]
            assert achieved <= stated[link].get("line_rate_Bps", achieved)
        for text in (gpu.title, *gpu.notes, *sources.values()):
            assert "\n" not in text and "/shared" not in text


def test_rates_are_dense() -> None:
    for name in [n for n in hardware_names() if "sm" in table(n)["compute"]]:
        gpu, compute = load_hardware(name), table(name)["compute"]
        cycles = compute["sm"] * compute["clock_Hz"]
        peak = cycles * compute["tensor_FLOP_per_clock_sm"]
        assert 0.86 * peak < gpu.flops["fp16"] <= TOLERANCE * peak
        for dtype, ratio in RATIOS.items():
            whole = 2 if name.startswith(HALVED) and dtype in ("int8", "int4", "fp4") else 1
            assert gpu.flops.get(dtype, 0) <= TOLERANCE * whole * ratio * peak, dtype
        # 128 lanes of two operations; GB200's clock is inferred from its tensor rate, hence 3 %.
        assert gpu.flops["fp32"] <= 1.03 * 256 * cycles


def test_enough_profiles_with_distinct_names() -> None:
    names = hardware_names()
    assert len(names) >= 30
    every = [*names, *(alias for name in names for alias in table(name).get("aliases", []))]
    assert len(every) == len(set(every))
    for name in names:
        for alias in table(name).get("aliases", []):
            assert load_hardware(alias) == load_hardware(name)


@pytest.mark.parametrize(
    ("name", "mib"),
    [("a40", 46068), ("h100", 81559), ("a6000", 49140), ("l4", 23034), ("rtx4090", 24564)],
)
def test_capacity_is_what_the_driver_reports(name: str, mib: int) -> None:
    assert load_hardware(name).gpu_memory == mib * 2**20


def test_stack_states_what_it_has_and_no_more() -> None:
    for name in stack_names():
        stack = load_stack(name)
        document = tomllib.loads((SHIPPED / "stacks" / f"{name}.toml").read_text())
        sources, free = document.pop("source", {}), document.pop("free", {})
        stated = leaves(document)
        assert len(free) <= 4 and set(stack.free) == set(free)
        numbers = {k for k, v in stated.items() if isinstance(v, int | float) and v is not False}
        assert numbers - STACK_FILE.flags <= set(sources)
        assert set(KERNEL_CLASSES) <= set(stack.kernels) <= {*KERNEL_CLASSES, *STANDS_FOR}
        assert isinstance(stack.offload.resident_layers, int)
        assert all(text in stack.source for text in sources.values())
        if "extends" not in document:  # a key that says what an ideal stack does is left out
            ideal = {
                key: number_of(Stack("ideal"), key) for key in STACK_NUMBERS if key not in free
            }
            assert not [key for key, value in ideal.items() if stated.get(key) == value]


IDEAL = """
time.stage_overlap 1, time.pointwise_launches 5, time.pointwise_passes 1,
attention.score_memory_B 8, packed_cache.passes 1, selection.index_bytes 4, offload.overlap 1,
offload.weight_buffers 2, sums.ring_share 1, sums.popularity 1,
weights.copies 1, memory.prefill_chunk_tokens 1e18, memory.activation_passes 1,
memory.logit_bytes 4
"""
"""What an ideal stack has; every other number is 0."""


def test_ideal_stack_is_the_default() -> None:
    stated = {name: float(value) for name, value in map(str.split, IDEAL.split(","))}
    found = {key: number_of(Stack("ideal"), key) for key in STACK_NUMBERS}
    assert {key: value for key, value in found.items() if value} == stated
    replayed = Deployment(load_model("llama3-8b"), load_hardware("h100"), load_stack("hf")).replayed
    assert not any(kernel.host for kernel in replayed.stack.kernels.values())
    assert replace(load_stack("ideal"), title="", error="", source="") == Stack("ideal")


A6000 = (SHIPPED / "a6000.toml").read_text()
FUSED = (SHIPPED / "stacks" / "fused.toml").read_text()

PRICE = "[price]\nusd_per_hour = 1.5\n"
BAD_HARDWARE = {
    "unknown key": ("sm = 84", "sms = 84", "unknown key", "compute.sm"),
    "unknown table": ("[hbm]", "[vram]", "unknown key", "hbm.bandwidth_Bps"),
    "key without a table": (
        "title =",
        "clock_Hz = 1e9\ntitle =",
        "unknown key",
        "compute.clock_Hz",
    ),
    "missing key": ("fp16_FLOPps = 154.8e12\n", "", "compute.fp16_FLOPps' is missing", "add it"),
    "missing title": ('title = "NVIDIA RTX A6000 48 GB"\n', "", "title' is missing", "string"),
    "part of a group": ("clock_Hz = 1.8e9\n", "", "compute.clock_Hz' is missing", "number"),
    "price without date": ("[source]", f"{PRICE}[source]", "price.date' is missing", "string"),
    "text for a number": ("sm = 84", 'sm = "84"', "compute.sm", "a number above 0"),
    "number for a text": ("basis = ", "basis = 3 #", "basis is 3", "'datasheet'"),
    "text for a list": ('["rtx-a6000"]', '"rtx-a6000"', "aliases", "a list of texts"),
    "not a number": ("1.8e9", "nan", "compute.clock_Hz is nan", "above 0"),
    "negative": ("sm = 84", "sm = -84", "compute.sm is -84", "above 0"),
    "negative latency": ("latency_s = 2.3e-6", "latency_s = -1.0", "h2d.latency_s", "0 or more"),
    "too large": ("sm = 84", "sm = 1" + "0" * 400, "compute.sm", "more than 1e308"),
    "GB/s": ("768.0e9", "768.0", "hbm.bandwidth_Bps is 768.0", "at least 1e6 in B/s"),
    "MiB": ("51_527_024_640", "49140", "memory.gpu_capacity_B", "at least 1e6 in bytes"),
    "no source": ('"compute.sm" =', "#", "compute.sm", "under [source]"),
    "empty source": ('"twice int8, recalled"', '""', "source of compute.int4_FLOPps", "a text"),
    "source of nothing": ('"compute.sm" =', '"compute.smm" =', "[source]", "compute.sm"),
    "sources as a list": ("[source]", "[[source]]", "source", "a table of texts"),
    "sparse rate": ("= 154.8e12", "= 309.6e12", "compute.fp16_FLOPps", "sparse rate"),
    "copy above its line": ("= 25.0e9", "= 32.0e9", "h2d.bandwidth_Bps", "line rate"),
    "malformed": ("sm = 84", "sm == 84", "not valid TOML", "line 14"),
}

OFFLOAD = "[offload]\n{}\n[memory]"
BAD_STACKS = {
    "unknown key": ("gap_s =", "gaps =", "unknown key", "time.gap_s"),
    "unknown kernel": ("[kernel.gemm]", "[kernel.gem]", "unknown key", "kernel.gemm.memory"),
    "missing error": ('error = "', '# error = "', "error' is missing", "string"),
    "efficiency above 1": ("memory = 0.80", "memory = 80", "kernel.gemm.memory", "at most 1"),
    "negative overlap": ("[memory]", OFFLOAD.format("overlap = -0.1"), "overlap", "from 0 to 1"),
    "number for a flag": ("[memory]", OFFLOAD.format("tile_sync = 0"), "tile_sync", "true or"),
    "half a layer": ("[memory]", OFFLOAD.format("resident_layers = 0.5"), "layers", "whole"),
    "less than a copy": ("[weights]", "[weights]\ncopies = 0.5", "weights.copies", "1 or"),
    "no source": ('"kernel.gemm.memory" =', "#", "kernel.gemm.memory", "under [source]"),
}


def message(load: Any, path: str | Path) -> str:
    with pytest.raises(InputError) as caught:
        load(path)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert len(text) < 400
    return text


@pytest.mark.parametrize(("old", "new", "says", "mends"), BAD_HARDWARE.values(), ids=BAD_HARDWARE)
def test_bad_profile_is_refused(tmp_path: Path, old: str, new: str, says: str, mends: str) -> None:
    path = tmp_path / "own.toml"
    assert old in A6000
    path.write_text(A6000.replace(old, new, 1))
    text = message(load_hardware, path)
    assert "own.toml" in text and says in text and mends in text


@pytest.mark.parametrize(("old", "new", "says", "mends"), BAD_STACKS.values(), ids=BAD_STACKS)
def test_bad_stack_is_refused(tmp_path: Path, old: str, new: str, says: str, mends: str) -> None:
    path = tmp_path / "own.toml"
    assert old in FUSED
    path.write_text(FUSED.replace(old, new, 1))
    text = message(load_stack, path)
    assert "own.toml" in text and says in text and mends in text


@pytest.mark.parametrize("load", [load_hardware, load_stack])
def test_unreadable_files_are_refused(load: Any, tmp_path: Path) -> None:
    assert "there is no such file" in message(load, tmp_path / "none.toml")
    (tmp_path / "folder.toml").mkdir()
    assert "is a folder" in message(load, tmp_path / "folder.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in message(load, binary)
    assert "own" in message(load, f"{tmp_path}/own\n.toml")
    assert "not a path" in message(load, "own\0.toml")
    binary.write_text("")
    assert "is missing" in message(load, binary)


def test_unknown_names_are_refused() -> None:
    assert "unknown GPU 'a600'; nearest: a6000" in message(load_hardware, "a600")
    assert "unknown engine or stack 'fuse'; nearest: fused" in message(load_stack, "fuse")
    assert "unknown GPU ''" in message(load_hardware, "")
    message(load_hardware, "x" * 1000)


def test_own_profile_loads_from_a_path(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(A6000.replace("fp16_FLOPps = 154.8e12", "fp16_FLOPps = 100e12"))
    gpu = load_hardware(path)
    assert gpu.name == "own"
    assert gpu.flops["fp16"] == 100e12


def test_keys_left_out_of_a_stack_are_ideal(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('title = "own"\nbasis = "calibrated"\nerror = "2 %"\n')
    assert load_stack(path) == Stack("own", title="own", basis="calibrated", error="2 %")


NAMED = [
    ("RTX 4090", "rtx4090"), ("NVIDIA GeForce RTX 4090", "rtx4090"), ("RTX_4090", "rtx4090"),
    ("a100-80gb", "a100-80g"), ("NVIDIA A100-SXM4-80GB", "a100-80g"), ("A100-80GB-SXM", "a100-80g"),
    ("NVIDIA A100 80GB PCIe", "a100-80g-pcie"), ("NVIDIA A100-PCIE-40GB", "a100-40g-pcie"),
    ("NVIDIA H100 80GB HBM3", "h100"), ("h100-sxm5-80gb", "h100"), ("H100 NVL", "h100-nvl"),
    ("nvidia-l4", "l4"), ("Tesla T4", "t4"), ("Tesla V100-SXM2-16GB", "v100-16g"),
    ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"), ("NVIDIA RTX A6000", "a6000"),
    ("AMD Instinct MI300X", "mi300x"), ("h200 141gb", "h200"), ("A100", "a100-80g"),
    ("V100", "v100-16g"), ("RTX 4060 Ti", "rtx4060ti-16g"),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "name"), NAMED)
def test_a_gpu_is_found_by_the_names_of_tools_and_clouds(typed: str, name: str) -> None:
    assert load_hardware(typed).name == name


@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        ("V100 PCIe", "any of 2: v100-16g-pcie, v100-32g-pcie"),
        ("8xH100", "--gpu h100 --tp 8"),
        ("RTX 4090 Laptop GPU", "unknown GPU"),
        ("4090 48gb", "unknown GPU"),
        ("rtx 3090 super", "unknown GPU"),
    ],
)
def test_a_gpu_that_is_near_is_not_taken_for_a_card(typed: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        load_hardware(typed)


def test_a_card_named_without_its_memory_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with run_on_command_line():
        load_hardware("NVIDIA  A100")
    assert "taken as a100-80g; there are also a100-40g," in capsys.readouterr().err


def gpu_spellings(name: str) -> list[str]:
    """Ways in which tools, clouds and shops write a card."""
    title = load_hardware(name).title.partition(" (")[0]
    short = re.sub("NVIDIA |AMD |Intel |GeForce |Tesla |Instinct ", "", title)
    return [
        f"1x {short}", f"GPU: {short}", short.replace(" GB", "GiB VRAM"), f"single {short} GPU",
        re.sub(r" \d+ GB", "", title), re.sub(r" \d+ GB| ", "", short),
        title, title.upper(), title.replace(" ", "-"), title.replace(" GB", "GB"), name.upper(),
        name.replace("-", "_"), f" {title} ", title.replace("NVIDIA ", "").replace("AMD ", ""),
        f"nvidia-{name}" if "NVIDIA" in title else name,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "name"),
    [("g5.xlarge", "a10g"), ("p5.48xlarge", "h100"), ("a2-ultragpu-8g", "a100-80g")],
)
def test_an_instance_is_its_gpu(typed: str, name: str) -> None:
    assert load_hardware(typed).name == name


@pytest.mark.parametrize("seed", [36, 1126])
def test_60_spellings_of_gpus_drawn_from_the_profiles(
    seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """At least 97 % are read right, or its sizes listed; none is another card in silence."""
    draw = Random(seed)
    known = [name for name in hardware_names() if name != "kcache-64g"]
    missed = []
    for name in draw.choices(known, k=60):
        typed = draw.choice(gpu_spellings(name))
        try:
            with run_on_command_line():
                found = load_hardware(typed).name
        except InputError as problem:
            if "could be any of" not in str(problem) or f" {name}" not in str(problem):
                missed.append(str(problem))
        else:
            assert found == name or name in capsys.readouterr().err, typed
    assert len(missed) <= 1, missed


MEASURED = (
    "rtx 4060 8g", "rtx 5080 16g", "quadro rtx 6000 24g", "strix-halo", "rtx 2080 8g", "4090d 24g",
    "gtx 1070 8g", "rtx pro 4500 blackwell", "h800", "gb10 (dgx-spark)", "a800 40g", "mi355x",
    "rtx a5000 24g", "rtx 3060 12g", "intel arc pro b70 32g", "titan rtx 24g", "rtx 2080 ti 11g",
    "h20", "l20", "rtx 4080", "b300", "apple m3 ultra", "apple m4 max", "rtx 5060 ti 16gb",
)  # fmt: skip


def test_cards_of_public_measurements_have_a_profile() -> None:
    for typed in MEASURED:
        hardware = load_hardware(typed)
        assert len(hardware_names()) >= 100
        assert hardware.links["hbm"].bandwidth > 1e11
        assert hardware.sources["hbm.bandwidth_Bps"] and hardware.sources["h2d.bandwidth_Bps"]


def test_a_card_takes_its_host_from_the_one_it_extends_but_no_rate_and_no_price(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'title = "Mine"\nbasis = "datasheet"\nextends = "rtx4090"\n[compute]\nfp32_FLOPps = 1e13\n'
        'fp16_FLOPps = 2e13\n[source]\ncompute = "measured"\n'
    )
    mine, base = load_hardware(file), load_hardware("rtx4090")
    assert mine.flops == {"fp32": 1e13, "fp16": 2e13}
    assert mine.links == base.links
    assert mine.price is None and mine.power is None
    assert mine.sources["compute.fp16_FLOPps"] == "measured"
