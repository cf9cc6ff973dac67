"""From microbenchmark samples to a hardware profile and a software stack.

It knows no PyTorch: kvsim.validate.bench measures, this room fits.
"""
