"""Numbers as people read them, and tables that never break one."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from kvsim.report import units
from kvsim.report.table import Table, cells_table, quantity_column, text_column
from kvsim.report.terminal import wrap_prose

WIDTHS = (60, 80, 100, 160)
NUMBER = re.compile(r"[0-9][0-9,.]*")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0773, "77.3 ms"), (0.9996, "1.00 s"), (7.758, "7.76 s"), (56.287, "56.3 s"),
     (1193.325, "19.9 min"), (21000.0, "5.83 h"), (4.5e-4, "450 µs"), (None, "-"), (0.0, "0 µs")],
)  # fmt: skip
def test_times_have_the_unit_of_their_size(value: float | None, text: str) -> None:
    assert units.seconds(value) == text


@given(some.floats(1e-5, 9e4), some.integers(2, 5))
def test_rounding_keeps_the_digits_asked_for(value: float, digits: int) -> None:
    shown = float(units.rounded(value, digits).replace(",", ""))
    assert shown == pytest.approx(value, rel=0.51 * 10 ** (1 - digits))


ROW = some.fixed_dictionaries(
    {
        "name": some.text("abcdefgh", min_size=1, max_size=16),
        "batch": some.integers(1, 10**6),
        "ttft_s": some.floats(1e-4, 1e5),
        "output_tok_s": some.floats(1e-2, 1e6),
        "gpu_bytes": some.floats(0, 1e12),
        "bound_by": some.sampled_from(["GPU memory bandwidth", "arithmetic", "host-to-GPU link"]),
    }
)


@settings(max_examples=40, deadline=None)
@given(some.lists(ROW, min_size=1, max_size=5), some.sampled_from(WIDTHS))
def test_a_table_fits_and_breaks_no_number(rows: list[dict[str, object]], width: int) -> None:
    keys = ("batch", "ttft_s", "output_tok_s", "gpu_bytes")
    columns = [text_column("technique", lambda row: row["name"])]
    columns += [quantity_column(key, rank) for rank, key in enumerate(keys)] + [
        quantity_column("bound_by", 9)
    ]
    made = Table(columns, rows, below=lambda row: "first=1000, second=2000, third=3000 " * 2)
    lines = made.lines(width)
    assert max(map(len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)
    text = "\n".join(lines)
    for column in made.fit_columns(width):
        if not column.text:
            assert all(column.show(row) in text for row in rows)


def test_columns_of_the_highest_rank_go_first_and_are_named() -> None:
    cells = ["a" * 20, "1" * 20, "2" * 20, "3" * 9]
    made = cells_table(("name", "kept", "first", "second"), [cells], ranks="0012")
    text = "\n".join(made.lines(60))
    assert "3" not in text and "2" * 20 not in text and "1" * 20 in text
    assert "Columns omitted at this width: first, second." in text
    assert "3" * 9 in "\n".join(made.lines(100))


def test_prose_keeps_a_number_with_its_unit() -> None:
    text = "it takes 77.3 ms and 48.0 GiB at 12 % of 300 tok/s " * 6
    for width in WIDTHS:
        lines = wrap_prose(text, width).splitlines()
        assert max(map(len, lines)) <= width
        assert not [line for line in lines if NUMBER.fullmatch(line.split()[-1])]
