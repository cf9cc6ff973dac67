"""The techniques for real: PyTorch runs that predictions are compared with.

Docstrings describe the parameters and results that name, type and summary leave open. Everywhere in
this package ``layer`` is the index of a layer, ``step`` the pass that runs (which tokens of which
sequences), ``span`` its slots in a cache, ``seen`` what each of its queries sees of them,
``record`` what the op at hand says of itself, and ``visit`` a layer with the first sequence of the
part of the batch that passes through it. Queries are (sequences, heads, new, dim), keys and values
(sequences, KV heads, tokens, dim), hidden states (sequences, new, hidden); attention returns a
tensor of the queries' shape. ``deployment`` is a model with a machine and a stack, ``work`` the
sequences and tokens of a workload, ``where`` a layer with a part of the batch. Counts of tokens or
slots are one number per sequence, positions are (sequences, new), and ``bits`` is the width of a
code.
"""
