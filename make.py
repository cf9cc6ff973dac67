"""Everything a fresh clone needs, with nothing but Python 3.11 or newer: python3 make.py TASK.

plan   install, then plan Llama-2-7B on an RTX A6000
test   linters, types, import direction and the tests
       --all: everything, hours, in parts that go on where they were; docs/full-run.json says
       what passed when
       --cpus: the tests of real runs as other processors would round, about forty minutes;
       goes on where it was stopped, as long as the commit is the same
lint   the same without the tests
docs   build the documentation, warnings as errors, into build/site
renew [NAME ...]
       compute frozen answers and the outputs that README and docs print anew, write them, and
       show what moved and by how much; a NAME is docs, a page, examples, or KIND[/FILE] of
       tests/frozen/data
bench  time kvsim itself, about five minutes
new-technique NAME
       start a technique: its file, its real implementation, and tests that say what to fill in
changelog
       move docs/changes into CHANGELOG.md below the version of pyproject.toml
sbom   list the packages that kvsim runs with, their versions and licences: build/sbom.json
gpu    what can be measured while a GPU is there, with the Python that runs this file; goes on
       where it was: --minutes N, --state DIR, --out DIR, --report
robust the whole table of bad inputs and 150 kills, about an hour
       --minutes N: fuzzers of every format for that long instead; --only PART, --seed N
"""

import itertools
import json
import os
import re
import subprocess
import sys
import urllib.request
import venv
from collections.abc import Iterator, Mapping
from keyword import iskeyword
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
ENVIRONMENT = ROOT / ".venv"
PYTHON = str(ENVIRONMENT / "bin" / "python")
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
"""Where PyTorch's builds without CUDA are; the one on PyPI needs gigabytes of it to be imported."""
PIP = ["-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
UV = "uv==0.13.9"
UV_PIP = ["-m", "uv", "--quiet", "--system-certs", "pip"]
UV_OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}
"""What pip's configuration calls it, and uv."""

LINTED = ["kvsim", "tests", "benchmarks", "docs", "make.py", "cli.py"]
"""Not the links at the root, which would show every file a second time."""
LINT = [
    ["-m", "ruff", "check", "--no-cache", *LINTED],  # which would not see a deleted module
    ["-m", "ruff", "format", "--check", *LINTED],
    ["-m", "mypy"],
    ["-c", "from importlinter.cli import lint_imports_command as lint; lint()"],
]
BESIDE = ["-n", "2", "--dist", "worksteal"]
"""Two processes, each with half of the files: what a file's tests share is made once."""
TIMED = ("startup", "evaluation", "serving", "tiers", "traces")
"""Benchmarks of speed that need nothing; the others say what they need when they run alone."""
TASKS = {
    "plan": [["-m", "kvsim", "plan", "--model", "llama2-7b", "--gpu", "a6000"]],
    "lint": LINT,
    "docs": [["-m", "mkdocs", "build", "--strict"]],
    "robust": [
        ["-m", "tests.robust"],
        ["-m", "tests.robust.kills"],
        ["-m", "tests.robust.determinism"],
    ],
    "bench": [["-m", f"benchmarks.{name}"] for name in TIMED],
}
REQUIREMENTS = {
    "lint": "requirements-test.txt",
    "test": "requirements-test.txt",
    "robust": "requirements-test.txt",
    "docs": "requirements-docs.txt",
}
UNROUNDED = ("budget", "micro", "pretended_units", "processor", "session", "timing")
"""Of the tests of real runs those that compare no computed number: times, plans of work, files."""
REAL_RUNS = [
    *("-Im", "pytest", *BESIDE, "-q", "tests/validate"),
    *(f"--ignore=tests/validate/test_{name}.py" for name in UNROUNDED),
    *("--deselect", "tests/validate/test_kernels_triton.py::test_kernels_compile_as_launched"),
]
ITSELF = ["--deselect", "tests/validate/test_any_cpu.py"]  # two of the processors below, in short
SEEDS = 10


def processors() -> Iterator[dict[str, str]]:
    """Environments in which PyTorch computes as it would on other processors."""
    flags = Path("/proc/cpuinfo")
    has_avx512 = flags.is_file() and " avx512f " in flags.read_text()
    kernels = ["default", "avx2"] + ["avx512"] * has_avx512
    for capability, isa, threads in itertools.product(kernels, ["SSE41", "DEFAULT"], "12"):
        yield {
            "ATEN_CPU_CAPABILITY": capability,
            "ONEDNN_MAX_CPU_ISA": isa,
            "KVSIM_TEST_THREADS": threads,
        }
    for seed in range(1, SEEDS + 1):
        yield {"KVSIM_ULPS": str(seed)}


