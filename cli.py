"""The command line: the commands put together, and every error as one line."""

import os
import sys
from typing import Annotated

import typer

from kvsim import __version__
from kvsim.commands.calibrate import calibrate
from kvsim.commands.doctor import doctor
from kvsim.commands.lists import gpus, models, stacks, techniques
from kvsim.commands.plan import plan
from kvsim.commands.predict import predict
from kvsim.commands.reproduce import reproduce
from kvsim.commands.simulate import simulate
from kvsim.commands.traces import app as traces_app
from kvsim.commands.validate import validate
from kvsim.errors import InfeasibleError, InputError

LINE = 1000  # longest message that anyone would read

app = typer.Typer(
    name="kvsim",
    add_completion=False,
    context_settings={"max_content_width": 100},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(traces_app, name="traces")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvsim {__version__}")
        raise typer.Exit


@app.callback()
def _general(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print it and exit."),
    ] = False,
) -> None:
    """Which KV-cache technique to run, with which settings, what it gains, how sure that is."""


for command in (
    plan, predict, simulate, reproduce, calibrate, validate, doctor,
    models, gpus, techniques, stacks,
):  # fmt: skip
    app.command()(command)


def main() -> None:
    """Run the command line; every error is one line on standard error."""
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="kvsim", standalone_mode=False)
        sys.stdout.flush()
    except InfeasibleError as error:
        code = _fail(str(error), 1)
    except InputError as error:
        code = _fail(str(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BrokenPipeError:  # the reader of our output has what it wanted
        code = _silence(1)
    except OSError as error:
        place = error.filename or "standard output"
        code = _silence(_fail(f"{place}: {error.strerror}; expected a place with room", 2))
    except Exception as error:
        if not hasattr(error, "format_message"):  # not one of the parser's own errors
            raise
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "kvsim"
        code = _fail(f"{error.format_message().rstrip('.?')}; see {command} --help", 2)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    printable = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    if len(printable) > LINE:
        printable = f"{printable[: LINE // 2]} ... {printable[-LINE // 2 :]}"
    typer.echo(f"kvsim: {printable}", err=True)
    return code


def _silence(code: int) -> int:
    """Keep Python's own flush at exit from failing on what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return code


if __name__ == "__main__":
    main()
