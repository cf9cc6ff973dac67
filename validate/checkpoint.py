"""Decoders from Hugging Face directories, GGUF files and catalogue names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from kvsim.errors import InputError


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
                problem = str(error).splitlines()[0][:200]
                raise InputError(f"{path}: not readable as safetensors ({problem})") from None
            self._open |= dict.fromkeys(file.keys(), file)

    def shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Shape and number format of every tensor."""
        parts = {name: file.get_slice(name) for name, file in self._open.items()}
        return {name: (tuple(p.get_shape()), p.get_dtype()) for name, p in parts.items()}

    def read(self, name: str) -> Tensor:
        """One tensor."""
        tensor: Tensor = self._open[name].get_tensor(name)
        return tensor
