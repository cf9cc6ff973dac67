"""Results of `vllm bench serve --save-detailed` and SGLang's twin: one object of arrays per run."""

from collections.abc import Iterator

from kvsim.errors import InputError
from kvsim.traces.formats.base import Record, TraceFormat

ARRAYS = ("start_times", "input_lens", "output_lens")


def unpack(run: Record) -> Iterator[Record]:
    """One row per request of a run."""
    arrays = {name: run[name] for name in ARRAYS if name in run}
    for name, values in arrays.items():
        if not isinstance(values, list):
            raise InputError(f"{name}: not a list; expected one number per request")
    if len(set(map(len, arrays.values()))) > 1:
        lengths = ", ".join(f"{name} {len(values)}" for name, values in arrays.items())
        raise InputError(f"lists of unequal length: {lengths}; expected one entry per request")
    for values in zip(*arrays.values(), strict=True):
        yield dict(zip(arrays, values, strict=True))


FORMAT = TraceFormat(
    title="vLLM or SGLang benchmark result, JSON or JSONL",
    source="https://docs.vllm.ai, vllm bench serve --save-result --save-detailed",
    arrival=(("start_times", "s"),),
    prompt=("input_lens",),
    generate=("output_lens",),
    arrives=False,
    failed="the request failed (0 output tokens)",
    unpack=unpack,
)
