"""Tables for the terminal, at most 100 columns wide."""

import re
from typing import Any

from rich.console import Console
from rich.table import Table

from kvsim.report.rows import Row, entries, error, gib, spec

WIDTH = 100
NAME_END = re.compile("[ :]")  # of a technique, before its settings


def console() -> Console:
    """Standard output; exactly as wide as a table may be when it is not a terminal."""
    out = Console(highlight=False, markup=False, emoji=False)
    if not out.is_terminal or out.width > WIDTH:
        out.width = WIDTH
    return out


def table(columns: dict[str, str], rows: list[list[str]]) -> Table:
    """``columns`` maps headings to their justification."""
    made = Table(box=None, pad_edge=False)
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


def milliseconds(value: float | None) -> str:
    """Seconds as milliseconds."""
    return "-" if value is None else short(value * 1e3)


def print_predictions(rows: list[Row]) -> None:
    """The table of ``kvsim predict``; what all rows have in common stands above it."""
    first, out = rows[0], console()
    title = [f"{first['model']} on {first['gpu']}", f"stack {first['stack']}"]
    title += [f"{first['tp']} GPUs"] if first["tp"] > 1 else []
    title += [f"{first['weights']} weights"]
    varying = []
    for key in ("prompt", "generate"):
        if len({row[key] for row in rows}) > 1:
            varying.append(key)
        else:
            title.append(f"{key} {first[key]}")
    out.print(", ".join(title), style="bold")
    labels = short_names([spec(row) for row in rows])
    numbers = ("TTFT ms", "TPOT ms", "tok/s", "GPU GiB", "host GiB", "max batch")
    columns = {"technique": "left"} | dict.fromkeys(("batch", *varying, *numbers), "right")
    body = [
        [
            labels[spec(r)], *(short(r[key], 6) for key in ("batch", *varying)),
            milliseconds(r["ttft_s"]), milliseconds(r["tpot_s"]), short(r["decode_tok_s"]),
            gib(r["gpu_bytes"]) + ("" if r["fits"] else " !"), gib(r["host_bytes"]),
            short(r["max_batch"], 6), r["bound_by"],
        ]
        for r in rows
    ]  # fmt: skip
    out.print(table(columns | {"bound by": "left"}, body))
    if not all(r["fits"] for r in rows):
        out.print("! does not fit in GPU or host memory")
    print_settings(out, labels)
    about = [
        ", ".join([labels[spec(r)], *(f"{key} {r[key]}" for key in ("batch", *varying))])
        for r in rows
    ]
    print_notes(out, list(zip(about, rows, strict=True)))
    print_basis(out, first["basis"])


def short_names(specs: list[str]) -> dict[str, str]:
    """Techniques with their settings to names without, numbered where one comes again."""
    different = list(dict.fromkeys(specs))
    names = [NAME_END.split(text)[0] for text in different]
    return {
        text: name if names.count(name) == 1 else f"{name} #{names[: i + 1].count(name)}"
        for i, (text, name) in enumerate(zip(different, names, strict=True))
    }


def print_settings(out: Console, names: dict[str, str]) -> None:
    """The settings behind each short name."""
    for text, name in names.items():
        _, *settings = NAME_END.split(text, maxsplit=1)
        if settings:
            out.print(f"{name}: {settings[0]}")


def print_notes(out: Console, rows: list[tuple[str, Row]]) -> None:
    """Each note once, with the rows it is about unless it is about all of them."""
    about: dict[str, list[str]] = {}
    for label, row in rows:
        for note in row["notes"]:
            about.setdefault(note, []).append(label)
    for note, labels in sorted(about.items(), key=lambda item: -len(item[1])):
        several = f"{labels[0]} and {len(labels) - 1} more" if labels[1:] else labels[0]
        out.print(f"Note: {note}." if len(labels) == len(rows) else f"Note ({several}): {note}.")


def print_basis(out: Console, basis: Row) -> None:
    """What the numbers stand on."""
    kind = " ".join(filter(None, (basis["kind"], basis["calibrated"])))
    out.print(
        f"Basis: {kind}; hardware {basis['hardware']}, stack {basis['stack']}. "
        f"Error on rows not seen: {error(basis)}"
    )


def print_plan(heading: str, answer: Row) -> None:
    """The answer of ``kvsim plan``."""
    out = console()
    chosen, base, shown = answer["predicted"], answer["baseline"], entries(answer)
    out.print(heading, style="bold")
    out.print(
        f"prompt {chosen['prompt']}, generate {chosen['generate']}, best {answer['objective']}\n"
    )
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
        for standing, r in shown
    ]  # fmt: skip
    out.print(table(columns, body))
    out.print(
        "tok/s: generated tokens per second of the whole batch, prefill included", style="dim"
    )
    if not base:
        out.print("Full KV does not fit on this GPU at any batch.")
    out.print(f"\nThe choice is bound by {chosen['bound_by']}.")
    for line in outlook(answer):
        out.print(line)
    print_notes(out, [(row["technique"], row) for _, row in shown])
    print_basis(out, chosen["basis"])
    out.print(f"Not modelled: {'; '.join(answer['not_modelled'])}.")
    solver = answer["solver"]
    out.print(
        f"Solver: {solver['status']} among {solver['options']} options, gap {solver['gap']:.1g}, "
        f"{solver['seconds']:.2f} s",
        style="dim",
    )


def outlook(answer: Row) -> list[str]:
    """What holds the choice back, and what would bring more."""
    better = answer["objective"]

    def gain(share: float) -> str:
        if share < 5e-4:
            return f"no gain in {better}"
        if better == "throughput":
            return f"{share:+.1%} throughput"
        return f"{-share / (1 + share):+.1%} {better}"

    limits = [
        f"Limit that binds: {entry['means']}"
        # what lifting a limit of the user's would bring; memory has its own line
        + ("." if "memory" in entry["limit"] else f" (without it {gain(entry['gain_without'])}).")
        for entry in answer["binding"]
    ]
    return limits + [f"With {change}: {gain(g)}." for change, g in answer["prices"].items()]


def print_list(title: str, rows: list[Row], fields: dict[str, str]) -> None:
    """A catalogue; ``fields`` maps row keys to headings."""
    body = [[_cell(row[key], key) for key in fields] for row in rows]
    columns = {
        heading: "right" if rows and isinstance(rows[0][key], (int, float)) else "left"
        for key, heading in fields.items()
    }
    out = console()
    out.print(title, style="bold")
    out.print(table(columns, body))


def _cell(value: Any, key: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return short(value / SCALES.get(key, 1), 6 if key in ("max_context",) else 4)
    return str(value) if value not in (None, "") else "-"


SCALES = {
    "parameters": 1e9,
    "active_parameters": 1e9,
    "kv_bytes_per_token": 1024,
    "gpu_memory_bytes": 2**30,
    "hbm_bytes_per_s": 1e9,
    "fp16_flop_per_s": 1e12,
    "h2d_bytes_per_s": 1e9,
}
