"""How techniques, their settings and deployments are written."""

import re
from collections.abc import Sequence
from dataclasses import asdict

from kvsim.machines.deployment import Deployment
from kvsim.report.json import Row
from kvsim.techniques import parse
from kvsim.techniques.axes.base import Term
from kvsim.techniques.axes.settings import simplify
from kvsim.techniques.technique import Technique

MIXED_LAYERS = "mixed layers"
NAME_END = re.compile("[ :]")  # of a technique, before its settings
CACHE_FORMAT = re.compile(r"cache[ :]format=")  # before the name that the engine gives it


def label(technique: Technique) -> str:
    """Return a technique's name, or one word where its layers differ.

    Parameters
    ----------
    technique
        Technique to name.

    Returns
    -------
    str
        Name as the tables have it.
    """
    return technique.name if technique.uniform else MIXED_LAYERS


SPOKEN = {"full": "full KV", "place": "mixed placement"}
"""Names that a sentence needs instead of those of the command line."""
HOST_SHARES = {
    "weights_host": "of the weights on the host",
    "host_share": "of the cache on the host",
    "cpu_share": "of the cache attended to by the CPU",
    "split": "of the cache recomputed",
    "weights_disk": "of the host's weights on the disk",
    "cache_disk": "of the host's cache on the disk",
}


def technique_fields(technique: Technique) -> Row:
    """Return a technique with its settings as rows have it.

    Parameters
    ----------
    technique
        Technique of a row.
    """
    return {"technique": label(technique), "params": params(technique)}


def ranks(deployment: Deployment) -> Row:
    """Return over how many GPUs of each kind of rank a deployment is spread.

    Parameters
    ----------
    deployment
        Deployment with its degrees of parallelism.

    Returns
    -------
    Row
        ``tp`` always, the others where there are several.
    """
    every = asdict(deployment.parallelism)
    return {name: count for name, count in every.items() if count > 1 or name == "tp"}


def chosen_settings(name: str, given: Row) -> Row:
    """Return the settings of a technique that are not its defaults.

    Parameters
    ----------
    name
        Name of the technique, as :func:`label` writes it.
    given
        All of its settings, as :func:`params` writes them.

    Returns
    -------
    Row
        Some of the settings.
    """
    usual = {} if name == MIXED_LAYERS else params(parse(name))
    return {key: value for key, value in given.items() if usual.get(key) != value}


def phrase_technique(technique: Technique) -> str:
    """Name a technique in a sentence, with the settings that are not its defaults.

    Parameters
    ----------
    technique
        Technique to name.

    Returns
    -------
    str
        Phrase such as ``mixed placement (50 % of the cache on the host)``.
    """
    if technique.name == "cache":  # the engine's format by its own name
        return str(technique.settings["format"])
    name = SPOKEN.get(technique.name, label(technique))
    if technique.name != "place" or not technique.uniform:
        given = chosen_settings(label(technique), params(technique))
        told = ", ".join(f"{k} {simplify(v)}" for k, v in given.items())
        return f"{name} ({told})" if told else name
    given = {key: technique.settings.get(key, 0) for key in HOST_SHARES}
    shares = [
        f"{100 * value:.0f} % {HOST_SHARES[key]}"
        for key, value in given.items()
        if isinstance(value, float) and 0.005 <= value <= 1
    ]
    return f"{name} ({', '.join(shares)})" if shares else name


def _counts(technique: Technique) -> str:
    """What layers do that differ, and how many of them: 24 fastdecode, 8 full."""
    found: dict[str, int] = {}
    ends = [some.first for some in technique.layers[1:]]
    for some, end in zip(technique.layers, [*ends, None], strict=True):
        last = some.last + 1 if some.last is not None else end
        count = 0 if last is None else last - some.first
        name = " + ".join(_format_term(term) for term in some.terms)
        found[name] = found.get(name, 0) + count
    blocks = "alternating" if len(technique.layers) > 2 * len(found) else "in blocks"
    parts = [f"{count or 'other'} x {name}" for name, count in found.items()]
    return f"{'; '.join(parts)}; {blocks}"


def _format_term(term: Term) -> str:
    """A term with the settings that are not zero."""
    given = [f"{k}={simplify(v)}" for k, v in term.settings.items() if v not in (0, "row", 16)]
    return f"{term.name} {' '.join(given)}".strip()


