"""The same command gives the same bytes: ``python -m tests.robust.determinism [NAME ...]``.

Every command that computes runs in one process per environment, which differ in the hash seed, the
number of threads, the processor, the language and the folder's name. Outputs are compared but for
the date.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import numpy as np

from tests.robust.cases import MODEL, TRACE, WHERE
from tests.support.commands import run

SWEEP = (
    '[grid]\nmodel = ["smollm2-135m"]\ngpu = ["t4", "a10"]\ntechnique = ["full", "kivi:bits=4"]\n'
    "batch = [1, 8]\ncontext = [64, 512]\n"
)
ROUNDING = re.compile(rb'(?<="logit_difference": )[0-9.]+e-0[5-9]')
"""How PyTorch's kernels of one processor round, of logits around 1; another's round otherwise."""
TARGETS = ("--ttft", "9s", "--tpot", "5s")
COMMANDS: dict[str, tuple[str, ...]] = {
    "predict": ("predict", *WHERE, "--technique", "full,kvpr", "--report", "p.html"),
    "plan": ("plan", *WHERE, "--report", "plan.html", "--json"),
    "plan --explain": ("plan", *WHERE, "--explain"),
    "simulate": ("simulate", *WHERE, "--trace", "own.csv", "--out", "s.parquet", "--report",
                 "s.html"),
    "simulate --compare": ("simulate", *WHERE, "--trace", "own.csv", "--compare", "full,snapkv",
                           "--json"),
    "capacity": ("capacity", *MODEL, "--gpus", "t4,l4", *TARGETS, "--trace", "own.csv", "--json",
                 "--max-gpus", "2"),
    "reproduce": ("reproduce", "kcache", "--report", "r.html", "--json"),
    "sweep": ("sweep", "sweep.toml", "--out", "swept"),
    "explore": ("explore", *WHERE, "--out", "e.html", "--technique", "full"),
    "generate": ("traces", "generate", "g.jsonl.gz", "--rate", "9", "--requests", "500"),
    "inspect": ("traces", "inspect", "sample:chat", "--json"),
    "lists": ("techniques", "--json"),
    "validate": ("validate", *MODEL, "--layers", "2", "--batch", "1", "--prompt", "48",
                 "--generate", "4", "--technique", "full", "--technique", "kivi:bits=4", "--json"),
}  # fmt: skip
QUICK = ("predict", "plan", "simulate", "reproduce", "sweep", "generate")
SIMD = np.show_config("dicts")["SIMD Extensions"].get("found", ())
LOWEST = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "NUMBA_CPU_NAME": "generic",
    "OPENBLAS_CORETYPE": "Prescott",
    "NPY_DISABLE_CPU_FEATURES": " ".join(SIMD),
}
"""The oldest processor that libraries can be made to take this one for."""
ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    {"PYTHONHASHSEED": "2", "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2",
     "NUMBA_NUM_THREADS": "2"} | LOWEST,
    {"PYTHONHASHSEED": "3", "LANG": "C", "LC_ALL": "C", "TZ": "Asia/Kathmandu"},
)  # fmt: skip


def digests(names: tuple[str, ...]) -> dict[str, str]:
    """What commands print and write in this folder, by command and file."""
    Path("own.csv").write_text(TRACE)
    Path("sweep.toml").write_text(SWEEP)
    found: dict[str, str] = {}
    for name in names:
        before = _files()
        ended = run(*COMMANDS[name])
        if ended.code not in (0, 1):
            raise RuntimeError(f"{name}: {ended.err}")
        found[name] = _digest(ended.out.encode())
        for path in sorted(_files() - before):
            found[f"{name}: {path}"] = _digest(Path(path).read_bytes())
    return found


def _files() -> set[str]:
    return {str(path) for path in Path().rglob("*") if path.is_file()}


def _digest(content: bytes) -> str:
    plain = ROUNDING.sub(b"rounding", content.replace(str(date.today()).encode(), b"DATE"))
    return hashlib.sha256(plain).hexdigest()


def differences(names: tuple[str, ...], environments: tuple[dict[str, str], ...]) -> list[str]:
    """Outputs that are not the same in all environments."""
    found = []
    for more in environments:
        with tempfile.TemporaryDirectory() as folder:
            plain = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG"))}
            path = {"PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))}  # noqa: PTH109
            command = [sys.executable, "-m", "tests.robust.determinism", "--digest", *names]
            done = subprocess.run(
                command, cwd=folder, env=plain | path | more, capture_output=True, check=False
            )
            if done.returncode:
                raise RuntimeError(done.stderr.decode(errors="replace")[-2000:])
            found.append(json.loads(done.stdout))
    keys = sorted(set().union(*found))
    return [key for key in keys if len({one.get(key, "missing") for one in found}) > 1]


def main() -> int:
    """Compare all commands in all environments."""
    if "--digest" in sys.argv:
        print(json.dumps(digests(tuple(sys.argv[2:]))))
        return 0
    names = tuple(sys.argv[1:]) or tuple(COMMANDS)
    wrong = differences(names, ENVIRONMENTS)
    print("\n".join(f"differs: {key}" for key in wrong))
    print("| asked | measured |\n|---|---|")
    print(
        f"| the same bytes but for the date | {len(names)} commands in {len(ENVIRONMENTS)} "
        f"environments, {len(wrong)} outputs differ |"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
