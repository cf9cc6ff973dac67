"""From microbenchmark samples to a hardware profile and a software stack; knows no PyTorch."""