def test() -> None:
    """Ruff, then the tests with types and import direction beside them, which are shown last."""
    quick, slow = LINT[:2], LINT[2:]
    for arguments in quick:
        run(arguments)
    checks = [
        subprocess.Popen(
            [PYTHON, *arguments], cwd=ROOT, env=environment({}), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for arguments in slow
    ]  # fmt: skip
    if not (ROOT / "tests" / "__pycache__").is_dir():  # else both would compile all at once
        finished(["-Im", "pytest", "--collect-only", "-q"], {}, subprocess.DEVNULL)
    code = finished(["-Im", "pytest", *BESIDE])
    for check in checks:
        print(check.communicate()[0], end="")
        code = code or check.returncode
    sys.exit(code)


def test_processors() -> None:
    """Run the tests of real runs on every emulated processor, but for those passed before."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    kept = ENVIRONMENT / f"processors.{head.stdout.strip()}"
    passed = kept.read_text().splitlines() if kept.is_file() else []
    failed = []
    for variables in processors():
        name = " ".join(f"{name}={value}" for name, value in variables.items())
        print(name, "passed before" if name in passed else "", file=sys.stderr)
        if name in passed:
            continue
        if succeeds([*REAL_RUNS, *ITSELF], variables, quiet=False):
            with kept.open("a") as file:
                file.write(f"{name}\n")
        else:
            failed.append(name)
    if failed:
        sys.exit("\n".join(["not on these processors:", *failed]))


def new_technique(name: str, root: Path = ROOT) -> list[Path]:
    """Write a technique, its real implementation and its tests from docs/templates.

    Both are found by their file; nothing else has to be edited. Returns what was written.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        sys.exit(f"new-technique: got {name!r}; expected lower-case words, as in my-technique")
    file = name.replace("-", "_")
    kind = "".join(word.capitalize() for word in name.split("-"))
    texts = {path: path.read_text() for path in (root / "docs" / "templates").glob("*.txt")}
    if iskeyword(file) or any(
        re.search(rf"^\s*(from|import) .*\b{kind}\b", text, re.MULTILINE) for text in texts.values()
    ):
        sys.exit(f"new-technique: {name} is a word of Python or of the files; choose another name")
    stated = re.compile(rf'^    name(: ClassVar\[str\])? = "{name}"$', re.MULTILINE)
    for path in (root / "kvsim" / "techniques").rglob("*.py"):
        if stated.search(path.read_text()):
            sys.exit(f"new-technique: {name} is there already, in {path}; choose another name")
    targets = {
        "technique.py.txt": root / "kvsim" / "techniques" / "papers" / f"{file}.py",
        "implementation.py.txt": root / "kvsim" / "validate" / "techniques" / f"{file}.py",
        "test_technique.py.txt": root / "tests" / "techniques" / f"test_{file}.py",
    }
    for target in targets.values():
        if target.exists():
            sys.exit(f"new-technique: {target} is there already; choose another name")
    for template, target in targets.items():
        text = texts[root / "docs" / "templates" / template]
        for mark, word in (("$NAME", name), ("$FILE", file), ("$CLASS", kind)):
            text = text.replace(mark, word)
        target.write_text(text)
    return list(targets.values())


def renew(names: list[str]) -> None:
    """Renew frozen answers and printed outputs; git shows the difference line by line."""
    pages = [name for name in names if name.endswith(".md")]
    answers = [name for name in names if name not in ("docs", "examples", *pages)]
    if answers or not names:
        run(["-m", "tests.frozen", *answers])
    if pages or "docs" in names or not names:
        run(["-m", "tests.docs.blocks", "--write", *pages])
    if "examples" in names or not names:
        run(["-m", "tests.docs.examples", "--write"])
    subprocess.run(["git", "--no-pager", "diff", "--stat"], cwd=ROOT, check=False)


def join_changes(root: Path = ROOT) -> None:
    """Move the files of docs/changes into the changelog, below the version of pyproject.toml."""
    files = sorted(p for p in (root / "docs" / "changes").glob("*.md") if p.name != "README.md")
    added: dict[str, list[str]] = {"Added": [], "Changed": [], "Fixed": []}
    for file in files:
        kind = "Changed"
        for block in re.split(r"\n\s*\n", file.read_text(encoding="utf-8").strip()):
            if block.startswith("### "):
                kind = block.removeprefix("### ").strip()
                if kind not in added:
                    sys.exit(f"{file}: got {kind!r}; expected one of {', '.join(added)}")
                continue
            item = block if block.startswith("- ") else "- " + block.replace("\n", "\n  ")
            added[kind].append(item)
    version = re.search(r'^version = "(.+)"', (root / "pyproject.toml").read_text(), re.MULTILINE)
    assert version
    changelog = root / "CHANGELOG.md"
    changelog.write_text(merge_changes(changelog.read_text(encoding="utf-8"), version[1], added))
    for file in files:
        file.unlink()


def merge_changes(text: str, version: str, added: Mapping[str, list[str]]) -> str:
    """Return a changelog with items below a version, whose section may be there already."""
    first, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    heading = f"## {version}\n"
    known = sections.pop(0) if sections and sections[0].startswith(heading) else heading
    opening, *parts = re.split(r"^### ", known, flags=re.MULTILINE)
    written = {part.partition("\n")[0]: part.partition("\n")[2].strip() for part in parts}
    for kind, items in added.items():
        blocks = [written[kind]] if kind in written else []
        if blocks + items:
            written[kind] = "\n".join(blocks + items)
    body = "".join(f"### {kind}\n\n{written[kind]}\n\n" for kind in added if kind in written)
    return first + opening.strip() + "\n\n" + body + "".join(sections)


INSTALLED = """
import json
from importlib.metadata import distributions
wanted = ("Name", "Version", "License-Expression", "Classifier", "License")
print(json.dumps([{k: d.metadata.get_all(k) or [] for k in wanted} for d in distributions()]))
"""
"""Prints what is installed, with every value of these fields."""


def list_components(installed: list[dict[str, list[str]]], pins: str) -> dict[str, Any]:
    """Return the software bill of materials (CycloneDX 1.5) of pinned packages.

    `installed` is what `INSTALLED` prints, `pins` the text of a requirements file.
    """
    pinned = set(re.findall(r"^([A-Za-z0-9._-]+)==", pins, re.MULTILINE))
    components: list[dict[str, Any]] = []
    for about in installed:
        name = re.sub(r"[-_.]+", "-", about["Name"][0]).lower()
        if name not in pinned:
            continue
        version = about["Version"][0]
        named = [x.split(" :: ")[-1] for x in about["Classifier"] if x.startswith("License ::")]
        stated = [*about["License-Expression"], *named, *about["License"], "not stated"]
        components.append({
            "type": "library", "name": name, "version": version,
            "purl": f"pkg:pypi/{name}@{version}",
            "licenses": [{"license": {"name": stated[0].partition("\n")[0]}}],
        })  # fmt: skip
    missing = pinned - {one["name"] for one in components}
    if missing:
        sys.exit(f"sbom: pinned, but not installed: {', '.join(sorted(missing))}")
    components.sort(key=lambda one: one["name"])
    return {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "components": components}


def write_sbom() -> None:
    """Write build/sbom.json for the packages of requirements.txt, as they are installed."""
    shown = subprocess.run([PYTHON, "-c", INSTALLED], capture_output=True, text=True, check=True)
    found = list_components(json.loads(shown.stdout), (ROOT / "requirements.txt").read_text())
    target = ROOT / "build" / "sbom.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(found, indent=2) + "\n")
    print(f"wrote {target.relative_to(ROOT)}: {len(found['components'])} packages")


def install(requirements: str) -> None:
    """Make .venv and install the pins, once per change of the files that state them.

    uv does it in a third of pip's time; where uv cannot, pip does.
    """
    stated = [ROOT / "requirements.txt", ROOT / requirements, ROOT / "pyproject.toml"]
    stamp = ENVIRONMENT / f"{requirements}.installed"
    wanted = "".join(path.read_text() for path in stated)
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    print(f"installing {requirements} into .venv (first run, or pins changed)", file=sys.stderr)
    if not Path(PYTHON).is_file():
        venv.create(ENVIRONMENT, with_pip=True)
    torch = "torch==" in stated[1].read_text()
    builds = [CPU_BUILDS] if torch and reachable(CPU_BUILDS) else []
    # The pins are the whole list. A file with hashes is installed by itself: beside one, every
    # package needs them, and PyTorch's builds without CUDA are not PyPI's files.
    files = dict.fromkeys(["requirements.txt", requirements])
    pins = [["install", "--no-deps", "--requirement", file] for file in files]
    itself = ["install", "--no-deps", "--no-build-isolation", "--editable", "."]
    if not (
        succeeds([*PIP, "install", "--only-binary", ":all:", UV])
        and all(succeeds([*UV_PIP, *one, *indexes(builds)], quiet=False) for one in pins)
        and succeeds([*UV_PIP, *itself], quiet=False)
    ):
        print("uv cannot install it here; pip does, which takes longer", file=sys.stderr)
        for one in pins:
            run([*PIP, *one, "--no-compile", *(f"--extra-index-url={place}" for place in builds)])
        run([*PIP, *itself])
    if torch and not builds and not succeeds(["-c", "import torch"]):
        sys.exit(f"PyTorch lacks its CUDA libraries; reach {CPU_BUILDS} for a build without them")
    stamp.write_text(wanted)


def indexes(builds: list[str]) -> list[str]:
    """uv's options for what pip is configured to (a mirror, more indexes), which uv does not read.

    `builds` are further indexes. uv weighs all of them, as pip does.
    """
    shown = subprocess.run(
        [PYTHON, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    options = [f"--index={place}" for place in builds]
    for line in shown.splitlines():
        name, _, value = line.partition("=")
        option = UV_OPTIONS.get(name.rpartition(".")[2])
        if option:
            options += [f"{option}={word}" for word in value.strip("'\"").split()]
    return [*dict.fromkeys(options), "--index-strategy=unsafe-best-match"]


def reachable(address: str) -> bool:
    """Whether something answers there, within five seconds."""
    try:
        urllib.request.urlopen(address, timeout=5).close()
    except OSError:
        return False
    return True


def run(arguments: list[str], variables: Mapping[str, str] | None = None) -> None:
    """Run Python in the environment; stop at the first failure."""
    code = finished(arguments, variables)
    if code:
        sys.exit(code)


def succeeds(
    arguments: list[str], variables: Mapping[str, str] | None = None, quiet: bool = True
) -> bool:
    """Whether Python ends well in the environment; if quiet, what it prints is not shown."""
    return not finished(arguments, variables, subprocess.DEVNULL if quiet else None)


def finished(
    arguments: list[str], variables: Mapping[str, str] | None = None, shown: int | None = None
) -> int:
    """Python's exit code in the environment."""
    changed = environment(variables or {})
    return subprocess.run(
        [PYTHON, *arguments], cwd=ROOT, env=changed, check=False, stdout=shown, stderr=shown
    ).returncode


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This one's variables with some more; Python keeps what it compiles, as hundreds start."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return kept | dict(variables)


def main() -> None:
    """Install what the task needs, then do it."""
    task = sys.argv[1] if len(sys.argv) > 1 else ""
    options = sys.argv[2:]
    if sys.version_info < (3, 11):  # noqa: UP036 - older ones run this file too
        sys.exit("kvsim needs Python 3.11 or newer; run this file with a newer python3")
    if task == "gpu":  # nothing is installed: PyTorch is there, and may be the only one that fits
        session = [sys.executable, "-m", "kvsim.cli.session", *options]
        sys.exit(subprocess.run(session, cwd=ROOT, check=False).returncode)
    if task == "new-technique" and len(options) == 1:
        for path in new_technique(options[0]):
            print(f"wrote {path.relative_to(ROOT)}")
        print("Fill in what the files say, until `python3 make.py test` passes.")
        return
    if task == "renew":
        install("requirements-test.txt")
        renew(options)
        return
    if task == "sbom" and not options:
        install("requirements.txt")
        write_sbom()
        return
    if task == "changelog":
        join_changes()
        return
    if task == "robust" and options:
        install(REQUIREMENTS[task])
        run(["-m", "tests.robust.fuzz", *options])
        return
    if (
        task not in {*TASKS, "test"}
        or options not in ([], ["--cpus"], ["--all"])
        or (options and task != "test")
    ):
        sys.exit(f"{(__doc__ or '').strip()}")
    install(REQUIREMENTS.get(task, "requirements.txt"))
    if options == ["--cpus"]:
        test_processors()
        return
    if options == ["--all"]:
        run(["-m", "tests.full_run"])
        return
    if task == "test":
        test()
        return
    for arguments in TASKS[task]:
        run(arguments)


if __name__ == "__main__":
    main()
