"""From a technique's steps to TTFT, TPOT, throughput, memory and the largest batch.

May import techniques and everything below. The room is not called predict, because `kvsim.predict`
is the function of the Python interface.
"""
