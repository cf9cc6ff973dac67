"""Answers stay what the files in ``data`` hold.

An ordinary run compares some cases of each kind, ``make.py test --all`` all of them.
"""

import os

import pytest

from tests.frozen.kinds import KINDS

EVERYTHING = "KVSIM_ALL_TESTS" in os.environ or "KVSIM_FROZEN" in os.environ
GROUP = 40  # cases of one test
CHOSEN = [
    (kind, file, cases[start : start + size])
    for kind in KINDS
    for file in KINDS[kind].files()
    for cases in [sorted(KINDS[kind].load(file))[:: 1 if EVERYTHING else KINDS[kind].every]]
    for size in [GROUP if kind in ("predictions", "passes", "techniques", "reproduced") else 1]
    for start in range(0, len(cases), size)
]


@pytest.mark.parametrize(
    ("kind", "file", "cases"),
    CHOSEN,
    ids=[f"{kind}/{file}: {cases[0]}" for kind, file, cases in CHOSEN],
)
def test_answers_are_as_frozen(kind: str, file: str, cases: list[str]) -> None:
    frozen = KINDS[kind].load(file)
    moved = [
        f"{case}: {line}"
        for case in cases
        for line in KINDS[kind].compare(frozen[case], KINDS[kind].answer(case))
    ]
    assert not moved, "\n".join(
        [f"{len(moved)} moved; if meant: python3 make.py renew {kind}/{file}", *moved[:20]]
    )


def test_every_kind_has_its_cases() -> None:
    least = {
        "predictions": 3000, "reproduced": 362, "passes": 391, "techniques": 75,
        "runs": 108, "plans": 115, "simulations": 30, "capacity": 11,
        "answers": 25, "programmes": 6,
    }  # fmt: skip
    counts = {name: sum(len(kind.load(f)) for f in kind.files()) for name, kind in KINDS.items()}
    assert all(counts[name] >= number for name, number in least.items()), counts
