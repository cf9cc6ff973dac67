"""The commands of `kvsim`, one file each: parse, call, print. `kvsim.cli.app` puts them together.

May import every other room.
"""
