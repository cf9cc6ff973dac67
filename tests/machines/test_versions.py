"""Engines at a version: which file stands for it, and what is told of it."""

import pytest

from kvsim.errors import InputError
from kvsim.machines.profiles import choose_release, load_stack, stack_names

FILES = {"0.6": "vllm-0.6", "0.11": "vllm-0.11", "0.19": "vllm"}
KNOWN = ("0.5", "0.6", "0.10", "0.11", "0.12", "0.19", "0.33")


@pytest.mark.parametrize(
    ("asked", "nearest", "file"),
    [
        ("0.6", "0.6", "vllm-0.6"),
        ("0.11", "0.11", "vllm-0.11"),
        ("0.10", "0.6", "vllm-0.6"),  # 10 is more than 6
        ("0.12", "0.11", "vllm-0.11"),
        ("0.19", "0.19", "vllm"),
        ("0.33", "0.19", "vllm"),
        ("0.5", "0.6", "vllm-0.6"),  # nothing older was measured
    ],
)
def test_nearest_older_version_stands_for_others(asked: str, nearest: str, file: str) -> None:
    found = choose_release("vllm", asked, KNOWN, FILES)
    assert (found.nearest, found.file) == (nearest, file)
    assert bool(found.note) == (asked != nearest)


def test_version_that_never_was_is_refused() -> None:
    with pytest.raises(InputError, match=r"no version 0\.77; expected one of 0\.5, 0\.6"):
        choose_release("vllm", "0.77", KNOWN, FILES)


def test_names_with_cards_patches_and_years() -> None:
    assert load_stack("vllm-0.19").time == load_stack("vllm").time
    assert load_stack("vllm-0.11.2@h100").name == "vllm-0.11@h100"
    assert load_stack("vllm-0.11").for_gpu("h100-pcie").name == "vllm-0.11@h100"
    assert load_stack("trtllm-1.2.0rc1").family == "trtllm"
    assert load_stack("vllm-2024").family == "vllm-2024"
    assert "nearest older" in load_stack("vllm-0.33@a40").unmeasured


@pytest.mark.parametrize("name", [n for n in stack_names() if n.partition("-")[2][:1].isdigit()])
def test_every_version_with_a_file_loads_on_every_card(name: str) -> None:
    stack = load_stack(name)
    assert not stack.unmeasured
    for card in stack.cards:
        assert stack.for_gpu(card).name.partition("@")[0] in (name, stack.for_gpu(card).name)
