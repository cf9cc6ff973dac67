"""Where weights come from: Hugging Face directories, GGUF files, or nowhere (random)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from kvsim.errors import InputError
from kvsim.validate.architecture import Architecture, load_architecture, read_architecture
from kvsim.validate.ggufs import Gguf
from kvsim.validate.weights import Source


def open_model(name_or_path: str) -> tuple[Architecture, Source | None]:
    """A model and its checkpoint, of which no tensor has been read yet.

    A directory holds ``config.json`` and ``*.safetensors``; a file is GGUF, or a ``config.json``
    whose model gets random weights, as one of the catalogue does.

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
                file: Any = safe_open(path, framework="pt")
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
        """One tensor."""
        tensor: Tensor = self._open[name].get_tensor(name)
        return tensor
