"""The minutes that a GPU is there: units of work, each on disk when it is done.

``python3 make.py gpu`` runs them with the Python that runs it; no other package of the project's
lists is needed than PyTorch, Triton, NumPy, SciPy and Typer. ``run`` decides what is done next,
``units`` lists what there is, ``work`` does it in a process of its own, ``report`` collects it.
"""
