"""Names of techniques, settings and deployments in tables, sentences and command lines."""

import re
from collections.abc import Sequence
from dataclasses import asdict

from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Hardware
from kvsim.report import units
from kvsim.report.json import Row
from kvsim.techniques import parse
from kvsim.techniques.axes.base import Term
from kvsim.techniques.axes.settings import simplify
from kvsim.techniques.technique import MIXED_LAYERS, Technique

NAME_END = re.compile("[ :]")  # of a technique, before its settings
CACHE_FORMAT = re.compile(r"cache[ :]format=")  # before the name that the engine gives it


def join_words(texts: Sequence[str], last: str = "and") -> str:
    """Join texts to a list with commas and a conjunction.

    Parameters
    ----------
    texts
        The texts.
    last
        The conjunction.
    """
    return f" {last} ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))


def label(technique: Technique) -> str:
    """Return the name of a technique in tables.

    Parameters
    ----------
    technique
        The technique.

    Returns
    -------
    str
        Its name; ``"mixed layers"`` if layers use different techniques.
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
    """Return the fields ``technique`` and ``params`` of a row.

    Parameters
    ----------
    technique
        The technique.
    """
    return {"technique": label(technique), "params": params(technique)}


def ranks(deployment: Deployment) -> Row:
    """Return the degrees of parallelism of a deployment.

    Parameters
    ----------
    deployment
        The deployment.

    Returns
    -------
    Row
        ``tp``, and those of ``pp``, ``dp`` and ``ep`` that are larger than 1.
    """
    every = asdict(deployment.parallelism)
    return {name: count for name, count in every.items() if count > 1 or name == "tp"}


def chosen_settings(name: str, given: Row) -> Row:
    """Select the settings that differ from a technique's defaults.

    Parameters
    ----------
    name
        Name of the technique, as :func:`label` returns it.
    given
        All settings, as :func:`params` returns them.

    Returns
    -------
    Row
        The settings that differ.
    """
    usual = {} if name == MIXED_LAYERS else params(parse(name))
    return {key: value for key, value in given.items() if usual.get(key) != value}


def phrase_technique(technique: Technique) -> str:
    """Name a technique in a sentence, together with settings that differ from the defaults.

    Parameters
    ----------
    technique
        The technique.

    Returns
    -------
    str
        For example ``kivi (bits 4)`` or ``mixed placement (50 % of the cache on the host)``.
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
    """Return the settings of a technique as the field ``params`` of a row.

    Parameters
    ----------
    technique
        The technique.

    Returns
    -------
    Row
        Settings by name; if layers differ, ``layers`` with the number of layers of each technique.
    """
    if not technique.uniform:
        return {"layers": _counts(technique)}
    if technique.name == "place":  # most shares are zero
        return {k: simplify(v) for k, v in technique.settings.items() if v not in (0, "auto")}
    return {k: v if isinstance(v, bool) else simplify(v) for k, v in technique.settings.items()}


def settings(row: Row) -> str:
    """Format the settings of a row for a table.

    Parameters
    ----------
    row
        A row with ``technique`` and ``params``.

    Returns
    -------
    str
        Settings such as ``bits=4, group=32``.
    """
    return ", ".join(
        f"{k}={simplify(v)}{_resolve_acceptance(row, k, v)}" for k, v in row["params"].items()
    )


def _resolve_acceptance(row: Row, key: str, value: object) -> str:
    """Return the acceptance rate that the setting ``auto`` stands for, in brackets."""
    if key != "acceptance" or value != "auto":
        return ""
    technique = parse(notation(row))
    drafts = technique.drafts
    return f" ({(technique.tokens_per_round - 1) / drafts:.2f})" if drafts else ""


def spec(row: Row) -> str:
    """Format the technique of a row and its settings for a table.

    Parameters
    ----------
    row
        A row with ``technique`` and ``params``.

    Returns
    -------
    str
        For example ``kivi bits=4, group=32``.
    """
    return f"{row['technique']} {settings(row)}".strip()


