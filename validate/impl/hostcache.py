"""What offloading shares: a cache in host memory that visits the GPU layer by layer.

A layer's cache is stored slot by slot, (slots, sequences x KV heads, dim), so that any range of
tokens is one contiguous copy. Two buffers on the GPU take turns: while one layer is attended to,
the next one arrives in the other.
"""
