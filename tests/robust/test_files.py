"""The one reader and the one writer: what they take, what they refuse, what they leave behind."""

import ast
import errno
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from kvsim import files
from kvsim.errors import InputError
from kvsim.files import remove_orphans

SMALL = files.Kind("config", "a Hugging Face config.json", 1000)
ROOT = Path(files.__file__).resolve().parents[1]


def special(folder: Path) -> dict[str, Path]:
    """Everything at a path that is no regular file."""
    os.mkfifo(folder / "fifo")
    with socket.socket(socket.AF_UNIX) as listener, suppress(OSError):  # a path too long for one
        listener.bind(str(folder / "socket"))
    (folder / "folder").mkdir()
    (folder / "link").symlink_to("/dev/zero")
    (folder / "loop").symlink_to("loop")
    names = {name: folder / name for name in ("fifo", "socket", "folder", "link", "loop")}
    there = {name: path for name, path in names.items() if path.exists() or path.is_symlink()}
    return there | {name: Path("/dev") / name for name in ("zero", "null", "full")}


READERS: list[Callable[[Path], object]] = [
    lambda path: files.read_bytes(path, SMALL),
    lambda path: files.read_text(path, SMALL),
    lambda path: files.read_json(path, SMALL),
    lambda path: files.read_toml(path, SMALL),
    lambda path: list(files.read_rows(path, SMALL)),
    lambda path: files.check_input(path, SMALL),
]


@pytest.mark.parametrize("read", READERS)
def test_only_regular_files_are_read(read: Callable[[Path], object], tmp_path: Path) -> None:
    for name, path in special(tmp_path).items():
        with pytest.raises(InputError, match="expected a Hugging Face config") as refused:
            read(path)
        words = {"fifo": "a pipe", "socket": "a socket", "folder": "a folder", "loop": "links"}
        assert words.get(name, "a device") in str(refused.value)
    with pytest.raises(InputError, match="there is no such file"):
        read(tmp_path / "missing")
    with pytest.raises(InputError, match="not a path"):
        read(Path("a\0b"))


