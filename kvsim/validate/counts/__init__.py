"""What real runs compute, move and keep, counted and held against what techniques state."""
