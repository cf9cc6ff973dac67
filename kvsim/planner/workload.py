"""What is asked: equal requests, and the limits that a plan must stay within."""

import numpy as np

from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.machines.deployment import Deployment
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import largest_batch
from kvsim.prediction.service import Service
from kvsim.techniques.technique import Technique

GIB = 2.0**30
TTFT, TPOT = 2.0, 0.1  # what an interactive service is asked for unless the user says [s]


@frozen
class Workload:
    """Equal requests.

    Attributes
    ----------
    prompt, generate
        Tokens of each. [tokens]
    batch
        Sequences at once; None to have it chosen.
    service
        Whether requests keep coming (continuous batching), or one batch starts on an idle GPU.
    """

    prompt: int
    generate: int
    batch: int | None = None
    service: bool = False

    def predict(
        self, technique: Technique, deployment: Deployment, batch: Array, contexts: int = 0
    ) -> Prediction:
        """What a technique does for it at some batches."""
        kind = Service if self.service else Prediction
        return kind(technique, deployment, batch, self.prompt, self.generate, contexts)

    def largest(
        self, technique: Technique, deployment: Deployment, gpu: float, host: float
    ) -> Array:
        """Largest batch whose buffers fit. [sequences]"""
        return largest_batch(
            technique, deployment, self.prompt, self.generate, gpu, host, served=self.service
        )

    @property
    def length(self) -> int:
        """Tokens of a sequence at its end. [tokens]"""
        return self.prompt + self.generate


@frozen
class PlanLimits:
    """What a plan must stay within; infinite where the user set nothing."""

    gpu_memory: float  # per GPU [B]
    host_memory: float  # [B]
    ttft: float = np.inf  # [s]
    tpot: float = np.inf  # [s]
    loss: float = 0.0  # relative, in the unit of the evidence; 0: the tokens of full-precision KV
    assumed: float = 0.0  # 0: nothing rests on an unmeasured acceptance rate

    def finite(self, without: str = "") -> dict[str, float]:
        """The limits that are set, by column."""
        return {k: v for k, v in vars(self).items() if np.isfinite(v) and k != without}

    def hard(self) -> dict[str, float]:
        """Those that memory and time set, not what the user is willing to accept."""
        return {k: v for k, v in self.finite().items() if k not in ("loss", "assumed")}
