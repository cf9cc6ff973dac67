"""`kvsim doctor` names every fault of a file; files that are sound have none."""

import json
from pathlib import Path
from typing import Any

from kvsim.doctor import examine
from kvsim.evidence.published import PAPER_COLUMNS
from kvsim.machines.profiles import hardware_names, stack_names
from kvsim.models.catalogue import catalogue_config
from tests.support.bad_traces import BAD_ROWS, azure
from tests.support.commands import BAD, check, line, run
from tests.support.envelope import answer_in
from tests.support.places import ROOT

PROFILES = ROOT / "kvsim/hwprofiles"
SHIPPED = [
    *((PROFILES / f"{name}.toml", "hardware profile") for name in hardware_names()),
    *((PROFILES / "stacks" / f"{name}.toml", "software stack") for name in stack_names()),
    *((path, "measured rows") for path in (ROOT / "kvsim/evidence/papers").glob("*.csv")),
    *((path, "attention trace") for path in (ROOT / "kvsim/traces/measured").glob("*.json")),
    *((path, "request trace") for path in (ROOT / "kvsim/traces/samples").glob("*.csv")),
]


def test_what_is_shipped_has_no_fault() -> None:
    for path, kind in SHIPPED:
        found = examine(str(path))
        assert (found.kind, found.faults) == (kind, ())


def faults(path: Path, text: str) -> str:
    """All faults of a file with this content, as one text; each is one printable line."""
    path.write_text(text)
    found = examine(str(path)).faults
    assert all(one.isprintable() and path.name in one for one in found)
    return "\n".join(found)


def test_every_fault_of_a_profile(tmp_path: Path) -> None:
    text = (PROFILES / "t4.toml").read_text()
    for old, new in (
        ("gpu_capacity_B = ", "gpu_capacity_B = -"),
        ("host_capacity_B", "host_capacity_GB"),
        ("basis = ", "basis = 3 #"),
        ('"hbm.bandwidth_Bps" = ', '"hbm.bandwith_Bps" = '),
    ):
        assert old in text
        text = text.replace(old, new, 1)
    check(
        faults(tmp_path / "own.toml", text),
        "memory.gpu_capacity_B is -|memory.host_capacity_GB|memory.host_capacity_B' is missing|"
        "basis is 3|hbm.bandwith_Bps|hbm.bandwidth_Bps does not say where it comes from",
    )


def test_faults_of_entries_together_are_found_where_each_is_sound(tmp_path: Path) -> None:
    text = (PROFILES / "t4.toml").read_text().replace("fp16_FLOPps = 6", "fp16_FLOPps = 96", 1)
    check(faults(tmp_path / "own.toml", text), "sparse rate")


def test_every_fault_of_a_stack(tmp_path: Path) -> None:
    text = '[kernel.gem]\ncompute = 0.5\n[kernel.gemm]\ncompute = 1.5\nmemory = "half"\n'
    found = faults(tmp_path / "own.toml", f'extends = "fused"\nbasis = "read"\n{text}')
    check(found, "kernel.gem.compute|kernel.gemm.compute is 1.5|kernel.gemm.memory is 'half'|title")
    assert len(found.splitlines()) >= 6


def test_every_fault_of_a_configuration(tmp_path: Path) -> None:
    config: dict[str, Any] = dict(catalogue_config("qwen3-30b-a3b"))
    wrong = {"hidden_size": 0, "vocab_size": "many", "num_experts": None, "head_dim": 1.5}
    found = faults(tmp_path / "config.json", json.dumps(config | wrong))
    check(found, "|".join(f"'{field}'" for field in wrong))
    assert len(found.splitlines()) == len(wrong)


def test_every_rule_that_rows_of_a_trace_break(tmp_path: Path) -> None:
    rules = ("zero length", "NaN length", "text as length", "no date")
    rows = [BAD_ROWS[name][0].decode().splitlines()[3] for name in rules]
    found = faults(tmp_path / "trace.csv", azure(*rows, *rows).decode())
    check(found, "rule: least|rule: finite|rule: number|rule: date|(2 such rows)")
    assert len(found.splitlines()) == len(rules)
    assert "omitted" not in run("doctor", str(tmp_path / "trace.csv")).out  # nothing is said twice


def test_a_trace_out_of_order_is_one_fault_beside_others(tmp_path: Path) -> None:
    lines = azure(BAD_ROWS["zero length"][0].decode().splitlines()[3]).decode().splitlines()
    found = faults(tmp_path / "trace.csv", "\n".join([lines[0], *reversed(lines[1:])]))
    check(found, "rule: least|--sort")


def test_every_unsound_row_of_a_table(tmp_path: Path) -> None:
    papers = ROOT / "kvsim" / "evidence" / "papers" / "kcache.csv"
    header, *rows = papers.read_text().splitlines()[:4]
    assert header.split(",") == list(PAPER_COLUMNS)
    bad = [rows[0], rows[0], rows[1].replace("fit", "guess").replace("check", "guess"), "a,b"]
    found = faults(tmp_path / "mine.csv", "\n".join([header, *bad]))
    check(found, "line 3|the same run|line 4|guess|line 5|fields")


def test_the_command_says_the_verdict_first(tmp_path: Path) -> None:
    sound = run("doctor", str(PROFILES / "t4.toml"))
    assert sound.code == 0
    assert sound.out.splitlines()[0].endswith("t4.toml: hardware profile, no fault")
    path = tmp_path / "own.toml"
    path.write_text("extends = 3\n")
    bad = run("doctor", str(path), "--json")
    assert bad.code == 1
    assert answer_in(bad.out)["kind"] == "software stack"
    check(line("doctor", str(tmp_path / "none.toml"), code=BAD), "no such file")


def test_what_is_no_toml_is_one_fault(tmp_path: Path) -> None:
    check(faults(tmp_path / "own.toml", "[[["), "not valid TOML")
