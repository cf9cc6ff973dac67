"""`python -m kvsim` is the command `kvsim`."""

from kvsim.cli import main

if __name__ == "__main__":
    main()
