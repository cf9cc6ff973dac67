"""Choose techniques, placements and batch sizes by mixed-integer programs over plain arrays."""