@pytest.mark.parametrize("read", READERS)
def test_size_is_checked_before_anything_is_read(
    read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(10**12)
    with pytest.raises(InputError, match=r"has 1 TB, .* at most 1 kB; .*KVSIM_FILE_LIMITS=config"):
        read(sparse)
    monkeypatch.setenv(files.VARIABLE, "config=2TB")
    assert files.most_bytes(SMALL) == 2 * 10**12


@pytest.mark.parametrize("said", ["config", "config=", "confg=1MB", "config=1XB", "config=-1"])
def test_a_limit_that_is_none_is_refused(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(files.VARIABLE, said)
    with pytest.raises(InputError, match=files.VARIABLE):
        files.most_bytes(SMALL)


def test_a_file_without_a_size_is_read_to_its_limit_only() -> None:
    endless = Path("/proc/self/environ")  # has content and the size 0
    if not endless.exists():
        pytest.skip("there is no /proc")
    tiny = files.Kind("config", "a config", 1)
    with pytest.raises(InputError, match="at most 1 bytes"):
        files.read_bytes(endless, tiny)


def test_memory_is_checked_before_it_is_taken() -> None:
    with pytest.raises(InputError, match=r"trace: needs about 1e\+03 TB of memory, .* are free"):
        files.check_room(1e15, "trace", "give a smaller one")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a\nb\xff", r"byte 3 \(line 2, 0xff\) is not UTF-8"),
        (b"\xef\xbb\xbfab\xe9", r"byte 5 \(line 1, 0xe9\) is not UTF-8"),
        (b"\xff\xfe{\0}\0", "byte 0"),
    ],
)
def test_bytes_that_are_no_text_are_named(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(content)
    with pytest.raises(InputError, match=words):
        files.read_text(path, SMALL)


def test_line_ends_and_marks_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "text"
    for content in (b"a,b\n1,2\n", b"a,b\r1,2\r", b"\xef\xbb\xbfa,b\r\n1,2\r\n", b"a,b\n\n1,2"):
        path.write_bytes(content)
        assert [row for _, row in files.read_rows(path, SMALL)] == [["a", "b"], ["1", "2"]]


LARGE = files.Kind("text", "a document", 50_000_000)


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"a":' * 65 + "1" + "}" * 65, '["]", ' * 65 + "1" + "]" * 65]
)
def test_deep_json_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text(content)
    with pytest.raises(InputError, match=r"nested too deeply; expected at most 64 levels"):
        files.read_json(path, LARGE)


def test_braces_in_a_text_are_no_nesting(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text('"' + "\\" * 4 + '"')
    assert files.read_json(path, LARGE) == "\\" * 2
    path.write_text('"' + "\\" * 5 + '"' + "{" * 70 + '"')
    assert files.read_json(path, LARGE) == "\\" * 2 + '"' + "{" * 70
    path.write_text('"' + "\\" * 5 + '"' + "{" * 70)
    with pytest.raises(InputError, match="not valid JSON in line 1"):
        files.read_json(path, LARGE)


@pytest.mark.parametrize(
    "content",
    [
        "a" + ".a" * 100_000 + " = 1",
        "a" + ' . "a"' * 100_000 + " = 1",
        "\n[" + "a." * 70 + "a]",
        "a = " + "[" * 100_000,
        "a = " + "{b=" * 70 + "1" + "}" * 70,
    ],
)
def test_deep_toml_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    path.write_text(content)
    with pytest.raises(InputError, match="nested too deeply; expected at most 64 levels"):
        files.read_toml(path, LARGE)


def test_what_only_looks_deep_is_read(tmp_path: Path) -> None:
    text = "[{" * 100
    path = tmp_path / "flat"
    path.write_text(f'{{"a": "{text}", "b": [{"[1]," * 100}0]}}')
    assert files.read_json(path, SMALL)["a"] == text
    quotes = '"' * 3
    path.write_text(
        f'a = "{text}"\nb = {quotes}{text}\n"{text}{quotes}\n# {text}\nc = \'{text}\'\n'
        + f'd = "{"a." * 100}"\ne = [{"[1.5], " * 100}]\n'
    )
    assert files.read_toml(path, LARGE)["c"] == text


def test_json_says_each_name_once_and_no_odd_numbers(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    for content, words in (
        ('{"a": 1, "a": 2}', "'a' appears twice"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"a": 1,\n}', "not valid JSON in line 2"),
        ("", "not valid JSON in line 1"),
    ):
        path.write_text(content)
        with pytest.raises(InputError, match=words):
            files.read_json(path, LARGE)


def test_fields_and_lines_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.csv"
    path.write_text("a,b\n1," + "2" * 1_000_001)
    with pytest.raises(InputError, match=r"line 2: not CSV \(field larger"):
        list(files.read_rows(path, LARGE))
    path.write_text('a,b\n1,"2')
    with pytest.raises(InputError, match="line 2: not CSV"):
        list(files.read_rows(path, LARGE))


# Outputs


def test_outputs_go_into_regular_files_only(tmp_path: Path) -> None:
    before = Path("/dev/null").lstat()
    for name, path in special(tmp_path).items():
        if name == "loop":
            continue
        for write in (
            lambda p: files.check_target(p, "--out"),
            lambda p: files.replace_text(p, ""),
        ):
            with pytest.raises(InputError, match=r"there is a |the folder is not writable"):
                write(path)
    after = Path("/dev/null").lstat()
    assert stat.S_ISCHR(after.st_mode) and after.st_ino == before.st_ino


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "not a file's name"),
        ("a\nb", "not a file's name"),
        ("no/such/folder/file", "there is no folder"),
        ("x" * 300, "too long"),
        ("a\0b", "not a"),
        ("file.txt", "ends with .json"),
    ],
)
def test_a_place_is_checked_before_the_work(name: str, words: str, tmp_path: Path) -> None:
    endings = (".json",) if name == "file.txt" else ()
    with pytest.raises(InputError, match=f"--out: got .*{words}"):
        files.check_target(f"{tmp_path}/{name}" if name else name, "--out", endings)


