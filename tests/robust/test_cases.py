"""A sample of the table of cases; ``make.py robust``, or KVSIM_ROBUST=1 here, runs all of them."""

import os
from pathlib import Path
from zlib import crc32

import pytest

from tests.robust.cases import Case
from tests.robust.places import places
from tests.robust.readings import INPUTS
from tests.robust.rule import violations
from tests.robust.runner import preload
from tests.robust.table import table
from tests.robust.writings import OUTPUTS

ONE_IN = 60
WHOLE = os.environ.get("KVSIM_ROBUST") == "1"
TABLE = table()


def chosen(case: Case) -> bool:
    """The same sample every time, of commands that need no PyTorch."""
    return WHOLE or ("validate" not in case.name and crc32(case.name.encode()) % ONE_IN == 0)


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    preload()


def test_the_table_is_large_and_names_are_its_own() -> None:
    assert len(TABLE) >= 600
    assert len({case.name for case in TABLE}) == len(TABLE)


@pytest.mark.parametrize("case", [c for c in TABLE if chosen(c)], ids=lambda case: case.name)
def test_a_case_keeps_the_rule(case: Case, tmp_path: Path) -> None:
    assert not violations(case, tmp_path / "case")


def test_every_path_of_the_command_line_has_its_cases() -> None:
    tried = {slot.replace("--from-run --out", "--out") for slot in [*INPUTS, *OUTPUTS]}
    assert sorted(set(places()) - tried) == []
