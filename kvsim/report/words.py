"""The words of reports as data: ``words.toml`` says what stands in each table."""

import tomllib
from pathlib import Path
from typing import Any

WORDS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
"""Tables by name."""
