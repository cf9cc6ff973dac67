"""The techniques for real: PyTorch runs that predictions are compared with."""
