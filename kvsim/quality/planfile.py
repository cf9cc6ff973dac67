"""A plan as ``kvsim plan --json`` prints it, read back to be run."""

from pathlib import Path

from kvsim.errors import InputError
from kvsim.files import PLAN, check_type, read_json
from kvsim.frozen import frozen
from kvsim.techniques import parse
from kvsim.techniques.technique import Technique


@frozen
class PlanFile:
    """The technique that a plan chose, and its expected quality loss.

    Attributes
    ----------
    technique
        The chosen technique with its settings.
    model
        The model that the plan is for, as it was given.
    batch, prompt, generate
        Workload of the plan. [sequences, tokens, tokens]
    evidence, unit
        Kind of the evidence for the loss, and what the loss is a share of.
    loss, low, high
        Expected relative loss and its 95 % interval; None if nothing was measured.
    """

    technique: Technique
    model: str
    batch: int
    prompt: int
    generate: int
    evidence: str
    unit: str
    loss: float | None
    low: float | None
    high: float | None


def read_plan(path: str) -> PlanFile:
    """Read a plan from a file.

    Parameters
    ----------
    path
        A JSON file of ``kvsim plan --json``.

    Returns
    -------
    PlanFile
        The chosen technique and its expected loss.

    Raises
    ------
    InputError
        If the file cannot be read, or is not a plan for equal requests.
    """
    check_type(path, PLAN)
    if not path.endswith(".json"):
        raise InputError(f"--plan: got {path[:80]!r}; expected a .json file of `kvsim plan --json`")
    technique = parse(path)
    content = read_json(Path(path), PLAN)
    chosen = _table(path, content, "predicted")
    known = _table(path, content, "quality")
    sizes = ("batch", "prompt", "generate")
    batch, prompt, generate = (int(_number(path, chosen, key, 1)) for key in sizes)
    loss, low, high = (
        None if known.get(key) is None else _number(path, known, key)
        for key in ("loss", "low", "high")
    )
    model, said = _text(path, chosen, "model"), _text(path, known, "evidence")
    unit = _text(path, known, "unit")
    return PlanFile(technique, model, batch, prompt, generate, said, unit, loss, low, high)


def _table(path: str, content: object, name: str) -> dict[str, object]:
    found = content.get(name) if isinstance(content, dict) else None
    if not isinstance(found, dict):
        raise _value_error(path, name, found, "what `kvsim plan --json` prints for equal requests")
    return found


def _text(path: str, table: dict[str, object], name: str) -> str:
    if not isinstance(table.get(name), str):
        raise _value_error(path, name, table.get(name), "a text")
    return str(table[name])


def _number(path: str, table: dict[str, object], name: str, low: float = -1e9) -> float:
    value = table.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= 1e9:
        expected = "a number or null" if low < 0 else "a whole number from 1"
        raise _value_error(path, name, value, expected)
    return float(value)


def _value_error(path: str, name: str, value: object, expected: str) -> InputError:
    return InputError(f"{path!r}: {name} is {str(value)[:40]!r}; expected {expected}")
