"""Keys and values packed, and widened again."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from kvsim.engine.formats import Format
from kvsim.graph import Op
from kvsim.validate.kernels.quantise import quantise
from kvsim.validate.kernels.stores import By, Store
from kvsim.validate.micro.lowbit import GROUP, MOST_ON_CPU
from kvsim.validate.micro.place import Bench, Call, Work

NUMBER = 2  # [B]
HEADS = ((3, 64), (32, 128))


def works(place: Bench) -> Iterator[Work]:
    """Prompts and single tokens, by channel for keys and by token for values."""
    for bits in place.either((4,), (2, 4, 8)):
        for kv_heads, dim in HEADS:
            for tokens in place.either((32, 2048), (32, 256, 2048, 8192)):
                numbers = kv_heads * dim * tokens
                moved = numbers * (NUMBER + Format(bits, GROUP).number)
                if not place.fits(moved) or (place.on_cpu and numbers > MOST_ON_CPU):
                    continue
                for way in ("pack by channel", "pack by token", "widen"):
                    case = {"way": way, "bits": bits, "kv_heads": kv_heads, "tokens": tokens}
                    op = Op("quantise", kernel="quantise", bytes={"hbm": float(moved)})
                    shape = (1, kv_heads, tokens, dim)
                    yield Work(case, op, partial(_calls, place, way, bits, shape))


@contextmanager
def _calls(place: Bench, way: str, bits: int, shape: tuple[int, ...]) -> Iterator[Sequence[Call]]:
    if way == "widen":

        def packed() -> Store:
            return quantise(place.random(*shape), bits, GROUP, "token")

        first = packed()
        stores = place.turns(first, [first.codes, first.scale, first.zero], packed)
        yield [lambda one=one: one.numbers().to(place.half) for one in stores]  # type: ignore[misc]
        return

    def numbers() -> Tensor:
        return place.random(*shape)

    one = numbers()
    by: By = "channel" if way.endswith("channel") else "token"
    sets = place.turns(one, [one], numbers)
    yield [partial(quantise, each, bits, GROUP, by) for each in sets]
