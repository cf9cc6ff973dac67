"""FLOPs, bytes and memory of real runs, counted and compared with predictions."""
