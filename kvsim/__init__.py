"""Predict and plan key-value cache techniques for large language models."""

__version__ = "0.1.0"
