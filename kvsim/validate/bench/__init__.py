"""Microbenchmarks: every channel and peak of a machine, as ops of known FLOPs and bytes."""
