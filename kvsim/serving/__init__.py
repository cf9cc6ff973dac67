"""Requests that arrive one by one: continuous batching on predicted step times.

Compiled with Numba 0.61 to 0.68. May import prediction and everything below.
"""
