"""What a name of the notation stands for: settings, and what they say on one or more axes."""

from collections.abc import Iterable
from dataclasses import fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number
from kvsim.machines.deployment import Deployment
from kvsim.techniques.settings import check, is_share, plain

if TYPE_CHECKING:
    from kvsim.techniques.layers import LayerPass, Parts

Axis = Literal["selection", "storage", "placement", "drafting"]
ROUNDING = 1e-6  # of a token: a tenth of 4100 tokens is 410 of them
AXES: tuple[Axis, ...] = ("selection", "storage", "placement", "drafting")


@frozen
class Term:
    """One name with its settings.

    Numeric settings may be arrays that broadcast with a point's batch and context; those that
    change the structure of a step (bits, layers, schedules) are scalars.
    """

    name: ClassVar[str]
    preset: ClassVar[bool] = True  # a paper's technique rather than a piece of one

    def __post_init__(self) -> None:
        for f in fields(self):
            check(self.name, f.name, getattr(self, f.name), f.metadata)

    def says(self) -> "tuple[Part, ...]":
        """Its parts, at most one per axis."""
        raise NotImplementedError

    def options(self, deployment: Deployment, prompt: int, generate: int) -> "Iterable[Term]":
        """Settings worth considering for a workload; array-valued ones along the first axis."""
        return [self]

    def options_of_shares(
        self, deployment: Deployment, prompt: int, generate: int
    ) -> "Iterable[Term]":
        """Settings worth considering for requests of many lengths: budgets are shares of each.

        Parameters
        ----------
        prompt, generate : the requests' means, for what is no budget. [tokens]
        """
        return self.options(deployment, prompt, generate)

    def notes(self, at: "LayerPass") -> tuple[str, ...]:
        """What a reader of a plan should know about these settings there."""
        return tuple(note for part in self.says() for note in part.notes(at))

    @property
    def settings(self) -> dict[str, Any]:
        """The values of all parameters by their names."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __str__(self) -> str:
        """Read back by ``kvsim.techniques.parse``."""
        given = ",".join(f"{k}={plain(v)}" for k, v in self.settings.items())
        return f"{self.name}:{given}" if given else self.name


@frozen
class Part(Term):
    """A term that says something on one axis alone."""

    axis: ClassVar[Axis]

    def says(self) -> "tuple[Part, ...]":
        """The part itself: it says something on its own axis alone."""
        return (self,)

    @cached_property
    def shares(self) -> tuple[str, ...]:
        """The settings that are a share of each prompt, in place of a number of tokens."""
        could = (f.name for f in fields(self) if f.metadata.get("share"))
        return tuple(name for name in could if np.any(is_share(getattr(self, name))))

    def for_prompt(self, prompt: Number) -> Self:
        """The same for prompts of known lengths: shares of them are whole numbers of tokens."""
        tokens: dict[str, Any] = {}
        for name in self.shares:
            own = np.asarray(getattr(self, name), dtype=float)
            tokens[name] = np.where(
                is_share(own), np.maximum(np.ceil(own * prompt - ROUNDING), 1.0), own
            )
        return replace(self, **tokens) if tokens else self

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names under which ``launches.csv`` lists what it issues."""
        return (self.name,)

    @property
    def exact(self) -> bool:
        """Whether tokens are those of full-precision KV, up to rounding."""
        return False

    def breaks(self, deployment: Deployment) -> tuple[int, ...]:
        """First layers, after layer 0, from which on it says something else."""
        return ()

    def at(self, index: int, deployment: Deployment) -> Self:
        """What it says of one layer."""
        return self

    def refuses(self, deployment: Deployment, beside: "Parts") -> str:
        """Why it cannot run there, or beside the parts of the other axes; nothing if it can."""
        return ""

    def once(self, at: "LayerPass") -> Buffers:
        """Buffers that all layers use in turn. [B]"""
        return {}

    def scratch(self, at: "LayerPass") -> Any:
        """Copies of one layer's cache that are alive during attention only. [B]"""
        return 0.0

    def notes(self, at: "LayerPass") -> tuple[str, ...]:
        """Nothing, where the part says nothing more."""
        return ()
