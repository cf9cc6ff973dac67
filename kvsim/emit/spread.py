"""How engines are told to spread a replica over GPUs: stages, copies of attention, experts."""

from typing import TYPE_CHECKING

from kvsim.emit.flags import MANUALS, flag
from kvsim.emit.served import Served

if TYPE_CHECKING:
    from kvsim.emit.engines import EngineSettings


def vllm(served: Served, found: "EngineSettings") -> None:
    """vLLM has as many groups of whole experts as a stage has GPUs, or cuts every expert."""
    s = served.spread
    found.add("--tensor-parallel-size", s.tp)
    if s.pp > 1:
        found.add("--pipeline-parallel-size", s.pp)
    if s.dp > 1:
        found.add("--data-parallel-size", s.dp)
    if s.ep == s.stage > 1:
        found.add("--enable-expert-parallel")
    elif s.ep > 1:
        found.lacks(
            f"{s.ep} groups of whole experts on {s.stage} GPUs: vLLM has --enable-expert-parallel "
            f"for {s.stage} groups alone; ask for --ep {s.stage} or 1"
        )
    _nodes(served, found)


def sglang(served: Served, found: "EngineSettings") -> None:
    """SGLang's ``--tp-size`` counts all GPUs of a stage, whatever attention does with them."""
    s = served.spread
    found.add("--tp-size", s.stage)
    if s.pp > 1:
        found.add("--pp-size", s.pp)
    if s.dp > 1:
        found.add("--dp-size", s.dp)
        found.add("--enable-dp-attention")
    if s.ep > 1:
        found.add("--ep-size", s.ep)
    _nodes(served, found)


def trtllm(served: Served, found: "EngineSettings") -> list[str]:
    """Options of the command, and lines of the file: attention is cut, or copied to every GPU."""
    s, lines = served.spread, list[str]()
    found.add("--tp_size", s.stage)
    if s.pp > 1:
        found.add("--pp_size", s.pp)
    if s.ep > 1:
        found.add("--ep_size", s.ep)
    if s.dp > 1 and s.tp == 1:
        found.used.append(flag("trtllm", "enable_attention_dp"))
        lines.append("enable_attention_dp: true")
    elif s.dp > 1:
        found.lacks(
            f"{s.dp} copies of attention, each cut over {s.tp} GPUs: enable_attention_dp copies it "
            f"to all {s.stage}; ask for --tp 1 --dp {s.stage}"
        )
    _nodes(served, found)
    return lines


def none(served: Served, found: "EngineSettings") -> None:
    """An engine that has no setting for any of it."""
    given = (("--pp", served.spread.pp), ("--dp", served.spread.dp), ("--ep", served.spread.ep))
    words = " ".join(f"{name} {value}" for name, value in given if value > 1)
    if words:
        found.lacks(f"{words}: {MANUALS[found.engine].title} does not spread a model so")


def _nodes(served: Served, found: "EngineSettings") -> None:
    if served.nodes > 1:
        found.lacks(
            f"the addresses of {served.nodes} machines: start the engine on each of them, as its "
            f"manual says for several nodes"
        )