def test_a_file_has_one_role_in_a_command(tmp_path: Path) -> None:
    own, alias, hard = (tmp_path / name for name in ("own.json", "alias", "hard"))
    own.write_text("{}")
    alias.symlink_to(own)
    hard.hardlink_to(own)
    (tmp_path / "folder").symlink_to(tmp_path)
    for other in (own, alias, hard, tmp_path / "folder" / "own.json"):
        with files.ledger():
            files.read_json(own, SMALL)
            with pytest.raises(InputError, match="also read by this command"):
                files.check_target(other, "--out")
            with pytest.raises(InputError, match="also read by this command"):
                files.replace_text(other, "")
        with files.ledger():
            files.check_target(other, "--out")
            with pytest.raises(InputError, match=r"--out: .* also read by this command"):
                files.read_json(own, SMALL)
            with files.own_output():
                files.read_json(own, SMALL)
        with files.ledger():
            files.check_target(own, "--out")
            with pytest.raises(InputError, match="--out and --report: both would write"):
                files.check_target(other, "--report")
    new = tmp_path / "new.json"
    with files.ledger() as kept:
        files.check_target(new, "--out")
        with pytest.raises(InputError, match="--out and --report"):
            files.check_target(tmp_path / "folder" / "new.json", "--report")
        files.replace_text(new, "1")
        files.replace_text(new, "2")
        assert kept.written == [str(new), str(new)] and new.read_text() == "2"
    assert own.read_text() == "{}"


def test_links_modes_and_owners_stay(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    target.chmod(0o640)
    link.symlink_to("target")
    files.replace_text(link, "after")
    assert link.is_symlink() and target.read_text() == "after"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    target.chmod(0o440)
    with pytest.raises(InputError, match="read-only"):
        files.replace_text(target, "never")
    dangling = tmp_path / "dangling"
    dangling.symlink_to("made")
    files.replace_text(dangling, "new")
    assert dangling.is_symlink() and (tmp_path / "made").read_text() == "new"
    assert (tmp_path / "made").stat().st_mode & 0o111 == 0


def test_a_draft_that_fails_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("before")
    with pytest.raises(RuntimeError), files.replacing(target) as draft:
        draft.write_text("half")
        raise RuntimeError
    with pytest.raises(RuntimeError), files.replacing_all(target, tmp_path / "other") as drafts:
        drafts[0].write_text("half")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert target.read_text() == "before"


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    def fill(draft: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(draft))

    with (
        pytest.raises(InputError, match=r"file: disk full, .* are free; make room"),
        files.replacing(tmp_path / "file") as draft,
    ):
        fill(draft)
    assert not list(tmp_path.iterdir())


def test_drafts_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom kvsim.files import replacing\n"
        "with replacing(Path(sys.argv[1])) as draft:\n"
        "    draft.write_text('half')\n    print(draft, flush=True)\n    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "target")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        draft = Path(child.stdout.readline().strip())
        assert draft.read_text() == "half" and remove_orphans(tmp_path) == 0 and draft.exists()
        files.replace_text(tmp_path / "target", "second writer")
        assert draft.exists()
        child.kill()
    strange = tmp_path / ".kvsim-notes"
    strange.write_text("a user's own file")
    files.replace_text(tmp_path / "another", "next run")
    assert sorted(path.name for path in tmp_path.iterdir()) == [strange.name, "another", "target"]
    assert (tmp_path / "target").read_text() == "second writer"


def test_a_log_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("first\n")
    with files.locked(path):
        files.append(path, "second\n")
        with (
            pytest.raises(InputError, match="another kvsim process"),
            files.locked(path),
        ):
            pass
    assert path.read_text() == "first\nsecond\n"
    files.truncate(path, 6)
    assert path.read_text() == "first\n"
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InputError, match="a pipe"):
        files.append(tmp_path / "fifo", "never")


# Nothing goes around them.

