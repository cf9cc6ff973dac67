"""Grids of predictions, plans, simulations and fleets, in chunks, on one machine or a cluster."""
