"""Mutation testing: one small change of the core's arithmetic at a time, and who notices it.

``python -m benchmarks.mutants`` runs it.
"""
