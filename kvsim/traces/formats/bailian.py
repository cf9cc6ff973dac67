"""Alibaba's Qwen-Bailian traces: seconds and prefix blocks of 16 tokens."""

from kvsim.traces.formats.base import TraceFormat

FORMAT = TraceFormat(
    title="Alibaba Qwen-Bailian JSONL with prefix blocks",
    source="https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon",
    arrival=(("timestamp", "s"),),
    prompt=("input_length",),
    generate=("output_length",),
    blocks="hash_ids",
    block_tokens=16,
    marks=("chat_id", "parent_chat_id"),
    conduct=(("id", "chat_id"), ("parent", "parent_chat_id")),
)
