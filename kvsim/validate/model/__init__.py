"""A small, fast decoder in PyTorch: architecture, weights, tokeniser, attention, positions."""
