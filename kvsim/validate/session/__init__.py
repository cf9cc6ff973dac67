"""Sessions on a GPU that is available for minutes: work by priority, kept in one file.

``python3 make.py gpu`` runs it with the Python that runs it; no other package of the project's
lists is needed than PyTorch, Triton, NumPy, SciPy and Typer. ``work`` lists the units and does one
in a worker process, ``queue`` decides which is next, ``state`` keeps results and packs them into a
bundle; ``kvsim.report.session`` makes the page of it.
"""
