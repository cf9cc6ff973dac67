"""Generators as text: NAME or NAME:KEY=VALUE,..."""

from typing import NamedTuple

from kvsim.errors import InputError, unknown
from kvsim.traces import lengths, prefixes
from kvsim.traces.arrivals import Arrivals, Diurnal, OnOff, Steady
from kvsim.traces.lengths import Lengths, Lognormal
from kvsim.traces.prefixes import Prefixes
from kvsim.traces.read import load
from kvsim.traces.rules import LONGEST_REQUEST

FROM_FILE = "empirical:"


class Setting(NamedTuple):
    """A number in a spec: its default and its range."""

    default: float
    least: float
    most: float


CV = Setting(1.0, 0.0, 100.0)
SECONDS = (1e-3, 1e9)
SIGMA = Setting(0.8, 0.0, 5.0)
SHARE = (0.0, 1.0)

ARRIVALS: dict[str, tuple[type[Arrivals], dict[str, Setting]]] = {
    "poisson": (Steady, {}),
    "gamma": (Steady, {"cv": Setting(2.0, 0.0, 100.0)}),
    "onoff": (OnOff, {"on": Setting(10.0, *SECONDS), "off": Setting(30.0, *SECONDS), "cv": CV}),
    "diurnal": (
        Diurnal,
        {"amplitude": Setting(0.5, *SHARE), "period": Setting(86400.0, *SECONDS), "cv": CV},
    ),
}
LENGTHS: dict[str, dict[str, Setting]] = {
    "lognormal": {
        "prompt": Setting(1024.0, 1.0, LONGEST_REQUEST),
        "prompt_sigma": SIGMA,
        "generate": Setting(160.0, 1.0, LONGEST_REQUEST),
        "generate_sigma": SIGMA,
        "correlation": Setting(0.0, -1.0, 1.0),
    }
}
PREFIXES: dict[str, dict[str, Setting]] = {
    "reuse": {
        "share": Setting(0.7, *SHARE),
        "depth": Setting(0.5, *SHARE),
        "distance": Setting(20.0, 1.0, 1e6),
        "block": Setting(512.0, 1.0, 1e6),
    }
}


def arrivals(text: str) -> Arrivals:
    """An arrival process: poisson, gamma:cv=.., onoff:on=..,off=.. or diurnal:amplitude=..."""
    name, values = _parse("arrivals", text, {name: keys for name, (_, keys) in ARRIVALS.items()})
    return ARRIVALS[name][0](**values)


def joint_lengths(text: str) -> Lengths:
    """Joint lengths: lognormal with medians and sigmas, or empirical:FILE with a trace's."""
    if text.startswith(FROM_FILE):
        return lengths.fit(load(text.removeprefix(FROM_FILE)).requests)
    _, values = _parse("lengths", text, LENGTHS, f"or {FROM_FILE}FILE")
    return Lengths(
        Lognormal(values["prompt"], values["prompt_sigma"]),
        Lognormal(values["generate"], values["generate_sigma"]),
        values["correlation"],
    )


def shared_prefixes(text: str) -> Prefixes:
    """Prefix reuse: `share` of the requests use on average `depth` of their prompt again."""
    _, values = _parse("prefixes", text, PREFIXES)
    return prefixes.reuse(
        int(values["block"]), values["share"], values["depth"], values["distance"]
    )  # fmt: skip


def _parse(
    kind: str, text: str, known: dict[str, dict[str, Setting]], mend: str = ""
) -> tuple[str, dict[str, float]]:
    name, _, rest = text.partition(":")
    if name not in known:
        raise unknown(f"--{kind}", name, known, mend)
    values = {key: setting.default for key, setting in known[name].items()}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if key not in values:
            raise unknown(f"--{kind} {name} setting", key, values)
        setting = known[name][key]
        try:
            number = float(value) if value.isascii() and "_" not in value else float("nan")
        except ValueError:
            number = float("nan")
        if not (equals and setting.least <= number <= setting.most):
            expected = f"a number from {setting.least:g} to {setting.most:g}"
            raise InputError(f"--{kind} {text[:60]!r}: {key} is {value!r}; expected {expected}")
        values[key] = number
    return name, values


DEFAULT = joint_lengths("lognormal")
