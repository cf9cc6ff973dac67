"""Traces that break a rule and files that are no traces, with what the message must say."""

import gzip
import json
from typing import Any

import numpy as np
import pyarrow as pa

from tests.support.traces import csv, jsonl

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"
DAY = "2023-11-16 18:15:4"
GOOD = [f"{DAY}{i}.5,100,10" for i in range(4)]
ROW = {"timestamp": 5, "input_length": 1000, "output_length": 7, "hash_ids": [1, 2]}
MANY = "".join(f"\n{DAY}4.5,{hash((i, 7)) % 10**6 + 1},5" for i in range(30_000)).encode()


def azure(*bad: str) -> bytes:
    """Four good rows with the bad ones between them, from line 4 on."""
    return "\n".join([HEAD, *GOOD[:2], *bad, *GOOD[2:]]).encode()


def conduct(*bad: str) -> bytes:
    """Four good rows of a trace with classes and aborts, the bad ones from line 4 on."""
    head = "arrival_s,prompt_tokens,generate_tokens,parent_row,think_s,priority,abort_after_s"
    good = [f"{i},100,10,,,1,5" for i in range(4)]
    return "\n".join([head, *good[:2], *bad, *good[2:]]).encode()


def mooncake(*bad: Any) -> bytes:
    """Four good lines with the bad ones, text or records, from line 3 on."""
    lines = [one if isinstance(one, str) else json.dumps(one) for one in bad]
    return "\n".join([json.dumps(ROW)] * 2 + lines + [json.dumps(ROW)] * 2).encode()


def changed(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in (ROW | values).items() if value is not ...}


# Rows that break a rule: the file, the rule, and what the line must say.
BAD_ROWS: dict[str, tuple[bytes, str, str]] = {
    "a class beyond the last": (conduct("1.5,8,8,,,8,"), "class", "line 4|priority|8"),
    "an abort at once": (conduct("1.5,8,8,,,,0"), "abort", "line 4|abort_after_s|0"),
    "too few columns": (azure(f"{DAY}2.1,5"), "columns", "line 4|2 columns, header has 3"),
    "empty length": (azure(f"{DAY}2.1,5,"), "missing", "line 4|GeneratedTokens|empty"),
    "no date": (azure("yesterday,5,6"), "date", "line 4|TIMESTAMP|'yesterday'|expected a date"),
    "a date with a zone among others": (azure(f"{DAY}2.1Z,5,6"), "date", "line 4|zone"),
    "31 February": (azure("2023-02-31 00:00:00,5,6"), "date", "line 4|2023-02-31"),
    "negative length": (azure(f"{DAY}2.1,-5,6"), "least", "line 4|ContextTokens|-5|at least 1"),
    "zero length": (azure(f"{DAY}2.1,5,0"), "least", "line 4|GeneratedTokens|got 0"),
    "NaN length": (azure(f"{DAY}2.1,nan,6"), "finite", "line 4|ContextTokens|nan"),
    "half a token": (azure(f"{DAY}2.1,5.5,6"), "whole", "line 4|ContextTokens|5.5|whole"),
    "10^9 tokens": (azure(f"{DAY}2.1,1000000000,6"), "most", "line 4|1000000000|100,000,000"),
    "overflow": (azure(f"{DAY}2.1,{'9' * 30},6"), "most", "line 4|ContextTokens"),
    "overflow of a double": (azure(f"{DAY}2.1,1e999,6"), "finite", "line 4|ContextTokens"),
    "text as length": (azure(f"{DAY}2.1,many,6"), "number", "line 4|ContextTokens|'many'"),
    "not UTF-8": (azure(f"{DAY}2.1,#,6").replace(b"#", b"\xff\xfe"), "encoding",
                  "line 4|ContextTokens|UTF-8"),
    "NUL bytes": (azure(f"{DAY}2.1,\0\0,6"), "number", "line 4|ContextTokens"),
    "true as a number": (mooncake(changed(input_length=True)), "type", "line 3|input_length|True"),
    "a list as a number": (mooncake(changed(timestamp=[1])), "type", "line 3|timestamp|[1]"),
    "null": (mooncake(changed(output_length=None)), "missing", "line 3|output_length"),
    "a key that is not there": (mooncake(changed(output_length=...)), "missing", "output_length"),
    "JSON NaN": (mooncake(json.dumps(ROW).replace("1000", "NaN")), "finite", "line 3|nan"),
    "JSON overflow": (mooncake(json.dumps(ROW).replace("1000", "1" + "0" * 400)), "finite", "inf"),
    "negative time": (mooncake(changed(timestamp=-5)), "time", "line 3|timestamp|-5|at least 0"),
    "a JSON list": (mooncake("[1, 2]"), "record", "line 3|[1, 2]|object"),
    "half a line": (mooncake('{"timestamp": 5, "input_len'), "json", "line 3|not JSON"),
    "a key twice": (mooncake('{"timestamp": 5, "timestamp": 6}'), "json", "'timestamp'|twice"),
    "nested without end": (mooncake('{"a":' * 100_000), "json", "line 3|nested"),
    "JSON that is not UTF-8": (mooncake('{"a": "#"}').replace(b"#", b"\xff"), "encoding", "line 3"),
    "blocks as text": (mooncake(changed(hash_ids="1,2")), "blocks", "line 3|hash_ids|'1,2'"),
    "a negative block": (mooncake(changed(hash_ids=[-1])), "blocks", "line 3|[-1]"),
    "no blocks": (mooncake(changed(hash_ids=...)), "missing", "line 3|hash_ids"),
    "more blocks than prompt": (mooncake(changed(hash_ids=[1, 2, 3])), "block count",
                                "line 3|3 blocks for 1000 tokens|--block-tokens"),
}  # fmt: skip

