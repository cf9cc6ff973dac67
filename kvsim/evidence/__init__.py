"""Comparison with measurements: fits, published tables, errors, and written profiles.

May import serving, prediction and everything below.
"""