def notation(row: Row) -> str:
    """Format the technique of a row and its settings for a command line.

    Parameters
    ----------
    row
        A row with ``technique`` and ``params``.

    Returns
    -------
    str
        For example ``kivi:bits=4,group=32``, which ``kvsim.techniques.parse`` reads.
    """
    listed = ",".join(f"{k}={simplify(v)}" for k, v in row["params"].items())
    return f"{row['technique']}:{listed}" if listed else str(row["technique"])


def short_names(specs: list[str]) -> dict[str, str]:
    """Abbreviate techniques to their names, numbered if a name occurs with different settings.

    Parameters
    ----------
    specs
        Techniques with settings, as :func:`spec` returns them.

    Returns
    -------
    dict
        The short name of each, such as ``kivi #2``.
    """
    different = list(dict.fromkeys(specs))
    names = [NAME_END.split(CACHE_FORMAT.sub("", text))[0] for text in different]
    return {
        text: name if names.count(name) == 1 else f"{name} #{names[: i + 1].count(name)}"
        for i, (text, name) in enumerate(zip(different, names, strict=True))
    }


def distinct_names(rows: Sequence[Row]) -> list[str]:
    """Name the techniques of rows, with those settings that tell rows of one technique apart.

    Parameters
    ----------
    rows
        Rows with ``technique`` and ``params``.

    Returns
    -------
    list of str
        A name for each row.
    """
    found = []
    for row in rows:
        same = [r["params"] for r in rows if r["technique"] == row["technique"]]
        others = [k for k, v in row["params"].items() if any(p.get(k) != v for p in same)]
        told = ", ".join(f"{k} {simplify(row['params'][k])}" for k in others)
        name = name_row(row)
        found.append(f"{name} ({told})" if told and row["technique"] != "cache" else name)
    return found


def name_technique(technique: Technique) -> str:
    """Name a technique in a sentence, without its settings.

    Parameters
    ----------
    technique
        The technique; a cache of an engine is called by its format, as the engine calls it.
    """
    name = str(technique.settings["format"]) if technique.name == "cache" else technique.name
    return SPOKEN.get(name, name)


def name_row(row: Row) -> str:
    """Name the technique of a row in a sentence, without its settings.

    Parameters
    ----------
    row
        A row with ``technique`` and ``params``.
    """
    name = str(row["params"]["format"] if row["technique"] == "cache" else row["technique"])
    return SPOKEN.get(name, name)


def list_settings(names: dict[str, str]) -> list[str]:
    """List the settings that short names stand for.

    Parameters
    ----------
    names
        Short names, as :func:`short_names` returns them.

    Returns
    -------
    list of str
        A line for each technique with settings.
    """
    found = {name: NAME_END.split(text, maxsplit=1)[1:] for text, name in names.items()}
    told = {name: ", ".join(re.split(", ?", rest[0])) for name, rest in found.items() if rest}
    return [f"{name}: {settings}" for name, settings in told.items()]


def describe_price(hardware: Hardware) -> str:
    """Describe the price of one GPU per hour, with its seller and date.

    Parameters
    ----------
    hardware
        A GPU with a price.
    """
    listed, dollars = hardware.listed, units.usd(hardware.price or 0.0)
    whose = f"{listed.seller}, {listed.when}" if listed else "its profile"
    return f"{dollars}/h per {hardware.name} ({whose})"


def describe_deployment(deployment: Deployment) -> str:
    """Describe a deployment in one line.

    Parameters
    ----------
    deployment
        The deployment.

    Returns
    -------
    str
        Model, GPUs, parallelism, stack and weight format.
    """
    gpus = f"{deployment.gpus} x " if deployment.gpus > 1 else ""
    where = f"{deployment.model.name} on {gpus}{deployment.hardware.title}"
    where += deployment.parallelism.brackets()
    return f"{where}, stack {deployment.stack.name}, {deployment.weights} weights"
