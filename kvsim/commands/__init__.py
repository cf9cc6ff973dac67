"""The commands of `kvsim`, one file each: parse, call, print. `kvsim.cli` puts them together.

May import every room but kvsim.cli.
"""
