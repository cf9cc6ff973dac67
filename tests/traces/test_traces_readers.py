"""Every trace format, plain and compressed, whole and in small pieces, gives the same requests."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.errors import InputError
from kvsim.traces import containers, source
from kvsim.traces.formats import TRACE_FORMATS
from kvsim.traces.read import ReadOptions, Trace, load, unit_changes, write
from tests.support.places import SHARED
from tests.support.traces import (
    ARRIVAL,
    BLOCKS,
    GENERATE,
    MODEL,
    PROMPT,
    TRACE_FILES,
    csv,
    jsonl,
    rows,
)


def read(folder: Path, data: bytes, name: str = "trace", **options: Any) -> Trace:
    path = folder / name
    path.write_bytes(data)
    return load(str(path), ReadOptions(**options))


def same(trace: Trace, prompt: list[int] = PROMPT) -> None:
    requests = trace.requests
    assert np.allclose(requests.arrival, ARRIVAL, rtol=0, atol=3e-7)
    assert requests.prompt.tolist() == prompt
    assert requests.generate.tolist() == GENERATE


@pytest.mark.parametrize("packing", ["plain", "gz", "zst"])
@pytest.mark.parametrize("case", TRACE_FILES)
def test_formats_are_recognised_and_read(case: str, packing: str, tmp_path: Path) -> None:
    format, data = TRACE_FILES[case]
    if packing == "gz":
        data = gzip.compress(data[:40]) + gzip.compress(data[40:])  # members, as pigz writes them
    elif packing == "zst":
        data = pa.Codec("zstd").compress(data, asbytes=True)
    trace = read(tmp_path, data)
    assert trace.format == format
    assert trace.left_out.total == 0
    assert trace.notes == ()
    same(trace, [1000, 1500, 7, 90000] if case == "mooncake" else PROMPT)
    if format in ("mooncake", "bailian"):
        assert trace.requests.block_tokens == TRACE_FORMATS[format].block_tokens
        assert [ids.tolist() for ids in trace.requests.blocks()] == [[0, 1], [0, 1, 2], [], [3]]
    same(read(tmp_path, data, format=format), trace.requests.prompt.tolist())


def test_every_format_has_a_file_here_and_a_source() -> None:
    tried = {format for format, _ in TRACE_FILES.values()}
    assert set(TRACE_FORMATS) - tried == {"kvsim", "sharegpt"}  # tested below and with the writer


@pytest.mark.parametrize("arrow", [True, False])
@pytest.mark.parametrize("case", TRACE_FILES)
def test_small_pieces_change_nothing(
    case: str, arrow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does whether PyArrow reads the lines."""
    whole = read(tmp_path, TRACE_FILES[case][1]).requests
    if not arrow:
        for fast in ("_read_csv_block", "_read_json_block"):
            monkeypatch.setattr(containers, fast, lambda *_: None)
    monkeypatch.setattr(source, "BYTES_AT_ONCE", 120)
    monkeypatch.setattr(containers, "CHUNK_ROWS", 2)
    pieces = read(tmp_path, TRACE_FILES[case][1]).requests
    for name in ("arrival", "prompt", "generate", "block_ids", "block_start"):
        assert np.array_equal(getattr(whole, name), getattr(pieces, name)), name


NUMBERS = st.one_of(st.integers(-3, 2000), st.floats(allow_nan=True), st.none(), st.booleans(),
                    st.just("7"), st.just([1]))  # fmt: skip


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=8))
def test_fast_and_slow_json_agree(values: list[tuple[Any, Any, Any]]) -> None:
    """Where Arrow takes a block at all, every value is what the row-by-row reader finds."""
    names = ("timestamp", "input_length", "output_length")
    block = jsonl([dict(zip(names, row, strict=True)) for row in values])
    layout = TRACE_FORMATS["mooncake"]
    from kvsim.traces.formats import choose

    chosen = choose("x", [*names], "mooncake")
    assert layout.blocks and not chosen.blocks
    fast = containers._read_json_block(block, chosen, 0)
    (slow,) = containers._gather("line", chosen, containers._decode_lines(0, block))
    if fast is None:
        return
    assert not fast.torn and not slow.torn
    for name in ("arrival", "prompt", "generate"):
        mine, theirs = getattr(fast, name), getattr(slow, name)
        assert np.array_equal(mine.values, theirs.values, equal_nan=True)
        assert mine.broken.keys() == theirs.broken.keys()


def test_exact_to_100_nanoseconds(tmp_path: Path) -> None:
    times = ["2023-11-16 18:15:46.6805900", "2023-11-16 18:15:46.6805901"]
    data = csv("TIMESTAMP,ContextTokens,GeneratedTokens", times, [1, 1], [1, 1])
    assert read(tmp_path, data).requests.arrival[1] == pytest.approx(1e-7, rel=1e-12)


