"""The techniques for real: PyTorch runs that predictions are compared with.

Docstrings describe the parameters and results that name, type and summary leave open; a method that
overrides another takes and returns what the overridden one documents. Everywhere in this package:

- ``layer`` or ``index`` is the index of a layer, ``where`` or ``context`` a layer with a part of
  the batch, and ``visit`` a layer with the first sequence of that part;
- ``step`` is the pass that runs (which tokens of which sequences), ``generation`` the run that it
  belongs to, and ``record`` the counter of the op at hand;
- ``span`` are the slots of a pass's new tokens and those in use after it, ``seen`` says which slots
  each query sees, and ``slots`` is how many tokens per sequence a cache has room for;
- queries are (sequences, heads, new, dim), keys and values (sequences, KV heads, tokens, dim),
  hidden states (sequences, new, hidden); attention returns a tensor of the queries' shape;
- counts of tokens or slots are one number per sequence, positions are (sequences, new), and
  ``bits`` is the width of a code;
- ``arch`` and ``model`` have the sizes of a model, ``deployment`` is a model with a machine and a
  stack, ``work`` the random prompts of a workload, and ``place`` the device of a benchmark with how
  much of it may be used.
"""