# Files that cannot be read at all, whatever is left out.
BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty|at least one request"),
    "blank": (b"\n \n\n", "is empty"),
    "header only": (HEAD.encode(), "no rows below the header"),
    "header and blank lines": (f"{HEAD}\n\n\n".encode(), "no rows below the header"),
    "no header": ("\n".join(GOOD).encode(), "line 1|header"),
    "unknown columns": (csv("a,b,c", [1], [2], [3]), "line 1|'a', 'b', 'c'|--columns|azure"),
    "a column twice": (csv("arrived_at,num_prefill_tokens,num_prefill_tokens", [1], [2], [3]),
                       "line 1|'num_prefill_tokens'|twice"),
    "a header that is not UTF-8": (b"TIMESTAMP\xff,a,b\n1,2,3\n", "line 1|UTF-8"),
    "UTF-16": (azure().decode().encode("utf-16"), "UTF-16|expected CSV"),
    "unsorted": ("\n".join([HEAD, GOOD[1], GOOD[0]]).encode(),
                 "line 3|TIMESTAMP|1 s before the request above|--sort"),
    "seconds, then milliseconds": (
        csv("arrived_at,num_prefill_tokens,num_decode_tokens",
            [*np.arange(1.0, 21.0), *np.arange(21.0, 41.0) * 1000], [5] * 40, [5] * 40),
        "line 22|arrived_at|21000 after 20|unit changed"),
    "epochs in seconds, then milliseconds": (
        jsonl([{"arrival_time": t, "input_toks": 5, "output_toks": 5}
               for t in (1787267980.5, 1787267981, 1787267982000)]),
        "line 3|arrival_time|unit changed"),
    "milliseconds taken for years": (
        csv("arrived_at,num_prefill_tokens,num_decode_tokens", [0, 10**9], [5, 5], [5, 5]),
        "span|years|--time-unit"),
    "cut gz": (gzip.compress(azure() * 50)[:-20], "gzip data ends too early"),
    "gz of nothing": (gzip.compress(b""), "is empty"),
    "damaged gz": (gzip.compress(azure())[:30] + b"x" * 60, "gzip data is damaged"),
    "cut zst": (pa.Codec("zstd").compress(azure() + MANY, asbytes=True)[:-20],
                "zstd data ends too early"),
    "bzip2": (b"BZh91AY", "bzip2|expected CSV"),
    "zip": (b"PK\x03\x04...", "zip|expected CSV"),
    "cut Parquet": (b"PAR1" + b"\0" * 100, "parquet data is cut off"),
    "an empty list": (b"[]", "an empty list"),
    "a list of numbers": (b"[1, 2]", "item 1|object"),
    "a cut list": (json.dumps([ROW, ROW]).encode()[:-5], "item 2|not JSON"),
    "a list with rubbish": (b'[{"a": 1} {"a": 2}]', "item 1|not JSON"),
    "not JSON from the start": (b'{"timestamp" 5}', "line 1|not JSON"),
    "a first line of another kind": (b'{"a": 1}\n{"a": 2}', "'a'|no known trace format"),
    "lists of unequal length": (b'{"input_lens": [1, 2], "output_lens": [1]}',
                                "unequal length|input_lens 2, output_lens 1"),
    "lists that are none": (b'{"input_lens": 5, "output_lens": 6}', "input_lens: not a list"),
    "only rows of failed requests": (
        csv("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
            [1], ["x"], [5], [0], [5], ["x"]), "all 1 rows were omitted"),
}  # fmt: skip
