"""KIVI: keys packed per channel in blocks, values per token behind the latest ones."""

from typing import ClassVar

from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.base import Technique
from kvsim.techniques.kivi import Kivi as Settings
from kvsim.validate.impl.base import SmallRun
from kvsim.validate.impl.packed import Packed
from kvsim.validate.model.attention import Pass
from kvsim.validate.model.decoder import Decoder


class Kivi(Packed):
    """Asymmetric groups with a residual that rolls over.

    A new token joins the residual, full blocks of keys and surplus values are packed, and then it
    attends.

    References
    ----------
    .. [1] Z. Liu et al., "KIVI", ICML 2024, algorithm 1.
    """

    differences: ClassVar[dict[str, str]] = {
        "quantise": "keys are packed by whole residuals; the prediction spreads that evenly",
    }

    @classmethod
    def small_settings(cls, run: SmallRun) -> list[str]:
        """Groups that fit the head."""
        return [f"group={run.group},residual={run.group}"]

    def __init__(
        self, technique: Technique, decoder: Decoder, lengths: list[int], generate: int
    ) -> None:
        settings = technique.term(Settings)
        super().__init__(technique, decoder, lengths, generate)
        self.residual = check_residual(technique.name, settings.residual, settings.group)
        if settings.bits == 16:
            raise InputError("kivi: bits=16 packs nothing; choose fewer bits, or technique full")
        self.sides(self.residual, int(settings.bits), settings.group)

    def packed_keys(self, tokens: int) -> int:
        """Tokens whose keys are packed: whole blocks of the residual. [tokens]"""
        return tokens // self.residual * self.residual

    def packed_values(self, tokens: int) -> int:
        """All but the residual."""
        return max(tokens - self.residual, 0)

    def attend(
        self, layer: int, tensor: Tensor, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """Append, pack what no longer fits the residual, attend."""
        lengths = [n + 1 for n in step.starts]
        pack_values(self, layer, step.starts, step.positions[:, 0] - self.residual)
        with self.tally.op("attn") as marks:
            self.k[layer].append(keys, step)
            self.v[layer].append(values, step)
            marks.writes(keys, values)
        pack_keys(self, layer, lengths, step.positions[:, 0] + 1 - self.residual)
        with self.tally.op("attn") as marks:
            return self.look(marks, layer, queries, step, lengths).out.to(queries.dtype)


def check_residual(name: str, residual: int, group: int) -> int:
    """The residual, if blocks of it hold whole groups of keys.

    Raises
    ------
    InputError
        If they do not.
    """
    if residual < 1 or residual % group:
        raise InputError(
            f"{name}: residual={residual} is not a multiple of group={group}, so that blocks of "
            f"keys would not fill groups; choose one that is"
        )
    return residual


def pack_values(impl: Packed, layer: int, tokens: tuple[int, ...] | list[int], at: Tensor) -> None:
    """Pack the value that leaves the residual of ``tokens`` cached ones, where it is full.

    Parameters
    ----------
    at : (batch,) its position.
    """
    room = impl.v[layer].ring.shape[2]
    full = [i for i, n in enumerate(tokens) if impl.packed_values(n + 1) > impl.packed_values(n)]
    if full and room:
        with impl.tally.op("quantise") as marks:
            impl.v[layer].pack(marks, full, at, 1)


def pack_keys(impl: Packed, layer: int, tokens: list[int], begins: Tensor) -> None:
    """Pack a block of keys where ``tokens`` cached ones complete it.

    Parameters
    ----------
    begins : (batch,) the position of its first token.
    """
    full = [i for i, n in enumerate(tokens) if impl.packed_keys(n) > impl.packed_keys(n - 1)]
    if full:
        block = impl.packed_keys(tokens[full[0]]) - impl.packed_keys(tokens[full[0]] - 1)
        with impl.tally.op("quantise") as marks:
            impl.k[layer].pack(marks, full, begins, block)
