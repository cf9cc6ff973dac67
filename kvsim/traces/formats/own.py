"""What `kvsim traces convert` and `generate` write; Parquet states the block size besides."""

from kvsim.traces.formats.base import TraceFormat

FORMAT = TraceFormat(
    title="kvsim Parquet or CSV",
    source="docs/traces.md",
    arrival=(("arrival_s", "s"),),
    prompt=("prompt_tokens",),
    generate=("generate_tokens",),
    blocks="block_ids",
    conduct=(
        ("parent", "parent_row"),
        ("think", "think_s"),
        ("priority", "priority"),
        ("abort_after", "abort_after_s"),
    ),
)