@pytest.mark.parametrize(
    ("unit", "times"),
    [("s", [3, 3.5, 3.5, 5.25]), ("ms", [3000, 3500, 3500, 5250]),
     ("us", [0, 500000, 500000, 2250000]), ("ns", [0, 5 * 10**8, 5 * 10**8, 225 * 10**7]),
     ("date", ["2024-01-01T00:00:00Z", *["2024-01-01T00:00:00.5Z"] * 2,
               "2024-01-01T00:00:02.25Z"])],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_named_columns_of_any_file(unit: str, times: list[Any], kind: str, tmp_path: Path) -> None:
    columns = {"when": times, "in": PROMPT, "out": GENERATE}
    path = tmp_path / f"mine.{kind}"
    if kind == "csv":
        path.write_bytes(csv("when,in,out", *columns.values()))
    elif kind == "jsonl":
        path.write_bytes(jsonl(rows(**columns)))
    else:
        pq.write_table(pa.table(columns), path)
    named = {"arrival": "when", "prompt": "in", "generate": "out"}
    same(load(str(path), ReadOptions(columns=named, time_unit=unit)))
    with pytest.raises(InputError, match="of no known trace format"):
        load(str(path))


def test_parquet_timestamps_and_lists(tmp_path: Path) -> None:
    times = pa.array([1_000_000, 1_500_000, 1_500_000, 3_250_000], pa.timestamp("us", "UTC"))
    table = pa.table({"t": times, "p": PROMPT, "g": GENERATE, "b": BLOCKS})
    path = tmp_path / "mine.parquet"
    pq.write_table(table, path)
    named = {"arrival": "t", "prompt": "p", "generate": "g", "blocks": "b"}
    trace = load(str(path), ReadOptions(columns=named, block_tokens=256))
    same(trace)
    assert [ids.tolist() for ids in trace.requests.blocks()] == [[0, 1], [0, 1, 2], [], [3]]
    with pytest.raises(InputError, match="--block-tokens"):
        load(str(path), ReadOptions(columns=named))


def test_lengths_alone_arrive_as_one_batch_and_this_is_said(tmp_path: Path) -> None:
    for data in (
        csv("num_prefill_tokens,num_decode_tokens,total_tokens", PROMPT, GENERATE, PROMPT),
        json.dumps({"input_lens": PROMPT, "output_lens": GENERATE}).encode(),
    ):
        trace = read(tmp_path, data)
        assert trace.requests.arrival.tolist() == [0.0] * 4
        assert trace.requests.prompt.tolist() == PROMPT
        assert "no arrival times; all requests arrive at 0 s" in trace.notes[0]


def test_conversations_are_text_and_need_characters_per_token(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "x" * 41}, {"from": "gpt", "value": "y" * 12},
             {"from": "human", "value": "z"}]  # fmt: skip
    data = json.dumps([{"id": "a", "conversations": turns}, {"id": "b", "conversations": turns}])
    with pytest.raises(InputError, match=r"holds text, not token counts.*--chars-per-token"):
        read(tmp_path, data.encode())
    trace = read(tmp_path, data.encode(), chars_per_token=4.0)
    assert (trace.requests.prompt.tolist(), trace.requests.generate.tolist()) == ([11] * 2, [3] * 2)
    assert any("estimates, 4 characters per token" in note for note in trace.notes)
    short = json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]).encode()
    with pytest.raises(InputError, match="item 2: conversations: fewer than two turns"):
        read(tmp_path, short, chars_per_token=4.0)
    assert read(tmp_path, short, chars_per_token=4.0, skip_bad=True).left_out.total == 1


def test_failed_requests_are_left_out_and_counted(tmp_path: Path) -> None:
    data = csv("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
               [5.0, 5.1, 5.5, 5.5, 7.25], MODEL * 1 + ["x"], [374, 5, *PROMPT[1:]],
               [44, 0, *GENERATE[1:]], PROMPT * 1 + [1], MODEL * 1 + ["x"])  # fmt: skip
    trace = read(tmp_path, data)
    same(trace)
    assert trace.left_out.counts == {"failed": 1}
    assert "line 3" in trace.notes[0] and "the request failed" in trace.notes[0]


def test_sorting_is_asked_for_and_stable(tmp_path: Path) -> None:
    data = jsonl(rows(timestamp=[2250, 0, 500, 500], input_length=[90000, 1000, 1500, 7],
                      output_length=[9, 44, 1, 512],
                      hash_ids=[[4], [5, 6], [5, 6, 9], []]))  # fmt: skip
    with pytest.raises(InputError, match=r"line 2, column 'timestamp': arrives 2.25 s before"):
        read(tmp_path, data)
    trace = read(tmp_path, data, sort=True)
    same(trace, [1000, 1500, 7, 90000])
    assert [ids.tolist() for ids in trace.requests.blocks()] == [[0, 1], [0, 1, 2], [], [3]]


@pytest.mark.parametrize("factor", [1e3, 1e6, 1e9])
def test_a_change_of_unit_is_seen_and_a_pause_is_not(factor: float) -> None:
    times = np.cumsum(np.random.default_rng(1).exponential(1.0, 40))
    assert unit_changes(times, 0.0) is None
    mixed = np.concatenate([times[:20], times[20:] * factor])
    assert unit_changes(mixed, 0.0) == 20
    paused = np.concatenate([times[:20], times[20:] + factor * times[19]])
    assert unit_changes(paused, 0.0) is None
    epoch = 1.7e9 + times
    assert unit_changes(epoch, epoch[0]) is None
    assert unit_changes(np.concatenate([epoch[:20], epoch[20:] * factor]), epoch[0]) == 20


