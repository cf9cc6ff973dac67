"""`python -m kvsim` is the command `kvsim`."""

import sys

from kvsim.cli import main

if __name__ == "__main__":
    sys.exit(main())