def params(technique: Technique) -> Row:
    """Return the settings of a technique as a row.

    Parameters
    ----------
    technique
        Technique whose settings are asked for.

    Returns
    -------
    Row
        Settings by name; where layers differ, how many of them do what under ``layers``.
    """
    if not technique.uniform:
        return {"layers": _counts(technique)}
    if technique.name == "place":  # most shares are zero
        return {k: simplify(v) for k, v in technique.settings.items() if v not in (0, "auto")}
    return {k: v if isinstance(v, bool) else simplify(v) for k, v in technique.settings.items()}


def settings(row: Row) -> str:
    """Write the settings of a row's technique, with spaces where a line may end.

    Parameters
    ----------
    row
        Row with ``technique`` and ``params``.

    Returns
    -------
    str
        Settings as ``key=value``, separated by commas.
    """
    return ", ".join(
        f"{k}={simplify(v)}{_resolve_acceptance(row, k, v)}" for k, v in row["params"].items()
    )


def _resolve_acceptance(row: Row, key: str, value: object) -> str:
    """The acceptance that "auto" stands for."""
    if key != "acceptance" or value != "auto":
        return ""
    technique = parse(notation(row))
    drafts = technique.drafts
    return f" ({(technique.tokens_per_round - 1) / drafts:.2f})" if drafts else ""


def spec(row: Row) -> str:
    """Write a row's technique with its settings, with spaces where a line may end.

    Parameters
    ----------
    row
        Row with ``technique`` and ``params``.

    Returns
    -------
    str
        Name and settings.
    """
    return f"{row['technique']} {settings(row)}".strip()


def notation(row: Row) -> str:
    """Write a row's technique with its settings as the command line takes it.

    Parameters
    ----------
    row
        Row with ``technique`` and ``params``.

    Returns
    -------
    str
        Notation that ``kvsim.techniques.parse`` reads.
    """
    listed = ",".join(f"{k}={simplify(v)}" for k, v in row["params"].items())
    return f"{row['technique']}:{listed}" if listed else str(row["technique"])


def short_names(specs: list[str]) -> dict[str, str]:
    """Give techniques short names, numbered where one comes again.

    Parameters
    ----------
    specs
        Techniques with their settings, as :func:`spec` writes them.

    Returns
    -------
    dict
        Short name of each different technique.
    """
    different = list(dict.fromkeys(specs))
    names = [NAME_END.split(CACHE_FORMAT.sub("", text))[0] for text in different]
    return {
        text: name if names.count(name) == 1 else f"{name} #{names[: i + 1].count(name)}"
        for i, (text, name) in enumerate(zip(different, names, strict=True))
    }


def distinct_names(rows: Sequence[Row]) -> list[str]:
    """Name the techniques of rows in a sentence.

    Parameters
    ----------
    rows
        Rows with ``technique`` and ``params``.

    Returns
    -------
    list of str
        A name per row; where a technique comes with other settings, the differing ones too.
    """
    found = []
    for row in rows:
        same = [r["params"] for r in rows if r["technique"] == row["technique"]]
        others = [k for k, v in row["params"].items() if any(p.get(k) != v for p in same)]
        told = ", ".join(f"{k} {simplify(row['params'][k])}" for k in others)
        name = str(row["params"]["format"] if row["technique"] == "cache" else row["technique"])
        found.append(f"{name} ({told})" if told and row["technique"] != "cache" else name)
    return found


def list_settings(names: dict[str, str]) -> list[str]:
    """List the settings behind each short name.

    Parameters
    ----------
    names
        Short names by technique, as :func:`short_names` returns them.

    Returns
    -------
    list of str
        A line for each technique that has settings.
    """
    lines = []
    for text, name in names.items():
        _, *following = NAME_END.split(text, maxsplit=1)
        if following:
            lines.append(f"{name}: {following[0].replace(',', ', ').replace(',  ', ', ')}")
    return lines


def describe_deployment(deployment: Deployment) -> str:
    """Describe a deployment in one line.

    Parameters
    ----------
    deployment
        Model, hardware, stack and weights.

    Returns
    -------
    str
        Model, GPUs, how it is spread over them, stack and format of the weights.
    """
    gpus = f"{deployment.gpus} x " if deployment.gpus > 1 else ""
    where = f"{deployment.model.name} on {gpus}{deployment.hardware.title}"
    where += deployment.parallelism.brackets()
    return f"{where}, stack {deployment.stack.name}, {deployment.weights} weights"
