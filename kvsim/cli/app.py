"""The command-line application; every error is reported in one line."""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from kvsim.cli.commands import COMMANDS, add_command
from kvsim.console import run_on_command_line
from kvsim.errors import InfeasibleError, InputError, missing_dependency
from kvsim.files import Ledger, ledger, remove_own
from kvsim.version import __version__

DONE, LIMIT, BAD, FAULT = 0, 1, 2, 70
MAX_MESSAGE = 1000  # longest message that anyone would read
OUT_OF_MEMORY = "memory ran out; expected a smaller request: fewer points, requests or replicas"


class Stopped(BaseException):
    """Raised when a signal asks the command to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run_command(work: Callable[[], object]) -> int:
    """Run a command, report an error in one line, and return the exit code.

    Exit codes are 0 for success, 1 if limits or checks are not met, 2 for invalid input, 70 for an
    internal error, and 128 plus the number of a signal.

    Parameters
    ----------
    work
        Runs the command; an integer it returns is the exit code.

    Returns
    -------
    int
        The exit code.
    """
    _repair_streams()
    with _stoppable(), ledger() as kept:
        try:
            code = work()
            if code == 128 + signal.SIGINT:  # as typer returns an interrupt
                raise KeyboardInterrupt
            sys.stdout.flush()
        except BaseException as problem:
            code = _code_of(problem, kept)
    return code if isinstance(code, int) else DONE


def leave(code: str | int | None) -> None:
    """Exit the process without joining PyArrow's threads.

    At a normal exit, a PyArrow thread that waits for the interpreter lock could abort the process
    after the command has succeeded.

    Parameters
    ----------
    code
        The exit code, or a message to print, as for ``sys.exit``.
    """
    if not isinstance(code, int) or "pyarrow" not in sys.modules:
        sys.exit(code)
    atexit._run_exitfuncs()
    _silence(code)
    os._exit(code)


def _code_of(problem: BaseException, kept: Ledger) -> int:
    if isinstance(problem, KeyboardInterrupt | typer.Abort | Stopped):
        number = problem.number if isinstance(problem, Stopped) else signal.SIGINT
        return _stopped(number, kept)
    if isinstance(problem, SystemExit):  # the parser's own way for a reader that went away
        if not isinstance(problem.__context__, BrokenPipeError):
            raise problem
        return _silence(128 + signal.SIGPIPE)
    if isinstance(problem, InfeasibleError):
        reason, *remedies = str(problem).splitlines()
        code = _print_error(reason, LIMIT)
        for line in remedies:
            indent = line[: len(line) - len(line.lstrip(" "))]
            typer.echo(f"{indent}{_clean(line)}", err=True)
        return code
    if isinstance(problem, InputError):
        return _print_error(str(problem), BAD)
    if (
        isinstance(problem, ModuleNotFoundError)
        and (mend := missing_dependency(problem.name)) is not None
    ):
        return _print_error(str(mend), BAD)
    if isinstance(problem, BrokenPipeError):  # the reader of our output has what it wanted
        return _silence(128 + signal.SIGPIPE)
    if isinstance(problem, OSError) and problem.strerror:
        place = problem.filename or "standard output"
        return _silence(
            _print_error(f"{place}: {problem.strerror}; expected a place with room", BAD)
        )
    if isinstance(problem, MemoryError) or "allocate memory" in str(problem):
        return _print_error(OUT_OF_MEMORY, BAD)
    if hasattr(problem, "format_message"):  # the parser's own
        context = getattr(problem, "ctx", None)
        command = context.command_path if context else "kvsim"
        said = problem.format_message().rstrip(".?")
        if elsewhere := _commands_with(getattr(problem, "option_name", None)):
            said = f"{said.partition(' (')[0]}; {elsewhere}"
        return _print_error(f"{said}; see {command} --help", BAD)
    return _fault(problem)


def _commands_with(flag: str | None) -> str:
    """Which commands have an option that was given to another; empty if none has it."""
    from kvsim.options import TABLE

    having = dict.fromkeys(name for o in TABLE if o.flag == flag for name in o.commands)
    names = [f"kvsim {name}" for name in having if name != "grid"]
    return f"{flag} is an option of {', '.join(names)}" if names else ""


def _stopped(number: int, kept: Ledger) -> int:
    """A signal's one line: what is on disk, whole, and what is not."""
    signal.signal(number, signal.SIG_IGN)  # the line below is not interrupted again
    for folder in {Path(path).parent for _, path in kept.outputs.values()}:
        remove_own(folder)
    name = signal.Signals(number).name
    said = f"stopped by {name}"
    if kept.outputs:
        whole = list(dict.fromkeys(kept.written))
        said += f"; saved: {', '.join(whole)}" if whole else "; nothing was written"
    return _silence(_print_error(said, 128 + number))


