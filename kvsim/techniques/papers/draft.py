"""Speculative decoding with a smaller model that drafts."""

from dataclasses import replace

import numpy as np

from kvsim.frozen import frozen
from kvsim.graph import Buffers, Point, Step
from kvsim.machines.deployment import WEIGHT_FORMATS, Deployment
from kvsim.models.configs import load_model
from kvsim.techniques.acceptance import AcceptedDrafts
from kvsim.techniques.axes.base import PLAIN, Parts
from kvsim.techniques.axes.drafting import Rounds
from kvsim.techniques.axes.settings import param
from kvsim.techniques.memory import resident
from kvsim.techniques.steps import count_layers, forward, lay_out

MEASURED = "vicuna-68m"  # the only draft model whose acceptance was measured
OTHER_DRAFT = 0.38
"""Relative spread of tokens per round of other draft models: root mean square of the logarithms
between that one and every chain and tree of the library, at 4 drafts."""


@frozen
class Draft(Rounds):
    """Speculative decoding with a small draft model on the same GPUs.

    The draft model is one of the catalogue and has its own full cache.

    References
    ----------
    .. [1] Y. Leviathan et al., "Fast inference from transformers via speculative decoding",
       ICML 2023, section 3.
    """

    name = "draft"

    model: str = param("llama3.2-1b", "draft model", also=bool)
    weights: str = param("fp16", "weight format of the draft model", choices=tuple(WEIGHT_FORMATS))
    tp: int = param(
        0, "tensor-parallel GPUs of the draft model (0: as the target)", choices=(0, 1, 2, 4, 8)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        load_model(self.model)

    @property
    def _measured(self) -> AcceptedDrafts | None:
        """Return the acceptance of the one measured draft model, a rough guess for others."""
        found = super()._measured
        if found is None or self.model == MEASURED:
            return found
        source = f"{found.source} with {MEASURED}; larger drafts are accepted more often"
        return replace(found, spread=float(np.hypot(found.spread, OTHER_DRAFT)), source=source)

    def _make_deployment(self, deployment: Deployment) -> Deployment:
        stack = deployment.stack
        if stack.drafts.draft:
            stack = replace(stack, time=replace(stack.time, step=stack.drafts.draft))
        return Deployment(
            load_model(self.model),
            deployment.hardware,
            stack,
            self.weights,
            self.tp or deployment.tp,
        )

    def refuses(self, deployment: Deployment, parts: Parts) -> str:
        """Return why the model cannot draft, or an empty string: vocabularies must be equal."""
        own, target = load_model(self.model).vocab, deployment.model.vocab
        if abs(own - target) > 0.01 * target:
            both = f"{self.model} has {own} tokens and {deployment.model.name} {target}"
            return f"{both}: no common vocabulary"
        if self.tp > deployment.tp:
            return f"the draft model is given {self.tp} GPUs, but the model has {deployment.tp}"
        return super().refuses(deployment, parts)

    def steps(self, deployment: Deployment, point: Point) -> tuple[Step, ...]:
        """Return one pass of the draft model per drafted token."""
        own = self._make_deployment(deployment)
        points = (replace(point, context=point.context + i, new=1.0) for i in range(self.gamma))
        return tuple(forward(own, q, lay_out(own, [(0, None)], [PLAIN])) for q in points)

    def prompt_steps(self, deployment: Deployment, point: Point) -> tuple[Step, ...]:
        """Return the draft model's pass over the prompt."""
        own = self._make_deployment(deployment)
        return (forward(own, point, lay_out(own, [(0, None)], [PLAIN])),) if self.gamma else ()

    def draft_memory(self, deployment: Deployment, point: Point) -> Buffers:
        """Return the memory of the draft model's weights and cache. [B]"""
        if not self.gamma:
            return {}
        own, drafts = self._make_deployment(deployment), self.gamma
        longer = replace(
            point, context=point.context + drafts, max_length=point.max_length + drafts
        )
        held = resident(own, longer, count_layers(lay_out(own, [(0, None)], [PLAIN])))["gpu"]
        names = {"weights": "draft weights", "embedding": "draft embedding", "kv": "draft kv"}
        return {"gpu": {to: held[name] for name, to in names.items()}}
