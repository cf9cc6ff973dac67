"""How far apart colours are for every reader: CIE 1976 distances after Machado et al. (2009)."""

from itertools import combinations

import numpy as np

SEEN = {
    "all cones": np.eye(3),
    "no red": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                        [-0.003882, -0.048116, 1.051998]]),
    "no green": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                          [-0.011820, 0.042940, 0.968881]]),
    "no blue": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                         [0.004733, 0.691367, 0.303900]]),
}  # fmt: skip
"""Matrices on linear RGB, severity 1: G. Machado et al., "A physiologically-based model for
simulation of color vision deficiency", IEEE TVCG 15 (6), 2009, table 1."""
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.9505, 1.0, 1.089])


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(colour: str, reader: str) -> np.ndarray:
    xyz = TO_XYZ @ np.clip(SEEN[reader] @ linear(colour), 0, 1) / WHITE
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def apart(colours: tuple[str, ...], reader: str) -> tuple[float, str, str]:
    """The two colours that are nearest to each other, and their distance; 2.3 is just visible."""
    return min(
        (float(np.linalg.norm(lab(a, reader) - lab(b, reader))), a, b)
        for a, b in combinations(colours, 2)
    )