def _fault(problem: BaseException) -> int:
    """A fault of kvsim itself; the place in the code helps to mend it."""
    if os.environ.get("KVSIM_TRACEBACK"):
        raise problem
    place, trace = "", problem.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "kvsim" in code.co_filename:
            place = f"{os.path.basename(code.co_filename)}:{trace.tb_lineno}"  # noqa: PTH119
        trace = trace.tb_next
    what = f"{type(problem).__name__} at {place}: {str(problem)[:200]}"
    return _print_error(
        f"fault in kvsim, please report it ({what}); KVSIM_TRACEBACK=1 shows where", FAULT
    )


def _print_error(message: str, code: int) -> int:
    printable = _clean(message)
    if len(printable) > MAX_MESSAGE:
        printable = f"{printable[: MAX_MESSAGE // 2]} ... {printable[-MAX_MESSAGE // 2 :]}"
    with suppress(OSError):  # that stream may be closed as well
        typer.echo(f"kvsim: {printable}", err=True)
    return code


def _clean(message: str) -> str:
    """A message in one line, without control characters."""
    line = " ".join(message.split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def _silence(code: int) -> int:
    """Keep Python's own flush at exit from failing on what could not be written."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
        except ValueError:  # closed already
            pass
    os.close(nowhere)
    return code


def _repair_streams() -> None:
    """Streams that are closed lead nowhere; characters they cannot encode are escaped."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
        reconfigure = getattr(getattr(sys, name), "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


@contextmanager
def _stoppable() -> Iterator[None]:
    """Signals that end a process let it clean up first; SIGINT does so by itself."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    with suppress(ValueError):  # signals belong to the main thread
        for number in (signal.SIGTERM, signal.SIGHUP):
            if before[number] is not signal.SIG_IGN:  # as nohup leaves it
                signal.signal(number, stop)
    try:
        yield
    finally:
        with suppress(ValueError):
            for number, handler in before.items():
                signal.signal(number, handler)


BEGIN = """\
kvsim says which KV-cache technique to run for a model on a GPU, with which settings, what it gains,
and how sure that is.

Three ways to begin:

  What should I run on my GPU?
    kvsim plan --model meta-llama/Llama-3.1-8B-Instruct --gpu "RTX 4090"

  How fast is it, and does it fit?
    kvsim predict --model Qwen/Qwen3-32B --gpu H100 --technique full,fp8 --batch 1,16 --prompt 8k

  How many GPUs do I need?
    kvsim capacity --model llama3.1-8b --gpus l40s,h100 --prompt 3k --generate 500 --rate 5 \\
      --ttft 2s --tpot 100ms

kvsim --help lists all commands, kvsim plan --help the options of one. Models and GPUs have the
names that Hugging Face, Ollama, nvidia-smi and clouds give them; kvsim models and kvsim gpus list
them."""
"""What `kvsim` alone prints."""

GC_THRESHOLD = 400_000
"""Objects made between two searches for garbage: commands are short and make few cycles, and
Python's 700 cost them 5 % of their time, 50,000 still 3 %."""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvsim {__version__}")
        raise typer.Exit


def _general(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Plan, predict and simulate KV-cache techniques for LLM serving."""


def application(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """Build the command-line application.

    Parameters
    ----------
    names
        Names of the commands to include.

    Returns
    -------
    typer.Typer
        The application.
    """
    app = typer.Typer(
        name="kvsim",
        add_completion=True,
        context_settings={"max_content_width": 100},
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_general)
    for name in names:
        add_command(app, name)
    return app


def main() -> None:
    """Run the command line."""
    gc.set_threshold(GC_THRESHOLD)
    # a plan's matrices are small: threads that NumPy's library starts for large ones would only
    # spin; PyTorch has its own
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    arguments = sys.argv[1:]
    completing = "_KVSIM_COMPLETE" in os.environ
    if not arguments and not completing:
        typer.echo(BEGIN)
        return
    sys.exit(run_command(lambda: _run(_typed() if completing else arguments, arguments)))


def _typed() -> list[str]:
    """What stands on the line that a shell completes, after ``kvsim``."""
    words = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    return words.split()[1:]


def _run(typed: list[str], arguments: list[str]) -> object:
    """Run one command; all of them are put together only to list or to suggest them."""
    app = application(typed[:1] if typed and typed[0] in COMMANDS else COMMANDS)
    with run_on_command_line():
        return app(arguments, prog_name="kvsim", standalone_mode=False)


if __name__ == "__main__":
    main()
