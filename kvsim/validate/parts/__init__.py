"""What implementations of techniques share, and the parts that compositions are made of."""
