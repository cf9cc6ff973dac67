"""What running a decoder needs to know beyond its shape: positions, norms and activation."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvsim.errors import InputError, unknown
from kvsim.frozen import frozen
from kvsim.models.configs import compress, from_config, read_config
from kvsim.models.fields import shown
from kvsim.models.model import LayerShape, Model
from kvsim.validate.model.rope import Rope, read_rope

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "opt")
ACTIVATIONS = ("silu", "relu", "gelu")
POSITION_OFFSET = 2  # OPT leaves the first rows of its table of positions unused


@frozen
class Architecture:
    """A model with the numbers its arithmetic needs."""

    model: Model
    eps: float  # added to a variance before its root
    activation: str
    rope: Rope | None  # none where positions are learned

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """Every layer in order."""
        return tuple(s for block, n in self.model.layout for _ in range(n) for s in block)

    def first(self, layers: int) -> "Architecture":
        """The same model cut to its first layers.

        Raises
        ------
        InputError
            If the model has fewer.
        """
        if not 1 <= layers <= self.model.layers:
            expected = f"expected 1 to {self.model.layers}, the layers of {self.model.name}"
            raise InputError(f"--layers: got {layers}; {expected}")
        return replace(self, model=replace(self.model, layout=compress(self.shapes[:layers])))


def load_architecture(name_or_path: str) -> Architecture:
    """A model by its catalogue name, Hugging Face id, or path of a configuration.

    Raises
    ------
    InputError
        If there is no such model, or it is none that ``validate`` can run.
    """
    return read_architecture(*read_config(name_or_path))


def read_architecture(config: Mapping[str, Any], name: str, where: str) -> Architecture:
    """The architecture that a parsed ``config.json`` describes."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise unknown(f"architecture in {where}", str(family), FAMILIES, "these can be run")
    model = from_config(config, name)
    field = "hidden_act" if family != "opt" else "activation_function"
    activation = config.get(field)
    activation = activation or ("relu" if family == "opt" else "silu")
    if activation not in ACTIVATIONS:
        problem = f"is {shown(activation)}, expected one of {', '.join(ACTIVATIONS)}"
        raise InputError(f"{where}: field {field!r} {problem}; choose another model")
    if family == "opt":
        return Architecture(model, 1e-5, activation, None)
    eps = config.get("rms_norm_eps", 1e-6)
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps < 1:
        problem = f"is {shown(eps)}, expected a number above 0 and below 1"
        raise InputError(f"{where}: field 'rms_norm_eps' {problem}; correct it")
    rope = read_rope(config, model.head_dim, model.max_context, where)
    return Architecture(model, float(eps), activation, rope)
