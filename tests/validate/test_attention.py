"""Attention of a few tokens: heads that share keys are computed together, and alike."""

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from kvsim.errors import InputError  # noqa: E402
from kvsim.validate import transfer  # noqa: E402
from kvsim.validate.counter import OpRecord  # noqa: E402
from kvsim.validate.kernels import blockwise  # noqa: E402
from kvsim.validate.model import attention  # noqa: E402
from kvsim.validate.model.attention import FEW_QUERIES, attend  # noqa: E402
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
    monkeypatch.setattr(blockwise, "BLOCK_NUMBERS", at_once)  # numbers of a block
    torch.manual_seed(0)
    q = torch.randn(2, 6, new, 8, dtype=torch.float64)
    k, v = (torch.randn(2, kv_heads, 40, 8, dtype=torch.float64) for _ in "kv")
    seen = torch.rand(masks[0], masks[1] or kv_heads, new, 40) < 0.5
    assert torch.allclose(attend(OpRecord(), q, k, v, seen), by_hand(q, k, v, seen))
    everything = torch.ones(1, 1, new, 40, dtype=torch.bool)
    assert torch.allclose(attend(OpRecord(), q, k, v, "all"), by_hand(q, k, v, everything))


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
    transfers.shutdown()


def test_attention_of_16_bits_runs_where_amx_meets_older_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch's fused kernel fails there, so it must not be asked."""
    fused = "_scaled_dot_product_flash_attention_for_cpu"

    class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    q, k, v = (torch.randn(2, heads, 64, 16).bfloat16() for heads in (4, 2, 2))
    found = {}
    for capability in ("AVX512", "AVX2"):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        attention._packs_for_amx.cache_clear()
        names: list[str] = []
        with Seen():  # type: ignore[no-untyped-call]
            found[capability] = attend(OpRecord(), q, k, v, "causal")
        assert any(fused in name for name in names) == (capability == "AVX512")
    attention._packs_for_amx.cache_clear()
    assert (found["AVX512"] - found["AVX2"]).abs().max() < 0.02


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("new", [3, 40])
def test_the_latest_queries_see_up_to_themselves(new: int, kv_heads: int) -> None:
    """Of the kernels' own name and of a mask alike, in chunks and in verification."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, new, 8, dtype=torch.float64)
    k, v = (torch.randn(2, kv_heads, 60, 8, dtype=torch.float64) for _ in "kv")
    seen = torch.ones(new, 60, dtype=torch.bool).tril(60 - new)[None, None]
    plain = by_hand(q, k, v, seen)
    assert torch.allclose(attend(OpRecord(), q, k, v, "later"), plain)
    named = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=attention._bias(q, k), enable_gqa=kv_heads != 4
    )
    assert torch.allclose(named, plain)


def test_chunks_of_a_prompt_need_no_mask() -> None:
    positions = torch.arange(40, 60)[None].expand(2, -1)
    step = attention.Pass(slice(0, 2), (40, 40), 20, positions, kind="prefill")
    assert attention.visible(step, 60) == "later"
    assert isinstance(attention.visible(step, 60, window=30), Tensor)
    uneven = attention.Pass(slice(0, 2), (40, 39), 20, positions, kind="verify")
    assert isinstance(attention.visible(uneven, 60), Tensor)


class Runtime:
    """Stands for CUDA's: what is pinned."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if address in self.pinned:
            return 712
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        del self.pinned[address]


def test_homes_are_as_large_as_they_must_be_and_given_back(monkeypatch: Any) -> None:
    """And lanes of the same device are made once."""
    runtime, made = Runtime(), []

    class Stream:
        def __init__(self, device: Any) -> None:
            made.append(device)

        def synchronize(self) -> None:
            return None

    monkeypatch.setattr(transfer, "_runtime", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    transfer._stream.cache_clear()
    for _ in range(3):
        transfers = Transfers(torch.device("cuda", 0))
        made_here = [transfers.host((3, 5, 7), torch.float16), transfers.host((5000,), torch.uint8)]
        empty = transfers.host((0, 4), torch.float16)
        assert [home.shape for home in (*made_here, empty)] == [(3, 5, 7), (5000,), (0, 4)]
        assert all(home.data_ptr() % 4096 == 0 and not home.any() for home in made_here)
        assert sum(runtime.pinned.values()) == sum(map(transfer.lines, (3 * 5 * 7 * 2, 5000)))
        transfers.shutdown()
        assert not runtime.pinned
    assert len(made) == 3, "to the device, from it, and beside"
    transfer._stream.cache_clear()
    monkeypatch.setattr(runtime, "cudaHostRegister", lambda *_: 2)
    with pytest.raises(RuntimeError, match="cannot be pinned"):
        Transfers(torch.device("cuda", 0)).host((8,), torch.uint8)
    transfer._stream.cache_clear()


def test_a_run_pins_one_mapping_as_large_as_its_homes(monkeypatch: Any) -> None:
    runtime = Runtime()
    monkeypatch.setattr(transfer, "_runtime", lambda: runtime)
    shapes = [(3, 5, 7), (100, 64), (0, 4), (64,)]
    needed = sum(transfer.lines(2 * math.prod(shape)) for shape in shapes)
    with transfer.planned(needed):
        users = [transfer.arena(), transfer.arena()]
    rooms = [users[i % 2].room(shape, torch.float16) for i, shape in enumerate(shapes)]
    assert users[0] is users[1] and list(runtime.pinned.values()) == [needed]
    for i, room in enumerate(rooms):
        room.fill_(i)
    assert [bool((room == i).all()) for i, room in enumerate(rooms)] == [True] * len(rooms)
    users[0].room((5,), torch.uint8)
    assert list(runtime.pinned.values()) == [needed, 64], "what was not planned is apart"
    users[0].leave()
    assert runtime.pinned
    users[1].leave()
    assert not runtime.pinned


def test_host_memory_is_checked_before_a_run() -> None:
    transfer.check_host_memory(79, "offload", lambda: 100)
    with pytest.raises(InputError, match=r"offload: .* of host memory are needed"):
        transfer.check_host_memory(81, "offload", lambda: 100)