def test_the_public_traces() -> None:
    if not SHARED.is_dir():
        pytest.skip("needs the public traces beside the checkout")
    azure = load(str(SHARED / "traces" / "azure_conv_2023.csv"))
    assert (azure.format, len(azure.requests)) == ("azure", 19366)
    assert load(str(SHARED / "traces" / "sharegpt300_lengths.csv")).requests.prompt[0] == 2358
    run = load(str(SHARED / "measured" / "RTX4090_Llama-3.1-8B_requests.jsonl"))
    assert (run.format, len(run.requests)) == ("llmservingsim", 300)


CONDUCT = "arrival_s,prompt_tokens,generate_tokens,parent_row,think_s,priority,abort_after_s\n"


def test_turns_classes_and_aborts_are_read_and_written(tmp_path: Path) -> None:
    text = CONDUCT + "0,8,8,,,,\n1,8,8,0,2.5,1,30\n1,8,8,0,,7,\n2,8,8,9,1,0,0.5\n"
    found = read(tmp_path, text.encode(), "own.csv").requests
    for name in ("trace.csv", "trace.parquet"):
        write(tmp_path / name, found)
        again = load(str(tmp_path / name)).requests
        for requests in (found, again):
            assert requests.parent is not None and requests.think is not None
            assert requests.priority is not None and requests.abort_after is not None
            assert requests.parent.tolist() == [-1, 0, 0, -1]  # row 9 is not there
            assert requests.think.tolist() == [0, 2.5, 0, 1]
            assert requests.priority.tolist() == [0, 1, 7, 0]
            assert requests.abort_after.tolist() == [np.inf, 30, np.inf, 0.5]
    with pytest.raises(InputError, match=r"holds no turns, classes or aborts.*\.parquet or \.csv"):
        write(tmp_path / "trace.jsonl", found)


@pytest.mark.parametrize("small", [False, True])
def test_sessions_and_parents_by_their_ids(small: bool, tmp_path: Path) -> None:
    chats = rows(t=[0.0, 1.0, 2.0, 3.0], i=[9] * 4, o=[5] * 4, s=[7, 8, 7, 7], key=[11, 12, 13, 14],
                 before=[-1, 11, 11, None if small else 13])  # fmt: skip
    for columns, parents in (
        ({"session": "s"}, [-1, -1, 0, 2]),
        ({"id": "key", "parent": "before"}, [-1, 0, 0, -1 if small else 2]),
    ):
        named = {"arrival": "t", "prompt": "i", "generate": "o", **columns}
        requests = read(tmp_path, jsonl(chats), columns=named).requests
        assert requests.parent is not None
        assert requests.parent.tolist() == parents
    sorted_late = read(tmp_path, jsonl(chats[::-1]), columns=named, sort=True).requests
    assert sorted_late.parent is not None
    assert sorted_late.parent.tolist() == parents


def test_bailian_turns_follow_their_parents(tmp_path: Path) -> None:
    chats = rows(chat_id=[1, 2, 3], parent_chat_id=[-1, 1, 2], timestamp=[0.0, 1.0, 9.0],
                 input_length=[20] * 3, output_length=[4] * 3, type=["text"] * 3, turn=[1, 2, 3],
                 hash_ids=[[1], [1], [1]])  # fmt: skip
    requests = read(tmp_path, jsonl(chats)).requests
    assert requests.parent is not None
    assert requests.parent.tolist() == [-1, 0, 1]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("1,8,8,1,,,", "request 2 follows request 2, which does not precede it"),
        ("1,8,8,,-1,,", "column 'think_s': got -1; expected a time of at least 0"),
    ],
)
def test_bad_turns_classes_and_aborts_are_named(row: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        read(tmp_path, f"{CONDUCT}0,8,8,,,,\n{row}\n".encode(), "own.csv")


def test_dates_of_several_zones_are_one_clock(tmp_path: Path) -> None:
    file = tmp_path / "zones.csv"
    dates = ("2024-05-01 12:00:00Z", "2024-05-01 17:30:01+05:30", "2024-05-01 04:30:02-0730")
    rows = "".join(f"{date},100,5\n" for date in dates)
    file.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    assert load(str(file)).requests.arrival.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("zone", ["", "Z", "+05:30"])
def test_a_leap_second_is_the_first_of_the_next_minute(tmp_path: Path, zone: str) -> None:
    file = tmp_path / "leap.csv"
    minute = "05:29" if zone.startswith("+") else "23:59"
    dates = [f"2016-12-31 {minute}:{second}" for second in ("59.5", "60", "60.25")]
    rows = "".join(f"{date}{zone},100,5\n" for date in dates)
    file.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    assert load(str(file)).requests.arrival.tolist() == [0.0, 0.5, 0.75]
    file.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n2016-12-31 12:34:60{zone},1,5\n")
    with pytest.raises(InputError, match="expected a date"):
        load(str(file))
