"""Mooncake traces: milliseconds and prefix blocks of 512 tokens."""

from kvsim.traces.formats.base import TraceFormat

FORMAT = TraceFormat(
    title="Mooncake JSONL with prefix blocks",
    source="https://github.com/kvcache-ai/Mooncake, FAST'25",
    arrival=(("timestamp", "ms"),),
    prompt=("input_length",),
    generate=("output_length",),
    blocks="hash_ids",
    block_tokens=512,
)
