"""Published heads: the checkpoints that draft for a model, by the method they were trained for.

A head drafts for the one model whose hidden states it was trained on. Where none is known, a plan
does not draft so and no command is written for it, unless the user names a head of their own.
"""

from collections.abc import Mapping

from kvsim.errors import InputError, unknown
from kvsim.machines.deployment import Deployment
from kvsim.techniques.technique import Technique

EAGLE3_HEADS: Mapping[str, str] = {
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",
    "lmsys/vicuna-13b-v1.3": "yuhuili/EAGLE3-Vicuna1.3-13B",
    "meta-llama/Llama-3.1-8B-Instruct": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
    "meta-llama/Llama-3.3-70B-Instruct": "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": "nvidia/Llama-4-Maverick-17B-128E-Eagle3",
    "moonshotai/Kimi-K2-Instruct": "AQ-MedAI/Kimi-K2-Instruct-eagle3",
    "openai/gpt-oss-20b": "RedHatAI/gpt-oss-20b-speculator.eagle3",
    "openai/gpt-oss-120b": "nvidia/gpt-oss-120b-Eagle3",
    "Qwen/Qwen3-1.7B": "AngelSlim/Qwen3-1.7B_eagle3",
    "Qwen/Qwen3-4B": "AngelSlim/Qwen3-4B_eagle3",
    "Qwen/Qwen3-8B": "AngelSlim/Qwen3-8B_eagle3",
    "Qwen/Qwen3-14B": "AngelSlim/Qwen3-14B_eagle3",
    "Qwen/Qwen3-32B": "AngelSlim/Qwen3-32B_eagle3",
    "Qwen/Qwen3-30B-A3B": "AngelSlim/Qwen3-a3B_eagle3",
    "Qwen/Qwen3-235B-A22B": "nvidia/Qwen3-235B-A22B-Eagle3",
}
HEADS: Mapping[str, Mapping[str, str]] = {
    "eagle": EAGLE3_HEADS,  # both stand for EAGLE-3
    "eagle3": EAGLE3_HEADS,
    "eagle2": {
        "meta-llama/Meta-Llama-3-8B-Instruct": "yuhuili/EAGLE-LLaMA3-Instruct-8B",
        "meta-llama/Meta-Llama-3-70B-Instruct": "yuhuili/EAGLE-LLaMA3-Instruct-70B",
        "meta-llama/Llama-3.1-8B-Instruct": "yuhuili/EAGLE-LLaMA3.1-Instruct-8B",
        "mistralai/Mixtral-8x7B-Instruct-v0.1": "yuhuili/EAGLE-mixtral-instruct-8x7B",
        "Qwen/Qwen2-7B-Instruct": "yuhuili/EAGLE-Qwen2-7B-Instruct",
        "Qwen/Qwen2-72B-Instruct": "yuhuili/EAGLE-Qwen2-72B-Instruct",
    },
    "p-eagle": {
        "openai/gpt-oss-20b": "amazon/gpt-oss-20b-p-eagle",
        "openai/gpt-oss-120b": "amazon/gpt-oss-120b-p-eagle-long-context",
    },
    "medusa": {
        f"lmsys/vicuna-{size}-v1.3": f"FasterDecoding/medusa-vicuna-{size}-v1.3"
        for size in ("7b", "13b", "33b")
    },
    "dflash": {
        "meta-llama/Llama-3.1-8B-Instruct": "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
        "MiniMaxAI/MiniMax-M2.5": "z-lab/MiniMax-M2.5-DFlash",
        "moonshotai/Kimi-K2.5": "z-lab/Kimi-K2.5-DFlash",
        "openai/gpt-oss-20b": "z-lab/gpt-oss-20b-DFlash",
        "openai/gpt-oss-120b": "z-lab/gpt-oss-120b-DFlash",
        "Qwen/Qwen3-4B": "z-lab/Qwen3-4B-DFlash-b16",
        "Qwen/Qwen3-8B": "z-lab/Qwen3-8B-DFlash-b16",
        "Qwen/Qwen3-Coder-30B-A3B-Instruct": "z-lab/Qwen3-Coder-30B-A3B-DFlash",
        "Qwen/Qwen3.5-27B": "z-lab/Qwen3.5-27B-DFlash",
        "Qwen/Qwen3.5-35B-A3B": "z-lab/Qwen3.5-35B-A3B-DFlash",
        "Qwen/Qwen3.5-122B-A10B": "z-lab/Qwen3.5-122B-A10B-DFlash",
        "Qwen/Qwen3.6-27B": "z-lab/Qwen3.6-27B-DFlash",
        "Qwen/Qwen3.6-35B-A3B": "z-lab/Qwen3.6-35B-A3B-DFlash",
    },
}
"""Published heads by method and by the model that they were trained for.

EAGLE's stand at github.com/SafeAILab/EAGLE, Medusa's at
github.com/FasterDecoding/Medusa, P-EAGLE's on the cards at huggingface.co/amazon, and
DFlash's at github.com/z-lab/dflash.
"""


def find_head(method: str, model: str) -> tuple[str, str]:
    """Find the published head of a method for a model.

    Parameters
    ----------
    method
        A technique that drafts with a head.
    model
        The model, as Hugging Face has it.

    Returns
    -------
    tuple[str, str]
        The head, and the model that it was trained for: the one asked for, or its tuned version.
        Both are empty if none is known.
    """
    heads = HEADS.get(method, {})
    tuned = next((x for x in heads if x == model or x.startswith(f"{model}-Instruct")), "")
    return heads.get(tuned, ""), tuned


def no_head(method: str, model: str) -> str:
    """Return the message that no head is known, with a remedy.

    Parameters
    ----------
    method
        A technique that drafts with a head.
    model
        The model, as messages name it.
    """
    return (
        f"no published {method} head of {model} is known; name one that was trained for it with "
        f"--draft-model {method}=NAME"
    )


def lacks_head(technique: Technique, deployment: Deployment) -> str:
    """Return why a technique has no head to draft with, or an empty text if it needs none.

    Parameters
    ----------
    technique
        The technique.
    deployment
        The model, and the head that the user named.
    """
    method, model = technique.drafting.name, deployment.model
    if method not in HEADS or not technique.drafts or method == deployment.draft_model[0]:
        return ""
    known, _ = find_head(method, model.repository or model.name)
    return "" if known else no_head(method, model.name)


def read_draft_model(text: str) -> tuple[str, str]:
    """Parse the value of ``--draft-model``: METHOD=NAME.

    Raises
    ------
    InputError
        If it is not METHOD=NAME, or no method that drafts with a head.
    """
    method, _, head = (part.strip() for part in text.partition("="))
    if not head:
        raise InputError(
            f"--draft-model: got {text[:40]!r}; expected the method and its checkpoint, such as "
            f"eagle3=AngelSlim/Qwen3-8B_eagle3"
        )
    if method not in HEADS:
        raise unknown("method in --draft-model", method, HEADS)
    return method, head
