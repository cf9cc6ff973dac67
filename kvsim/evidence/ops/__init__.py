"""Stacks learnt from measured GPU operators, and their errors on shapes that no fit saw."""
