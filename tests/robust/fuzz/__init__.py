"""Fuzzers of every format that kvsim reads: sound files with a few odd pieces, in this process.

``python -m tests.robust.fuzz --minutes 10`` tries them all for that long together.
"""
