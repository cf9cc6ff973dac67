"""An option that a command takes changes its answer or is refused, in a case where it should."""

import json
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvsim.options import options_of
from tests.support.commands import run
from tests.support.places import ROOT

BASES = {
    "predict": "--model llama2-7b --gpu a6000 --prompt 512 --generate 16",
    "plan": "--model llama2-7b --gpu a6000 --prompt 512 --generate 16",
    "simulate": "--model llama2-7b --gpu a6000 --prompt 600 --generate 90 --rate 4 --hours 0.01",
    "capacity": "--model llama2-7b --gpus a6000 --prompt 600 --generate 30 --rate 4 --hours 0.02 "
                "--ttft 2s --tpot 100ms",
}  # fmt: skip
EXPERTS = "--model mixtral-8x7b --gpu h100 --stack llamacpp --weights q4_k_m"
STORED = "--turns 8 --hours 0.05 --blocks 200"
HOST, DRIVE = "--host-cache 0.2", "--host-cache 0.05 --nvme-cache 10"
AWAY = "--offline --only offload --batch 256 --prompt 2k"
SPILLED = "--offline --only flexgen --batch 256 --prompt 2k --generate 9 --host-memory 90"
ON_DISK = "--technique place:host_share=1,cache_disk=1"
MISSES = "--only offload --tpot 1s"
FILE = "--prompt - --generate - --rate - --hours - --trace FILE"
SAMPLE = "--prompt - --generate - --rate - --hours - --trace sample:chat"
MEASURED = (ROOT / "kvsim" / "traces" / "measured" / "smollm2-135m.json").read_text()
HOURS = "--prompt - --generate - --rate - --hours - --trace sample:conversation"
DAY = "--prompt - --generate - --hours - --trace sample:day --rate 20x --tp 1"
Case = tuple[str, str]
CASES: dict[str, dict[str, Case]] = {
    "predict plan simulate capacity": {
        "model": ("smollm2-135m", ""), "gpu": ("l4", ""), "gpus": ("l4", ""),
        "stack": ("sglang", ""), "tp": ("2", ""), "pp": ("2", ""),
        "dp": ("2", "--model deepseek-v2-lite --tp 2"),
        "ep": ("2", "--model mixtral-8x7b --gpu h100 --tp 2"),
        "weights": ("fp8", "--gpu l4"), "technique": ("kivi:bits=4", ""), "batch": ("4", ""),
        "prompt": ("100", ""), "generate": ("7", ""),
        "host": ("epyc-2s", "--technique offload"),
        "host_bandwidth": ("9", "--technique offload"),
        "host_memory": ("9", "--technique offload"),
        "allreduce_bandwidth": ("2", "--tp 2"),
        "n_cpu_moe": ("9", EXPERTS), "n_gpu_layers": ("9", EXPERTS),
        "override_tensor": ("exps=CPU", EXPERTS),
        "host_weights": ("streamed", f"{EXPERTS} --n-cpu-moe 9"),
        "ubatch_size": ("64", f"{EXPERTS} --n-cpu-moe 9"),
        "rate": ("0.5", ""), "users": ("9", "--rate - --users 4 --think 5"),
        "think": ("9", "--users 9 --think 1 --rate -"),
        "burst": ("4", ""), "hours": ("0.03", ""), "cached": ("256", ""),
        "hit_rate": ("0.5", ""), "turns": ("5", ""), "lengths": ("equal", ""),
        "ttft": ("100ms", ""), "tpot": ("26ms", ""), "sure": ("0.6", ""),
        "percentile": ("99", ""), "gpu_memory": ("14", ""),
        "gpu_memory_utilization": ("0.4", ""), "max_seqs": ("2", ""), "max_tokens": ("64", ""),
        "max_model_len": ("700", ""), "only": ("offload", ""), "without": ("full", ""),
        "engine": ("llamacpp", "--only kivi --lossy"), "lossy": ("", ""),
        "max_loss": ("0.2", "--only kivi"),
        "quality": ("QUALITY", "--only kivi --max-loss 0.3"), "emit": ("vllm", ""),
        "trace": ("sample:code", SAMPLE), "acceptance": ("0.6", "--only ngram"),
        "draft_model": ("eagle3=me/head", "--only eagle3 --acceptance 0.8"),
    },
    "predict": {
        "concurrency": ("4", ""), "draft_model": ("eagle3=me/head", "--technique eagle3"),
        "disk": ("500", ON_DISK), "nvme_read": ("0.1", f"{ON_DISK} --disk 500"),
        "nvme_write": ("0.1", f"{ON_DISK} --disk 500"),
    },
    "plan": {
        "total_gpus": ("4", ""), "nodes": ("4", "--model llama2-70b --total-gpus 16"),
        "offline": ("", ""), "jobs": ("900", "--offline"), "rate": ("9", SAMPLE),
        "per_class": ("", f"{SAMPLE} --lossy"), "objective": ("latency", ""),
        "host": ("epyc-2s", AWAY), "host_bandwidth": ("9", AWAY), "host_memory": ("9", AWAY),
        "host_memory_utilization": ("0.02", AWAY), "disk": ("900", SPILLED),
        "nvme_read": ("0.1", f"{SPILLED} --disk 900"),
        "nvme_write": ("0.1", f"{SPILLED} --disk 900"),
        "max_loss": ("0.3", "--only kcache --offline --prompt 1536 --generate 64"),
        "research": ("", "--lossy"), "pareto": ("", ""), "explain": ("", ""),
    },
    "simulate": {
        "disk": ("500", ON_DISK), "percentile": ("99", "--ttft 60ms"),
        "compare": ("full,kivi", ""), "req_s": ("9", SAMPLE), "replicas": ("2", ""),
        "find": ("rate", ""), "scale": ("clock", f"{SAMPLE} --rate 2x"),
        "route": ("round-robin", "--replicas 2"),
        "prefill_replicas": ("1", "--replicas 2"),
        "transfer": ("whole", "--replicas 2 --prefill-replicas 1"),
        "acceptance": ("ACCEPTED", "--technique ngram"),
        "draw_acceptance": ("1", "--technique ngram"), "abort_after": ("1s", "--rate 40"),
        "block_tokens": ("256", "--blocks 90"), "blocks": ("90", ""), "prefill": ("whole", ""),
        "priority": ("prefill", "--prefill whole"),
        "preemption": ("swap", "--blocks 90 --host-cache 9"),
        "admission": ("chunk", "--blocks 90 --max-tokens 64"),
        "prefix_caching": ("", HOURS),
        "host_cache": ("0.2", STORED), "nvme_cache": ("10", f"{STORED} --host-cache 0.05"),
        "remote_cache": ("10", STORED), "cache_ttl": ("1s", f"{STORED} {HOST}"),
        "cache_block": ("512", f"{STORED} {HOST}"),
        "prefix_load": ("load", f"{STORED} {HOST}"),
        "nvme_read": ("0.01", f"{STORED} {DRIVE}"), "nvme_write": ("0.001", f"{STORED} {DRIVE}"),
        "nic": ("0.01", f"{STORED} --remote-cache 10"),
        "format": ("azure", FILE), "time_unit": ("ms", FILE),
        "columns": ("arrival=arrival_s,prompt=generate_tokens,generate=prompt_tokens", FILE),
        "hash_block_tokens": ("256", f"{HOURS} --prefix-caching"),
        "chars_per_token": ("9", f"{FILE}:TEXT"), "sort": ("", f"{FILE}:MIXED"),
        "skip_bad": ("", f"{FILE}:BAD"),
    },
    "capacity": {
        "host": ("epyc-2s", MISSES), "host_bandwidth": ("9", MISSES), "host_memory": ("9", MISSES),
        "scale": ("clock", f"{SAMPLE} --rate 2x"), "route": ("round-robin", "--rate 40"),
        "class_targets": ("500=9s/20ms", ""),
        "price": ("a6000=9", ""), "seller": ("lambda", ""), "reserved": ("a6000=0.1", ""),
        "max_gpus": ("1", "--rate 40"), "max_host": ("1", "--host-cache 9 --turns 5"),
        "max_power": ("0.1", ""), "watts": ("a6000=900", ""),
        "configurations": ("1", "--gpus a6000,l4,h100 --rate 20"), "headroom": ("1", "--rate 20"),
        "failures": ("2", ""), "schedule": ("", DAY),
        "windows": ("2", HOURS), "pools": ("yes", ""), "spread": ("2", ""),
        "host_cache": ("9", "--turns 8"), "nvme_cache": ("90", "--turns 8"),
        "nic": ("0.001", "--pools yes"),
    },
}  # fmt: skip
"""By commands and option: a value, and what else is asked where it should matter; - is left out."""
SHOWN = {"report", "verbose", "json", "csv", "yes", "out", "resume", "check"}
"""How an answer is shown or kept, which other tests read."""
ECHOED = {"kvsim", "command", "limits", "targets", "planned_for", "answer"}
"""Keys that say what was asked, and words that say all of it again."""


