"""Answers of kvsim as they were when they were last renewed, kept as text.

``python3 make.py renew [KIND[/FILE]]`` computes them anew, prints what moved and by how much, and
writes the files. A change of a file is meant to be seen: say in the commit what moved and why. A
new case is a line ``== NAME`` in a file, which the same command fills.
"""
