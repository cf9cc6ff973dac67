"""Speculative decoding with a smaller model that drafts."""

from dataclasses import dataclass, replace

from kvsim.graph import Buffers, Point, Step
from kvsim.machines.deployment import WEIGHTS, Deployment
from kvsim.models.configs import load_model
from kvsim.techniques.axes import Drafting, Placement, Selection, Storage
from kvsim.techniques.heads import Rounds
from kvsim.techniques.layers import Parts
from kvsim.techniques.layout import laid_out
from kvsim.techniques.residency import resident
from kvsim.techniques.settings import param
from kvsim.techniques.steps import forward


@dataclass(frozen=True)
class Draft(Rounds):
    """A model of the catalogue drafts on the same GPUs, over a full cache of its own.

    References
    ----------
    .. [1] Y. Leviathan et al., "Fast inference from transformers via speculative decoding",
       ICML 2023, section 3.
    """

    name = "draft"

    model: str = param("llama3.2-1b", "model that drafts", also=bool)
    weights: str = param("fp16", "format of its weights", choices=tuple(WEIGHTS))
    tp: int = param(0, "GPUs that share it (0: as many as the model)", choices=(0, 1, 2, 4, 8))

    def __post_init__(self) -> None:
        super().__post_init__()
        load_model(self.model)

    def _own(self, d: Deployment) -> Deployment:
        return Deployment(
            load_model(self.model), d.hardware, d.stack, self.weights, self.tp or d.tp
        )

    def refuses(self, d: Deployment, beside: Parts) -> str:
        """Drafts are verified token by token, so that both need one vocabulary."""
        own, target = load_model(self.model).vocab, d.model.vocab
        if abs(own - target) > 0.01 * target:
            return (
                f"{self.model} has {own} tokens and {d.model.name} {target}: no common vocabulary"
            )
        if self.tp > d.tp:
            return f"the draft model asks for {self.tp} GPUs, and the model has {d.tp}"
        return super().refuses(d, beside)

    def steps(self, d: Deployment, p: Point) -> tuple[Step, ...]:
        """One pass of the draft model per draft."""
        own, full = self._own(d), _full()
        points = (replace(p, context=p.context + i, new=1.0) for i in range(self.gamma))
        return tuple(forward(own, q, laid_out(own, [(0, None)], [full])) for q in points)

    def prompt_steps(self, d: Deployment, p: Point) -> tuple[Step, ...]:
        """The draft model reads the prompt too."""
        own = self._own(d)
        return (forward(own, p, laid_out(own, [(0, None)], [_full()])),) if self.gamma else ()

    def beside(self, d: Deployment, p: Point) -> Buffers:
        """Its weights, embedding and cache; activations take turns with the model's. [B]"""
        if not self.gamma:
            return {}
        own = self._own(d)
        held = resident(own, p, laid_out(own, [(0, None)], [_full()]))["gpu"]
        names = {"weights": "draft weights", "embedding": "draft embedding", "kv": "draft kv"}
        return {"gpu": {to: held[name] for name, to in names.items()}}


def _full() -> Parts:
    return Parts(Selection(), Storage(), Placement(), Drafting())