SESSION = ROOT / "kvsim/validate/session"
"""What make.py gpu runs for developers; no command of kvsim comes there."""
METHODS = {
    "open", "fdopen", "read_text", "read_bytes", "write_text", "write_bytes", "memmap", "fromfile",
    "tofile", "savez", "savetxt", "loadtxt", "genfromtxt", "mkstemp", "NamedTemporaryFile",
    "copyfile", "read_csv", "read_parquet", "to_csv", "to_parquet", "write_html", "write_image",
    "truncate", "ftruncate", "symlink_to", "hardlink_to", "touch", "rmtree", "unlink", "mkdir",
    "makedirs", "from_file", "safe_open", "GGUFReader", "OSFile", "ParquetFile", "read_schema",
    "read_table", "write_table", "ParquetWriter",
}  # fmt: skip
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
EXECUTES = {"eval", "exec", "__import__"}
ALLOWED: dict[str, set[str]] = {
    "models/catalogue.py": {"read_text"},  # what ships with kvsim
    "journal.py": {"touch", "unlink"},  # its own file, before and after its output is whole
    "report/explore.py": {"read_text"},  # assets that ship
    "cli/commands.py": {"write_text"},  # of a formatter
    "cli/session.py": {"open", "mkdir"},  # SessionState.open; results' own folder
    "solver.py": {"open"},  # the null device, in place of a solver's output
    "evidence/logs.py": {"read_table"},  # after check_input
    "sweeps/chunks.py": {"write_table"},  # into memory
    "sweeps/store.py": {"write_bytes"},  # a draft
    "cli/app.py": {"open"},  # the null device, in place of a closed stream
    "api/validations.py": {"open"},  # OpenedCheckpoint.open
    "serving/core.py": {"read_bytes"},  # its own source, for the compiler's cache
    "report/page.py": {"read_text"},  # what ships with kvsim
    "report/sweep.py": {"read_table"},  # chunks that this run's store has checked
    "options.py": {"read_text"},  # what ships with kvsim
    "emit/flags.py": {"read_text"},  # what ships with kvsim
    "machines/prices.py": {"read_text"},  # what ships with kvsim
    "techniques/steps.py": {"read_text"},  # what ships with kvsim
    "report/simulate.py": {"read_schema", "write_table"},  # after check_input; a draft
    "frozen.py": {"exec"},  # constructors, as of dataclasses
    "traces/containers.py": {"ParquetFile", "read_csv"},  # of a Source, which was checked
    "traces/source.py": {"open", "OSFile"},  # after opened()
    "traces/read.py": {"open", "ParquetWriter"},  # drafts
    "validate/model/checkpoint.py": {"safe_open", "from_file", "GGUFReader"},  # after check_input
}
"""Calls that look as if they opened a file by themselves, and why they may."""


def sources() -> list[Path]:
    """Every Python file that is installed."""
    return sorted((ROOT / "kvsim").rglob("*.py"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Every node of a module."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def calls(path: Path) -> list[tuple[int, str, ast.Call]]:
    """Names of all functions that a module calls, with their lines."""
    named = [(node, node.func) for node in nodes(path) if isinstance(node, ast.Call)]
    return [
        (node.lineno, function.attr if isinstance(function, ast.Attribute) else function.id, node)
        for node, function in named
        if isinstance(function, ast.Attribute | ast.Name)
    ]


def test_nothing_unpickles_or_executes() -> None:
    for path in sources():
        for node in nodes(path):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").partition(".")[0]]
            assert not PICKLES & set(names), f"{path}:{node.lineno}"  # type: ignore[attr-defined]
        for line, name, call in calls(path):
            where = f"{path}:{line}"
            # constructors made of our own fields' names
            asked_for = path.match("kvsim/frozen.py")
            assert asked_for or not (isinstance(call.func, ast.Name) and name in EXECUTES), where
            assert "allow_pickle" not in {k.arg for k in call.keywords}, where
            whole = ast.unparse(call.func)
            assert whole not in ("torch.load", "np.load", "numpy.load", "pd.read_pickle"), where


def test_nothing_else_opens_files() -> None:
    room = ROOT / "kvsim" / "files.py"
    found: dict[str, set[str]] = {}
    for path in sources():
        if path == room or path.is_relative_to(SESSION):
            continue
        here = path.relative_to(ROOT).as_posix().removeprefix("kvsim/")
        own = {node.name for node in nodes(path) if isinstance(node, ast.FunctionDef)}
        imported = {
            alias.asname or alias.name
            for node in nodes(path)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvsim.")
            for alias in node.names
        }
        for _, name, call in calls(path):
            mine = isinstance(call.func, ast.Name) and name in own | imported
            if name in METHODS and not mine:
                found.setdefault(here, set()).add(name)
    assert {here for here in ALLOWED if not (ROOT / "kvsim" / here).is_file()} == set()
    wrong = {here: names - ALLOWED.get(here, set()) for here, names in found.items()}
    assert not {here: names for here, names in wrong.items() if names}, (
        "open files with kvsim.files"
    )
