"""Where the checkout is, and where measurements lie that the project does not contain."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("KVSIM_SHARED", ROOT.parent / "shared"))
"""Measurements and traces for development; a test that wants one skips where it is missing."""
