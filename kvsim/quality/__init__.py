"""Evidence of what lossy techniques cost: published tables, measured runs, per-layer profiles."""
