"""Settings of engines that only read prompts, or only decode: how the cache goes between them."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvsim.emit.flags import MANUALS, flag
from kvsim.emit.served import Served

if TYPE_CHECKING:
    from kvsim.emit.engines import EngineSettings

Writer = Callable[[Served, "EngineSettings"], str]
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
READS = {"prefill": "read prompts", "decode": "decode"}
KNOWN = ("vllm", "sglang", "trtllm")
BETWEEN = {
    "vllm": "the proxy that sends each request first to one kind of engine and then to the other; "
    "on several machines VLLM_NIXL_SIDE_CHANNEL_HOST of each engine is its own address",
    "sglang": "the addresses in the router's command; on several machines --host of each engine; "
    "on one machine --port and --base-gpu-id of each, and --disaggregation-bootstrap-port of those "
    "that read prompts (8998 if not set)",
    "trtllm": "the orchestrator (trtllm-serve disaggregated) and its list of servers",
}
"""What connects the engines and is not known here."""
ROUTER_PORT = 8000  # the engines' own default is the router's too


def vllm(served: Served, found: "EngineSettings") -> None:
    """The connector by which vLLM's engines hand caches over, which is NIXL's."""
    if served.role:
        role = ROLES[served.role]
        found.add("--kv-transfer-config", f'{{"kv_connector":"NixlConnector","kv_role":"{role}"}}')
    if served.role and served.host_cache:
        found.lacks(
            f"{served.host_gib:g} GiB of host memory beside the transfer: --kv-offloading-size and "
            "--kv-transfer-config set one connector each, and both need vLLM's MultiConnector"
        )


def sglang(served: Served, found: "EngineSettings") -> None:
    """What SGLang's engines do, and that NIXL hands caches over."""
    if served.role:
        found.add("--disaggregation-mode", served.role)
        found.add("--disaggregation-transfer-backend", "nixl")


def router(apart: tuple[int, int], found: "EngineSettings") -> str:
    """The command of SGLang's router, which clients talk to."""
    lines, names = ["python -m sglang_router.launch_router", "  --pd-disaggregation"], ROLES
    for count, role in zip(apart, names, strict=True):
        lines += [f"  --{role} http://{role.upper()}_{i + 1}:30000" for i in range(count)]
    lines += ["  --host 0.0.0.0", f"  --port {ROUTER_PORT}"]
    listed = ("--pd-disaggregation", "--prefill", "--decode", "--host", "--port")
    found.used += [flag("sglang", name) for name in listed]
    return "# in front of them\n" + " \\\n".join(lines)


def trtllm(served: Served, found: "EngineSettings") -> list[str]:
    """Lines of the file: NIXL moves caches, in buffers for the longest prompt."""
    if not served.role:
        return []
    names = ["cache_transceiver_config.backend", "cache_transceiver_config.max_tokens_in_buffer"]
    lines = ["cache_transceiver_config:", "  backend: NIXL"]
    lines.append(f"  max_tokens_in_buffer: {served.max_model_len}")
    known = {x.name for x in found.used}
    if served.role == "prefill" and "disable_overlap_scheduler" not in known:
        names.append("disable_overlap_scheduler")
        lines.append("disable_overlap_scheduler: true")
    found.used += [flag("trtllm", name) for name in names]
    return lines


def both(served: Served, found: "EngineSettings", write: Writer) -> str:
    """Settings of either kind of engine, one after the other."""
    assert served.apart is not None
    if found.engine not in KNOWN:
        title = MANUALS[found.engine].title
        found.lacks(f"prefill and decode on engines of their own: {title} is not written for it")
        return write(served, found)
    parts = []
    for count, role in zip(served.apart, ROLES, strict=True):
        own = type(found)(found.engine)
        text = write(served.as_role(role), own)
        parts.append(f"# {count} of these {READS[role]}\n{text}")
        found.used += [x for x in own.used if x not in found.used]
        found.missing += [x for x in own.missing if x not in found.missing]
    if found.engine == "sglang":
        parts.append(router(served.apart, found))
    found.lacks(BETWEEN[found.engine])
    return "\n\n".join(parts)
