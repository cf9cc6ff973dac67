"""The README's commands on several Pythons with the lowest, the pinned and the newest dependencies.

Builds the wheel, installs it with uv into an environment per Python and resolution, runs every
command line of the README there, and compares what `predict`, `simulate` and `plan` print:

    python -m benchmarks.matrix FOLDER PYTHON...

FOLDER keeps the environments; each PYTHON is an interpreter. Nothing of this checkout is imported.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESOLUTIONS = ("lowest", "pinned", "newest")
EXTRAS = "[traces,frames]"
CASE = "--model llama3-8b --gpu h100"
COMPARED = {
    "predict": f"predict {CASE} --technique full,kivi,kvpr --batch 1,8 --json",
    "simulate": f"simulate --trace sample:chat {CASE} --json",
    "plan": f"plan {CASE} --json",
    "offline": "plan --model llama2-7b --gpu a6000 --offline --lossy --json",
    "trace": f"plan --trace sample:chat --rate 0.25 {CASE} --tpot 50ms --json",
    "plan in words": f"plan {CASE}",
}
SKIPPED = "kvsim validate"  # needs PyTorch, which has wheels and tests of its own
BOUND = 9  # digits of a solver's bound that versions have in common


def uv(*arguments: str) -> None:
    """Run uv and stop where it fails."""
    subprocess.run([sys.executable, "-m", "uv", "--quiet", *arguments], check=True)


def build_wheel(folder: Path) -> Path:
    """Return the wheel of this checkout, built from a copy that leaves nothing in it."""
    for old in folder.glob("kvsim-*.whl"):
        old.unlink()
    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    skipped = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=skipped)
    uv("build", "--wheel", "--out-dir", str(folder), str(source))
    (wheel,) = folder.glob("kvsim-*.whl")
    return wheel


def install(wheel: Path, python: str, resolution: str, folder: Path) -> Path:
    """Make an environment and return its folder of programs."""
    version = subprocess.run(
        [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    place = folder / f"{version}-{resolution}"
    uv("venv", "--clear", "--python", python, str(place))
    target = ["pip", "install", "--python", str(place / "bin" / "python")]
    whole = f"{wheel}{EXTRAS}"
    if resolution == "lowest":
        uv(*target, "--resolution", "lowest-direct", "--only-binary", ":all:", whole)
    elif resolution == "newest":
        uv(*target, "--upgrade", "--only-binary", ":all:", whole)
    else:
        uv(*target, "--no-deps", "--requirement", str(ROOT / "requirements.txt"))
        uv(*target, "--no-deps", str(wheel))
    return place / "bin"


def readme_lines() -> list[str]:
    """Return the command lines of the README, one each."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"```(?:sh|console)[^\n]*\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            commands = line.partition("#")[0].removeprefix("$ ").split(";")
            found += [x.strip() for x in commands if x.strip().startswith("kvsim ")]
    return [line for line in found if not line.startswith(SKIPPED)]


def run(programs: Path, line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line of kvsim in a folder."""
    words = shlex.split(line.removeprefix("kvsim "))
    return subprocess.run(
        [str(programs / "kvsim"), *words], cwd=folder, capture_output=True, text=True, check=False
    )


def compared(printed: str, name: str) -> object:
    """What has to be the same everywhere: all of it, but of plans no time and few digits."""
    if name not in ("plan", "offline", "trace"):
        return printed
    answer = json.loads(printed)
    solver = answer.get("solver") or {}
    bound = {k: f"{v:.{BOUND}g}" for k, v in solver.items() if k == "bound"}
    return {"choice": answer["choice"], "answer": answer["answer"], **bound}


def main() -> None:
    """Measure the whole matrix and print a line per environment."""
    folder, pythons = Path(sys.argv[1]).resolve(), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    wheel, first, failures = build_wheel(folder), dict[str, object](), 0
    for python in pythons:
        for resolution in RESOLUTIONS:
            programs = install(wheel, python, resolution, folder)
            work = programs.parent / "work"
            work.mkdir(exist_ok=True)
            lines, told = readme_lines(), []
            for line in lines:
                ended = run(programs, line, work)
                if ended.returncode:
                    told.append(f"{line}: {ended.stderr.strip().splitlines()[-1:]}")
            for name, line in COMPARED.items():
                ended = run(programs, line, work)
                try:
                    now = compared(ended.stdout, name)
                except (ValueError, KeyError) as problem:
                    told.append(f"{line}: {type(problem).__name__} {problem} {ended.stderr[-200:]}")
                    continue
                if first.setdefault(name, now) != now:
                    told.append(f"{line}: other than {pythons[0]} {RESOLUTIONS[0]}")
            failures += len(told)
            print(f"{programs.parent.name}: {len(lines)} lines, {len(told)} failures", flush=True)
            for one in told:
                print(f"  {one}", flush=True)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
