"""How engines are told to draft: their names of the methods, and what each needs beside."""

from json import dumps
from typing import TYPE_CHECKING

from kvsim.emit.flags import flag
from kvsim.emit.served import Served

if TYPE_CHECKING:
    from kvsim.emit.engines import EngineSettings

VLLM = {"eagle": "eagle3", "mtp": "mtp", "draft": "draft_model", "ngram": "ngram"}
SGLANG = {"eagle": "EAGLE3", "mtp": "NEXTN", "draft": "STANDALONE", "ngram": "NGRAM"}
TRTLLM = {"eagle": "Eagle3", "mtp": "MTP", "draft": "DraftTarget", "ngram": "NGram"}
"""The drafting method that each engine has for a technique."""
ALONE = ("mtp", "ngram")  # drafts without a model of their own
LOOKED_UP = 3  # last tokens that are looked up at most, as the engines' examples have it


def vllm(served: Served, found: "EngineSettings") -> None:
    """The JSON of ``--speculative-config``."""
    for name in VLLM.keys() & served.terms.keys():
        config: dict[str, object] = {"method": VLLM[name]}
        if name not in ALONE:
            config["model"] = "DRAFT_MODEL"
        config["num_speculative_tokens"] = served.drafts
        if name == "ngram":  # without the least, vLLM looks up no fewer than the most
            config |= {"prompt_lookup_max": LOOKED_UP, "prompt_lookup_min": 1}
        found.add("--speculative-config", dumps(config))


def sglang(served: Served, found: "EngineSettings") -> None:
    """Options of the server."""
    for name in SGLANG.keys() & served.terms.keys():
        found.add("--speculative-algorithm", SGLANG[name])
        if name not in ALONE:
            found.add("--speculative-draft-model-path", "DRAFT_MODEL")
        if name != "ngram":
            found.add("--speculative-num-steps", served.drafts)
            found.add("--speculative-eagle-topk", 1)
        found.add("--speculative-num-draft-tokens", served.drafts + 1)
        if served.spread.pp > 1:
            found.lacks("drafting beside --pp-size: SGLang refuses the two together (PR 37154)")
        if name == "ngram" and served.spread.dp > 1:
            found.lacks("n-grams beside --enable-dp-attention: SGLang refuses them (PR 28616)")


def trtllm(served: Served, found: "EngineSettings") -> list[str]:
    """Lines of the YAML file for techniques that draft."""
    lines = []
    for name in TRTLLM.keys() & served.terms.keys():
        settings = {"decoding_type": TRTLLM[name], "max_draft_len": served.drafts}
        if name not in ALONE:
            settings["speculative_model"] = "DRAFT_MODEL"
        if name == "ngram":
            settings["max_matching_ngram_size"] = LOOKED_UP
        found.used += [flag("trtllm", f"speculative_config.{key}") for key in settings]
        lines += ["speculative_config:", *(f"  {key}: {v}" for key, v in settings.items())]
        if name in ("draft", "ngram"):
            found.used.append(flag("trtllm", "disable_overlap_scheduler"))
            lines.append("disable_overlap_scheduler: true")
    return lines


def hf(served: Served, found: "EngineSettings") -> tuple[list[str], list[tuple[str, str]]]:
    """Lines before the call, and its arguments: what a draft model does is set on that model.

    Its confidence would end a round sooner than planned, so it is not asked.
    """
    if "ngram" in served.terms:
        found.used.append(flag("hf", "prompt_lookup_num_tokens"))
        return [], [("prompt_lookup_num_tokens", str(served.drafts))]
    if "draft" not in served.terms:
        return [], []
    settings = {
        "num_assistant_tokens": str(served.drafts),
        "num_assistant_tokens_schedule": '"constant"',
        "assistant_confidence_threshold": "0",
    }
    found.used += [flag("hf", name) for name in ("assistant_model", *settings)]
    lines = [f"draft_model.generation_config.{name} = {value}" for name, value in settings.items()]
    loaded = 'draft_model = AutoModelForCausalLM.from_pretrained("DRAFT_MODEL", dtype="auto")'
    return [loaded, *lines], [("assistant_model", "draft_model")]
