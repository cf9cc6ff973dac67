"""The attention traces that come with kvsim, found without reading any."""

from importlib.resources import files
from pathlib import Path


def measured() -> dict[str, Path]:
    """Model and file of each attention trace that ships with kvsim."""
    folder = Path(str(files("kvsim.traces"))) / "measured"
    return {path.stem: path for path in sorted(folder.glob("*.json"))}
