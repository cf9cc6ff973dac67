"""Measurements of kvsim: one file for each subject, run by `python -m benchmarks.NAME`."""
