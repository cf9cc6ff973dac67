"""Attention traces: written and read back, refused where anything is off, drawn from as stated."""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsim.errors import InputError
from kvsim.models.configs import load_model
from kvsim.techniques import parse
from kvsim.traces.attention import (
    Acceptance,
    AttentionTrace,
    Prefetch,
    Quality,
    Retrieval,
    Saliency,
    TopK,
    load,
    shipped_traces,
    write,
)

REACHED = tuple(tuple(0.9 * 0.8**i for i in range(gamma)) for gamma in range(1, 7))
TRACE = AttentionTrace(
    model="smollm2-135m",
    weights="random, seed 1; sha256 00ff",
    text="tests, 512 tokens; sha256 ff00",
    tokens=512,
    settings="cpu, fp32",
    layers=2,
    date=date(2026, 11, 21),
    perplexity=17.5,
    quality=(Quality("kivi:bits=2", 18.25, 0.031), Quality("fp8", 17.5, 0.0, 0.5)),
    retrieval=Retrieval(40, 0.75),
    top_k=TopK((1, 8, 64), ((0.2, 0.5, 0.9), (0.1, 0.1, 1.0))),
    prefetch=(Prefetch(64, 2, (0.8, 0.75), (0.9, 1.0)),),
    saliency=(Saliency(0.6, 0.1, (0.9, 0.95)),),
    acceptance=(Acceptance("quantspec:bits=4", 0.7, 1000, REACHED),),
)


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write(path, TRACE)
    assert load(path) == TRACE
    little = replace(TRACE, quality=(), top_k=None, prefetch=(), saliency=(), acceptance=())
    write(path, little)
    assert load(path) == little
    assert [one.name for one in tmp_path.iterdir()] == ["trace.json"]


def test_what_was_not_measured_may_be_left_away(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write(path, TRACE)
    record = json.loads(path.read_text())
    for name in ("quality", "retrieval", "top_k", "prefetch", "saliency", "acceptance"):
        del record[name]
    path.write_text(json.dumps(record))
    found = load(path)
    assert (found.top_k, found.acceptance) == (None, ())


def at(*place: Any, value: Any = ...) -> Callable[[dict[str, Any]], None]:
    """Replace what stands at a place of the record, or take it away."""

    def change(record: Any) -> None:
        for step in place[:-1]:
            record = record[step]
        if value is ...:
            del record[place[-1]]
        else:
            record[place[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (at("format"), '"format": "kvsim attention trace 1"'),
        (at("format", value="kvsim attention trace 2"), "kvsim attention trace 1"),
        (at("model"), "'model' is missing"),
        (at("modle", value="x"), "'modle'|nearest: model"),
        (at("model", value="a\nb"), "model|one line"),
        (at("tokens", value=0), "tokens: got 0|whole number"),
        (at("tokens", value=5.0), "tokens: got 5.0"),
        (at("layers", value=3), "top_k.mass|a list of 3"),
        (at("date", value="21.11.2026"), "date|2026-11-21"),
        (at("perplexity", value=0.5), "perplexity: got 0.5|from 1"),
        (at("quality", value={}), "quality: got {}|a list"),
        (at("quality", 0, "kl", value=-0.1), "quality[0].kl: got -0.1"),
        (at("quality", 1, "found", value=1.5), "quality[1].found: got 1.5|from 0 to 1"),
        (at("retrieval", "found"), "retrieval: 'found' is missing"),
        (at("top_k", "k", value=[8, 1, 64]), "top_k.k|ascending"),
        (at("top_k", "mass", 1, value=[0.5, 0.4, 0.9]), "top_k.mass[1]|mass that rises"),
        (at("top_k", "mass", 0, 2, value=1.5), "top_k.mass[0][2]: got 1.5|from 0 to 1"),
        (at("top_k", "mass", 0, value=[0.5]), "top_k.mass[0]|a list of 3"),
        (at("prefetch", 0, "pairs", value=[0.5] * 3), "prefetch[0].pairs|a list of 2"),
        (at("saliency", 0, "overlap", 1, value=None), "saliency[0].overlap[1]: got None"),
        (at("acceptance", 0, "reached", 5), "acceptance[0].reached|a list of 6"),
        (at("acceptance", 0, "reached", 2, value=[0.9, 0.5]), "reached[2]|a list of 3"),
        (at("acceptance", 0, "reached", 1, value=[0.5, 0.6]), "reached[1]|do not rise"),
        (at("acceptance", 0, "temperature", value=-1), "acceptance[0].temperature: got -1"),
    ],
)
def test_anything_off_is_refused(
    change: Callable[[dict[str, Any]], None], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    write(path, TRACE)
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(InputError) as caught:
        load(path)
    message = str(caught.value)
    assert message.isprintable() and "trace.json" in message
    assert not [word for word in words.split("|") if word not in message], message


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "not valid JSON"), ("[]", "format"), ("{", "not valid JSON"),
     ('{"a": 1, "a": 2}', "'a'|twice"),
     ("[" * 100_000, "nested too deeply"), ("\0", "not valid JSON")],
)  # fmt: skip
def test_files_that_are_none(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load(path)
    assert not [word for word in words.split("|") if word not in str(caught.value)], caught.value
    with pytest.raises(InputError, match=r"none\.json: there is no such file"):
        load(tmp_path / "none.json")
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(InputError, match=r"byte 0 .* is not UTF-8"):
        load(path)


def test_what_load_would_refuse_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for wrong in (replace(TRACE, layers=5), replace(TRACE, perplexity=float("inf"))):
        with pytest.raises(InputError):
            write(path, wrong)
    assert list(tmp_path.iterdir()) == []


def test_rounds_are_drawn_as_measured() -> None:
    (acceptance,) = TRACE.acceptance
    assert acceptance.tokens(3) == pytest.approx(1 + 0.9 + 0.72 + 0.576)
    drawn = acceptance.draw(np.random.default_rng(1), 3, 200_000)
    assert drawn.min() == 1 and drawn.max() == 4
    assert drawn.mean() == pytest.approx(acceptance.tokens(3), rel=0.005)
    for position, share in enumerate(REACHED[2], 1):
        assert (drawn > position).mean() == pytest.approx(share, abs=0.005)
    with pytest.raises(InputError, match="gamma 7 was not measured; expected 1 to 6"):
        acceptance.tokens(7)


def test_what_ships_says_what_it_stands_on() -> None:
    assert "smollm2-135m" in shipped_traces()
    for name, path in shipped_traces().items():
        trace = load(path)
        assert (trace.model, trace.layers) == (name, load_model(name).layers)
        assert "sha256" in trace.weights and "sha256" in trace.text
        assert "cpu, fp32" in trace.settings
        named = [each.technique for each in trace.quality]
        named += [each.technique for each in trace.acceptance]
        assert len({parse(text).name for text in named}) >= 10 and len(trace.quality) >= 30
        assert min(each.rounds for each in trace.acceptance) >= 50
        assert trace.top_k and trace.prefetch and trace.saliency
        assert all(0.99 * trace.perplexity < each.perplexity for each in trace.quality)


def test_one_bit_needs_specaches_zero_point() -> None:
    trace = load(shipped_traces()["smollm2-135m"])
    narrow = {
        t.name: each.perplexity
        for each in trace.quality
        if (t := parse(each.technique)).settings.get("bits") == 1
    }
    assert narrow["kivi"] > 50 * narrow["specache"]
