"""What numbers rest on, in words: the basis, its known error, notes, and what is not modelled."""

from kvsim.report.json import Row

NOT_MODELLED = (
    "requests that arrive one by one, and unequal lengths within a batch",
    "the quality of lossy techniques",
    "power caps, clocks that fall under load, and other jobs on the GPU or its host",
    "memory fragmentation, and NUMA placement",
)


def error(basis: Row) -> str:
    """The error known for a basis, in words where none is."""
    return str(basis["error"]) or "not measured yet"


def grounds(basis: Row) -> str:
    """What the numbers rest on, in one sentence."""
    kind = " ".join(filter(None, (basis["kind"], basis["calibrated"])))
    why = f": {basis['chosen']}" if basis["chosen"] else ""
    return (
        f"Basis: {kind}; hardware {basis['hardware']}, stack {basis['stack']}{why}. "
        f"Error where this stack was measured, on rows not seen: {error(basis)}"
    )


def noted(rows: list[tuple[str, Row]]) -> list[str]:
    """Each note once, with the rows it is about unless it is about all of them."""
    about: dict[str, list[str]] = {}
    for label, row in rows:
        for note in row["notes"]:
            about.setdefault(note, []).append(label)
    lines = []
    for note, labels in sorted(about.items(), key=lambda item: -len(item[1])):
        several = f"{labels[0]} and {len(labels) - 1} more" if labels[1:] else labels[0]
        which = "" if len(labels) == len(rows) else f" ({several})"
        lines.append(f"Note{which}: {note}.")
    return lines
