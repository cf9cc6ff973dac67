"""ShareGPT conversations: text, so tokens are characters divided by `--chars-per-token`.

As in vLLM's benchmark, a request is a conversation's first turn and its answer.
"""

from collections.abc import Iterator

from kvsim.errors import InputError
from kvsim.traces.formats.base import Record, TraceFormat


def unpack(conversation: Record) -> Iterator[Record]:
    """The characters of the first two turns."""
    turns = conversation.get("conversations", conversation.get("conversation"))
    if not isinstance(turns, list):
        raise InputError("conversations: not a list; expected turns")
    if len(turns) < 2:
        raise InputError("conversations: fewer than two turns; expected a question and an answer")
    texts = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
    if not all(isinstance(text, str) for text in texts):
        raise InputError('conversations: a turn without text; expected {"from": .., "value": ..}')
    yield {"prompt": len(texts[0] or ""), "generate": len(texts[1] or "")}


FORMAT = TraceFormat(
    title="ShareGPT conversations, JSON or JSONL",
    source="https://github.com/vllm-project/vllm/tree/main/benchmarks",
    arrival=(),
    prompt=("prompt",),
    generate=("generate",),
    marks=("conversations",),
    arrives=False,
    unpack=unpack,
)
