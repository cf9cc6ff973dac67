"""Checkpoint of a measurement layer by layer, kept beside its output until it is complete."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import numpy as np

from kvsim.errors import InputError
from kvsim.files import JSON, own_output, read_json, replace_text
from kvsim.graph import Array

WRITE_INTERVAL = 20.0  # seconds between two writes


@dataclass
class Unfinished:
    """Losses by window of every finished run.

    Attributes
    ----------
    path
        Of the file, or nothing where no output was asked for.
    about
        What is measured; a file about something else is not gone on with.
    runs
        By name. (windows,) each [nat per token]
    """

    path: Path | None = None
    about: Mapping[str, object] = field(default_factory=dict)
    runs: dict[str, list[float]] = field(default_factory=dict)
    _written: float = field(default_factory=monotonic)

    @classmethod
    def resume(cls, out: str | None, about: Mapping[str, object]) -> "Unfinished":
        """Read the checkpoint of an earlier call with the same output and questions.

        Parameters
        ----------
        out
            Path of the output; None for none.
        about
            What is measured.
        """
        if out is None:
            return cls()
        path = Path(f"{out}.unfinished")
        try:
            given = read_json(path, JSON)
            same = given["about"] == json.loads(json.dumps(about))
            runs = {str(k): [float(x) for x in v] for k, v in given["runs"].items()}
        except (InputError, ValueError, KeyError, TypeError, AttributeError):
            same, runs = False, {}  # none, or not one of these
        return cls(path, about, runs if same else {})

    def run_losses(self, name: str, windows: int) -> Array | None:
        """Return a run's losses if it is done.

        Parameters
        ----------
        name
            Name of the run.
        windows
            Windows that a whole run has.

        Returns
        -------
        Array | None
            Losses, shape (windows,). [nat per token]
        """
        found = self.runs.get(name, [])
        return np.array(found) if len(found) == windows else None

    def record_run(self, name: str, losses: Array) -> None:
        """Record a run and write the checkpoint.

        Parameters
        ----------
        name
            Name of the run.
        losses
            Loss of each window, shape (windows,). [nat per token]
        """
        self.runs[name] = losses.tolist()
        if self.path is not None and monotonic() - self._written > WRITE_INTERVAL:
            self._written = monotonic()
            with own_output():
                text = json.dumps({"about": dict(self.about), "runs": self.runs})
                replace_text(self.path, text + "\n")

    def remove(self) -> None:
        """Remove the checkpoint once the output is complete."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
