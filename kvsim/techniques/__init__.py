"""The registry of techniques, and how their settings are written.

``name`` or ``name:key=value,key=value``, as ``kvpr:split=512,schedule=column``.
"""

import re
from dataclasses import fields
from typing import Any

from kvsim.errors import InputError, unknown
from kvsim.techniques.base import Technique
from kvsim.techniques.fastdecode import Fastdecode
from kvsim.techniques.flexgen import Flexgen
from kvsim.techniques.fp8 import Fp8
from kvsim.techniques.full import Full
from kvsim.techniques.gear import Gear
from kvsim.techniques.gear_first import GearFirst
from kvsim.techniques.h2o import H2o
from kvsim.techniques.infllm import Infllm
from kvsim.techniques.kcache import Kcache
from kvsim.techniques.kivi import Kivi
from kvsim.techniques.kvpr import Kvpr
from kvsim.techniques.magicdec import Magicdec
from kvsim.techniques.mikv import Mikv
from kvsim.techniques.offload import Offload
from kvsim.techniques.quantspec import Quantspec
from kvsim.techniques.snapkv import Snapkv
from kvsim.techniques.specache import Specache
from kvsim.techniques.streamingllm import Streamingllm
from kvsim.techniques.zipcache import Zipcache

TECHNIQUES: dict[str, type[Technique]] = {
    "full": Full,
    "offload": Offload,
    "kvpr": Kvpr,
    "kcache": Kcache,
    "specache": Specache,
    "zipcache": Zipcache,
    "quantspec": Quantspec,
    "kivi": Kivi,
    "h2o": H2o,
    "streamingllm": Streamingllm,
    "snapkv": Snapkv,
    "magicdec": Magicdec,
    "flexgen": Flexgen,
    "fastdecode": Fastdecode,
    "fp8": Fp8,
    "infllm": Infllm,
    "gear": Gear,
    "gear-first": GearFirst,
    "mikv": Mikv,
}


def parse(text: str) -> Technique:
    """Read ``name:key=value,key=value``.

    Raises
    ------
    InputError
        For unknown names and keys, and for values a parameter does not take.
    """
    name, _, settings = text.strip().partition(":")
    if name.lower() not in TECHNIQUES:
        raise unknown("technique", name, TECHNIQUES, "see `kvsim techniques`")
    kind = TECHNIQUES[name.lower()]
    known = {f.name for f in fields(kind)}
    given: dict[str, Any] = {}
    for item in filter(None, settings.split(",")):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not value:
            raise InputError(f"{name}: {item!r}; expected key=value, as in {_example(kind)}")
        if key not in known:
            raise unknown(f"parameter of {name}", key, known, f"as in {_example(kind)}")
        if key in given:
            raise InputError(f"{name}: {key} is given twice; keep one")
        given[key] = _value(value)
    return kind(**given)


def parse_several(text: str) -> list[Technique]:
    """Read ``full,kivi:bits=4,group=32,kvpr``; spaces may stand for commas between techniques.

    Raises
    ------
    InputError
        As ``parse``, and for a technique that comes twice.
    """
    specs: list[str] = []
    for item in filter(None, re.split(r"[,\s]+", text)):
        if "=" in item and ":" not in item and specs:
            specs[-1] += f",{item}"
        else:
            specs.append(item)
    found = [parse(one) for one in specs]
    for t in found:
        if found.count(t) > 1:
            raise InputError(f"{t.name}: the same technique twice; leave out one, or change it")
    return found


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def _example(kind: type[Technique]) -> str:
    return str(kind())


def candidates(acceptance: float | None = None) -> list[Technique]:
    """Every technique with its defaults, speculative ones with a measured acceptance if given."""
    given = {} if acceptance is None else {"acceptance": acceptance}
    return [
        kind(**{k: v for k, v in given.items() if k in kind.__dataclass_fields__})
        for kind in TECHNIQUES.values()
    ]
