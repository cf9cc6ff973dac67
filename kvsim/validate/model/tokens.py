"""Text to tokens, by the tokeniser that a checkpoint comes with."""

from pathlib import Path
from typing import Any

from kvsim.errors import InputError, brief
from kvsim.files import check_input
from kvsim.files.kinds import TOKENIZER
from kvsim.frozen import frozen
from kvsim.validate.model.checkpoint import Safetensors
from kvsim.validate.model.ggufs import Gguf
from kvsim.validate.model.weights import TensorSource


@frozen
class Tokeniser:
    """A checkpoint's tokeniser, and what it starts every text with, if anything."""

    backend: Any  # tokenizers.Tokenizer
    start: tuple[int, ...]
    where: str

    def __call__(self, text: str) -> list[int]:
        """Tokens of a text, without a start."""
        try:
            tokens: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        except Exception as problem:  # the library raises nothing narrower
            raise InputError(
                f"{self.where}: cannot split the text ({brief(problem, 100)})"
            ) from None
        return tokens

    def check(self, tokens: list[int], vocabulary: int) -> None:
        """Refuse tokens that the model has no embedding of.

        Raises
        ------
        InputError
            If there is one, or none at all.
        """
        if not tokens:
            raise InputError(f"{self.where}: makes no tokens of the text; fetch it again")
        if max(*tokens, *self.start, 0) >= vocabulary:
            most = max(*tokens, *self.start, 0)
            raise InputError(
                f"{self.where}: token {most} is beyond the model's vocabulary of {vocabulary}; it "
                f"belongs to another model"
            )


def read_tokeniser(source: TensorSource) -> Tokeniser:
    """The tokeniser of a GGUF file, or ``tokenizer.json`` of a Hugging Face directory.

    Raises
    ------
    InputError
        If there is none, or none of a known kind.
    """
    try:
        import tokenizers
    except ImportError:
        raise InputError("text needs tokenizers; pip install 'kvsim[validate]'") from None
    if isinstance(source, Gguf):
        return _from_gguf(tokenizers, source)
    if not isinstance(source, Safetensors):
        raise InputError(f"{source.where}: comes with no tokeniser; give a directory or GGUF file")
    path = Path(source.where) / "tokenizer.json"
    check_input(path, TOKENIZER)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as problem:  # the library raises nothing narrower
        reason = " ".join(str(problem).split())[:100]
        raise InputError(f"{path}: not a tokeniser ({reason}); fetch it again") from None
    try:
        start = tuple(backend.encode("").ids[:1])
    except Exception as problem:  # the library raises nothing narrower
        raise InputError(
            f"{path}: not a tokeniser ({brief(problem, 100)}); fetch it again"
        ) from None
    return Tokeniser(backend, start, str(path))


def _from_gguf(tokenizers: Any, gguf: Gguf) -> Tokeniser:
    """Byte-pair merges as GPT-2 has them; SmolLM2's keep digits apart."""
    about = gguf.tokeniser
    kind, splits = about.get("model"), about.get("pre")
    if kind != "gpt2" or splits not in ("smollm", "gpt-2") or "merges" not in about:
        raise InputError(
            f"{gguf.where}: its tokeniser ({str(kind)[:20]}, {str(splits)[:20]}) is not read from "
            f"GGUF, expected gpt2 merges split as smollm or gpt-2; give the model's Hugging Face "
            f"directory"
        )
    try:
        merges = [tuple(merge.split(" ")) for merge in about["merges"]]
        words = {word: token for token, word in enumerate(about["tokens"])}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(words, merges))
        start = (int(about["bos_token_id"]),) if about.get("add_bos_token") else ()
    except Exception as problem:  # a field that is missing or of another type; a bad merge
        reason = f"its tokeniser cannot be read: {brief(problem, 100)}"
        raise InputError(f"{gguf.where}: {reason}; fetch it again") from None
    split = tokenizers.pre_tokenizers
    parts = [split.Digits(individual_digits=True)] if splits == "smollm" else []
    backend.pre_tokenizer = split.Sequence([*parts, split.ByteLevel(add_prefix_space=False)])
    return Tokeniser(backend, start, gguf.where)
