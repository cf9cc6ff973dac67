"""Numbers held against measurements: fits, published tables, errors, and the writer of profiles.

May import serving, prediction and everything below.
"""
