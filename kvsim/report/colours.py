"""Colours, symbols and patterns that identify techniques in all charts."""

from functools import cache
from zlib import crc32

from kvsim.frozen import frozen
from kvsim.techniques.notation import terms

PALETTE = ("#5490fc", "#f06c0c", "#789c60", "#b40cb4", "#7830fc", "#786060", "#c078b4", "#cc0c24")
"""Colours at 3:1 on white and on #16181d whose nearest two are 25 apart (CIE 1976; 2.3 is just
visible) for readers with all cones and for those without red, green or blue ones. Found by search;
in grey, symbols, dashes and patterns tell techniques apart."""

SYMBOLS = (
    "circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star",
    "pentagon", "hexagon", "triangle-left", "triangle-right", "hourglass", "bowtie", "star-square",
    "star-diamond", "hexagram", "diamond-tall", "diamond-wide", "octagon", "star-triangle-up",
    "star-triangle-down", "triangle-ne", "triangle-se", "triangle-sw", "triangle-nw", "hexagon2",
    "circle-cross", "square-cross", "diamond-cross", "circle-x", "square-x", "diamond-x",
)  # fmt: skip
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
PATTERNS = ("", "/", "\\", "x", "-", "|", "+", ".")
SYMBOLS_SHOWN = 12  # on a line of many points
ORDER = (
    "full", "offload", "kvpr", "kcache", "specache", "zipcache", "quantspec", "kivi", "h2o",
    "streamingllm", "snapkv", "magicdec", "flexgen", "fastdecode", "fp8", "infllm", "gear",
    "gear-first", "mikv", "quest", "pyramidkv", "duoattention", "shadowkv", "turboquant",
    "kvquant", "eagle", "mtp", "draft", "place", "ngram",
)  # fmt: skip
"""Techniques whose marks stay as they are on pages made before. Any other technique follows behind
them in the order of its name, so that nothing has to be added here."""


@frozen
class Marker:
    """Colour, symbol, dash and fill pattern of a technique."""

    colour: str
    symbol: str
    dash: str
    pattern: str


def bar_style(place: int) -> dict[str, object]:
    """Return the appearance of a part of a stacked bar: a colour and a hatching.

    Parameters
    ----------
    place
        Index of the part in its bar.

    Returns
    -------
    dict
        Plotly's ``marker``.
    """
    turn, within = divmod(place, len(PALETTE))
    hatch = PATTERNS[(within + turn) % len(PATTERNS)]
    return {
        "color": PALETTE[within],
        "pattern": {"shape": hatch, "fillmode": "overlay", "size": 7, "solidity": 0.15},
    }


def line_style(look: Marker) -> dict[str, object]:
    """Return the appearance of a line, with few symbols so that many points stay readable.

    Parameters
    ----------
    look
        Marker of the technique.

    Returns
    -------
    dict
        Properties of a plotly line.
    """
    return {
        "mode": "lines+markers",
        "line": {"color": look.colour, "dash": look.dash, "width": 1.5},
        "marker": {
            "color": look.colour,
            "symbol": look.symbol,
            "size": 8,
            "maxdisplayed": SYMBOLS_SHOWN,
        },
    }


def mark(technique: str) -> Marker:
    """Return the marker of a technique; that of a composition is the marker of its first part.

    Parameters
    ----------
    technique
        Name or notation of the technique.
    """
    name = technique.partition(":")[0].partition(" ")[0].partition("+")[0]
    places = _places()
    return mark_at(places.get(name, len(places) + crc32(name.encode()) % len(SYMBOLS)))


def mark_at(place: int) -> Marker:
    """Return the marker with an index in the order of techniques.

    The first 33 have different symbols; the first 264 differ in symbol or colour.

    Parameters
    ----------
    place
        The index, from 0.
    """
    turn = place // len(PALETTE)
    return Marker(
        PALETTE[place % len(PALETTE)],
        SYMBOLS[place % len(SYMBOLS)],  # pages append "-open" where something does not fit
        DASHES[turn % len(DASHES)],
        PATTERNS[turn % len(PATTERNS)],
    )


@cache
def _places() -> dict[str, int]:
    """Index of every installed technique."""
    names = [*ORDER, *(name for name in terms() if name not in ORDER)]
    return {name: place for place, name in enumerate(names)}