def case_of(command: str, option: str) -> Case | None:
    found = [some[option] for commands, some in CASES.items()
             if command in commands.split() and option in some]  # fmt: skip
    return found[-1] if found else None


def written(folder: Path) -> dict[str, str]:
    """Small files that options name."""
    head = "arrival_s,prompt_tokens,generate_tokens"
    rows = [f"{i * 700},{300 + 40 * i},{20 + i}" for i in range(9)]
    turn = '{"conversations": [{"from": "human", "value": "%s"}, {"from": "gpt", "value": "%s"}]}'
    texts = {
        "FILE": "\n".join([head, *rows, ""]),
        "FILE:MIXED": "\n".join([head, *rows[::-1], ""]),
        "FILE:BAD": "\n".join([head, *rows, "7000,0,x", ""]),
        "FILE:TEXT": f"[{turn % ('why ' * 99, 'so ' * 40)}]",
        "QUALITY": MEASURED.replace('"smollm2-135m"', '"llama2-7b"'),
        "ACCEPTED": MEASURED,
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return {name: str(folder / name) for name in texts}


def words_of(command: str, more: str, names: dict[str, str]) -> list[str]:
    given: dict[str, str] = {}
    for text in (BASES[command], more):
        last = ""
        for word in shlex.split(text):
            if word.startswith("--"):
                last = "--gpus" if (command, word) == ("capacity", "--gpu") else word
                given[last] = ""
            else:
                given[last] = names.get(word, word)
    pairs = ((flag, value) for flag, value in given.items() if value != "-")
    return [command, *(word for pair in pairs for word in pair if word)]


@cache
def answered(*words: str) -> tuple[Any, str]:
    """What a command says, but for what only repeats the question."""
    said = run(*words, "--json")
    if said.code:
        return said.code, said.err
    found = json.loads(said.out)
    return {key: value for key, value in found.items() if key not in ECHOED}, said.err


UNSEEN = {("capacity", name) for name in ("start_up", "nvme_read", "nvme_write")}
"""Which matter in no case that is small enough to be tried here."""
PAIRS = [
    (command, name)
    for command in BASES
    for name in options_of(command)
    if name not in SHOWN and (command, name) not in UNSEEN
]


@pytest.mark.parametrize(("command", "name"), PAIRS, ids=map("-".join, PAIRS))
def test_an_option_does_something(command: str, name: str, tmp_path: Path) -> None:
    case = case_of(command, name)
    assert case, f"{command} {name}: say in CASES where it should matter"
    value, more = case
    names, flag = written(tmp_path), options_of(command)[name].flag
    without = words_of(command, more, names)
    given = words_of(command, f"{more} {flag} {value}", names)
    assert given != without
    before, after = answered(*without), answered(*given)
    assert 2 not in (before[0], after[0]) or before[0] != after[0], before
    assert after != before, f"{shlex.join(given)} answers as without {flag}"
