"""LLMServingSim workloads and the logs of its vLLM runs."""

from kvsim.traces.formats.base import TraceFormat

FORMAT = TraceFormat(
    title="LLMServingSim JSONL, workload or measured run",
    source="https://github.com/casys-kaist/LLMServingSim",
    arrival=(("arrival_time_ns", "ns"), ("arrival_time_s", "s"), ("arrival_time", "s")),
    prompt=("input_toks",),
    generate=("output_toks",),
)
