"""Tables for the terminal, at most 100 columns wide."""

from typing import Any

from rich.console import Console
from rich.table import Table

from kvsim.report.rows import Row, gib

WIDTH = 100


def console() -> Console:
    """Standard output; exactly as wide as a table may be when it is not a terminal."""
    out = Console(highlight=False)
    return out if out.is_terminal and out.width < WIDTH else Console(width=WIDTH, highlight=False)


def table(title: str, columns: dict[str, str], rows: list[list[str]]) -> Table:
    """``columns`` maps headings to their justification."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading, justify in columns.items():
        made.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        made.add_row(*row)
    return made


def short(value: Any, digits: int = 4) -> str:
    """A number with few digits, a dash for what does not exist."""
    if value is None:
        return "-"
    if isinstance(value, (int, float)) and abs(value) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def spec(row: Row) -> str:
    """Technique with its settings, broken where a line may end."""
    given = ", ".join(f"{k}={v}" for k, v in row["params"].items())
    return f"{row['technique']} {given}".strip()


def milliseconds(value: float | None) -> str:
    """Seconds as milliseconds."""
    return "-" if value is None else short(value * 1e3)


def print_predictions(rows: list[Row]) -> None:
    """The table of ``kvsim predict``."""
    first = rows[0]
    title = f"{first['model']} on {first['gpu']}, stack {first['stack']}"
    columns = {"technique": "left"} | dict.fromkeys(
        ("batch", "prompt", "gen", "TTFT ms", "TPOT ms", "tok/s", "GPU GiB", "host GiB", "max b"),
        "right",
    )
    body = [
        [
            spec(r), short(r["batch"], 6), short(r["prompt"], 6), short(r["generate"], 6),
            milliseconds(r["ttft_s"]), milliseconds(r["tpot_s"]), short(r["decode_tok_s"]),
            gib(r["gpu_bytes"]) + ("" if r["fits"] else " !"), gib(r["host_bytes"]),
            short(r["max_batch"], 6),
        ]
        for r in rows
    ]  # fmt: skip
    out = console()
    out.print(table(title, columns, body))
    if not all(r["fits"] for r in rows):
        out.print("! does not fit in GPU or host memory")
    for r in rows:
        out.print(f"{r['technique']} at batch {r['batch']}: bound by {r['bound_by']}", style="dim")
    print_foot(out, first, {n for r in rows for n in r["notes"]})


def print_foot(out: Console, row: Row, notes: set[str]) -> None:
    """Notes and basis."""
    for note in sorted(notes):
        out.print(f"Note: {note}.")
    print_basis(out, row["basis"])


def print_basis(out: Console, basis: dict[str, str]) -> None:
    """What the numbers stand on."""
    out.print(
        f"Basis: {basis['kind']}; hardware {basis['hardware']}, stack {basis['stack']}. "
        f"Error on rows not seen: {basis['error']}"
    )


def print_plan(heading: str, answer: Row) -> None:
    """The answer of ``kvsim plan``."""
    out = console()
    chosen, base = answer["predicted"], answer["baseline"]
    out.print(heading, style="bold")
    out.print(
        f"prompt {chosen['prompt']}, generate {chosen['generate']}, best {answer['objective']}\n"
    )
    entries = [("choice", chosen)]
    if base and chosen["technique"] != base["technique"]:
        entries.append(("full KV", base))
    for row in answer["alternatives"]:
        entries.append((_standing(row), row))
    columns = {"": "left", "technique": "left"} | dict.fromkeys(
        ("batch", "TTFT ms", "TPOT ms", "tok/s", "vs full", "GPU GiB", "host GiB"), "right"
    )
    body = [
        [
            standing, spec(r), short(r["batch"], 6), milliseconds(r["ttft_s"]),
            milliseconds(r["tpot_s"]), short(r["output_tok_s"]),
            f"{r['output_tok_s'] / base['output_tok_s']:.2f}x" if base else "-",
            gib(r["gpu_bytes"]), gib(r["host_bytes"]),
        ]
        for standing, r in entries
    ]  # fmt: skip
    out.print(table("", columns, body))
    out.print(
        "tok/s: generated tokens per second of the whole batch, prefill included", style="dim"
    )
    if not base:
        out.print("Full KV does not fit on this GPU at any batch.")
    out.print(f"\nThe choice is bound by {chosen['bound_by']}.")
    for entry in answer["binding"]:
        out.print(f"Limit that binds: {entry['means']}{_gain(entry)}.")
    for change, gain in answer["prices"].items():
        out.print(f"With {change}: {gain:+.1%} {answer['objective']}.")
    notes = {n for r in (chosen, *answer["alternatives"]) for n in r["notes"]}
    print_foot(out, chosen, notes)
    out.print(f"Not modelled: {'; '.join(answer['not_modelled'])}.")
    solver = answer["solver"]
    out.print(
        f"Solver: {solver['status']} among {solver['options']} options, gap {solver['gap']:.1g}, "
        f"{solver['seconds']:.2f} s",
        style="dim",
    )


def _standing(row: Row) -> str:
    if row["allowed"]:
        return "or"
    return "needs --lossy" if not row["lossless"] else "needs --acceptance"


def _gain(entry: Row) -> str:
    """What lifting a limit of the user's would bring; memory has its own line."""
    if entry["limit"].endswith("memory"):
        return ""
    return f" (without it {entry['gain_without']:+.0%})"


def print_list(title: str, rows: list[Row], fields: dict[str, str]) -> None:
    """A catalogue; ``fields`` maps row keys to headings."""
    body = [[_cell(row[key], key) for key in fields] for row in rows]
    columns = {
        heading: "right" if rows and isinstance(rows[0][key], (int, float)) else "left"
        for key, heading in fields.items()
    }
    console().print(table(title, columns, body))


def _cell(value: Any, key: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return short(value / SCALES.get(key, 1), 6 if key in ("max_context",) else 4)
    return "-" if value is None else str(value)


SCALES = {
    "parameters": 1e9,
    "active_parameters": 1e9,
    "kv_bytes_per_token": 1024,
    "gpu_memory_bytes": 2**30,
    "hbm_bytes_per_s": 1e9,
    "fp16_flop_per_s": 1e12,
    "h2d_bytes_per_s": 1e9,
}
