"""The techniques that ship, by the file that has their settings; others are being written."""

from pathlib import Path

PLACE = Path(__file__).parents[1] / "techniques" / "settings.txt"
SHIPPED = {line.partition(":")[0] for line in PLACE.read_text(encoding="utf-8").splitlines()}
