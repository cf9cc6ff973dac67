"""Vidur's processed traces; files of lengths alone exist."""

from kvsim.traces.formats.base import TraceFormat

FORMAT = TraceFormat(
    title="Vidur CSV",
    source="https://github.com/microsoft/vidur",
    arrival=(("arrived_at", "s"),),
    prompt=("num_prefill_tokens",),
    generate=("num_decode_tokens",),
    arrives=False,
)
