"""Attention of a few tokens: heads that share keys are computed together, and alike."""

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from kvsim.validate.kernels import ranges  # noqa: E402
from kvsim.validate.model.attention import FEW_QUERIES, attend  # noqa: E402
from kvsim.validate.tally import Marks  # noqa: E402
from kvsim.validate.transfer import Transfers  # noqa: E402

CPU = torch.device("cpu")


def by_hand(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """One query of one head at a time."""
    out: Tensor = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for i in range(q.shape[0]):
        for head in range(q.shape[1]):
            mine = seen[i % len(seen), head // group % seen.shape[1]]
            for n in range(q.shape[2]):
                keys, values = (c[i, head // group][mine[n]] for c in (k, v))
                weights = torch.softmax(keys @ q[i, head, n] / q.shape[3] ** 0.5, 0)
                out[i, head, n] = weights @ values
    return out


@pytest.mark.parametrize("new", [1, 5, FEW_QUERIES + 1])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("masks", [(1, 1), (2, 1), (2, None)])
@pytest.mark.parametrize("at_once", [1 << 17, 150])
def test_heads_of_a_group_attend_together(
    new: int,
    kv_heads: int,
    masks: tuple[int, int | None],
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranges, "NUMBERS", at_once)  # numbers of a block
    torch.manual_seed(0)
    q = torch.randn(2, 6, new, 8, dtype=torch.float64)
    k, v = (torch.randn(2, kv_heads, 40, 8, dtype=torch.float64) for _ in "kv")
    seen = torch.rand(masks[0], masks[1] or kv_heads, new, 40) < 0.5
    assert torch.allclose(attend(Marks(), q, k, v, seen), by_hand(q, k, v, seen))
    everything = torch.ones(1, 1, new, 40, dtype=torch.bool)
    assert torch.allclose(attend(Marks(), q, k, v, "all"), by_hand(q, k, v, everything))


def test_compute_beside_compute_runs_once_when_it_is_waited_for() -> None:
    transfers = Transfers(CPU)
    order: list[str] = []
    arrived = transfers.h2d(lambda: order.append("copy"))
    mark = transfers.side(lambda: order.append("compute"), arrived)
    arrived.wait()
    assert order == ["copy"]
    mark.wait()
    mark.wait()
    assert order == ["copy", "compute"]
    transfers.close()
