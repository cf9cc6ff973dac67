"""BurstGPT; a response of 0 tokens is a request that failed."""

from kvsim.traces.formats.base import TraceFormat

FORMAT = TraceFormat(
    title="BurstGPT CSV",
    source="https://github.com/HPMLL/BurstGPT, arXiv:2401.17644",
    arrival=(("Timestamp", "s"),),
    prompt=("Request tokens",),
    generate=("Response tokens",),
    failed="the request failed (0 response tokens)",
)
