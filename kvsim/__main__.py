"""`python -m kvsim` is the command `kvsim`, in a process of its own."""

from kvsim.cli.app import leave, main


def run() -> None:
    """Run the command line and end the process."""
    try:
        main()
    except SystemExit as end:
        leave(end.code)


if __name__ == "__main__":
    run()
