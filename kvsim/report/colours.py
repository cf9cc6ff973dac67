"""One mark per technique on every page: a colour, and a shape and a pattern that differ in grey."""

from zlib import crc32

from kvsim.frozen import frozen

PALETTE = (
    "#5490fc", "#f06c0c", "#789c60", "#b40cb4", "#7830fc", "#786060", "#c078b4", "#cc0c24",
)  # fmt: skip
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
NAMES = (
    "full", "offload", "kvpr", "kcache", "specache", "zipcache", "quantspec", "kivi", "h2o",
    "streamingllm", "snapkv", "magicdec", "flexgen", "fastdecode", "fp8", "infllm", "gear",
    "gear-first", "mikv", "quest", "pyramidkv", "duoattention", "shadowkv", "turboquant",
    "kvquant", "eagle", "mtp", "draft", "place", "ngram",
)  # fmt: skip
"""Techniques in the order in which they got their marks, which they keep; others get one too."""


@frozen
class Marker:
    """How a technique is drawn."""

    colour: str
    symbol: str
    dash: str
    pattern: str


def filled(place: int) -> dict[str, object]:
    """How the parts of a bar are drawn that are no techniques: a colour each, hatched for grey."""
    turn, within = divmod(place, len(PALETTE))
    hatch = PATTERNS[(within + turn) % len(PATTERNS)]
    return {
        "color": PALETTE[within],
        "pattern": {"shape": hatch, "fillmode": "overlay", "size": 7, "solidity": 0.15},
    }


def lined(look: Marker) -> dict[str, object]:
    """How a line of many points is drawn: with a few symbols, which differ in grey too."""
    return {
        "mode": "lines+markers",
        "line": {"color": look.colour, "dash": look.dash, "width": 1.5},
        "marker": {
            "color": look.colour, "symbol": look.symbol, "size": 8, "maxdisplayed": SYMBOLS_SHOWN,
        },
    }  # fmt: skip


def mark(technique: str) -> Marker:
    """The mark of a technique; a composition has that of its first part."""
    name = technique.partition(":")[0].partition(" ")[0].partition("+")[0]
    place = NAMES.index(name) if name in NAMES else len(NAMES) + crc32(name.encode()) % 5
    return Marker(
        PALETTE[place % len(PALETTE)],
        SYMBOLS[place],
        DASHES[place // len(PALETTE) % len(DASHES)],
        PATTERNS[place // len(PALETTE) % len(PATTERNS)],
    )
