"""Packed keys and values: quantisers, attention over them, gathers and selection.

Every kernel is written twice: in Triton for GPUs, and in plain PyTorch. The PyTorch twin runs on
CPU tensors and is what the kernel is tested against.
"""
