"""Where the command line was once; kvsim/cli/ has it."""

from kvsim.cli.app import main  # noqa: F401
