"""Continuous batching in plain Python, pass by pass: what the compiled simulator must equal."""
