"""``python -m tests.frozen [KIND[/FILE] ...]``: renew frozen answers and print what moved."""

import sys

from tests.frozen.kinds import KINDS
from tests.frozen.store import Kind

SHOWN = 40  # differences of a file that are printed


def renew(kind: Kind, file: str) -> int:
    """Renew one file; print and count the quantities that moved."""
    before, now, moved = kind.load(file), {}, 0
    for case, old in before.items():
        now[case] = kind.answer(case)
        for line in kind.compare(old, now[case]) if old else ():
            moved += 1
            if moved <= SHOWN:
                print(f"{kind.name}/{file}: {case}: {line}")
    if moved > SHOWN:
        print(f"{kind.name}/{file}: and {moved - SHOWN} more")
    kind.save(file, now)
    return moved


def main(wanted: list[str]) -> None:
    """Renew the kinds or files whose names were given, or all of them."""
    files = [(kind, file) for kind in KINDS.values() for file in kind.files()]
    chosen = [
        (kind, file)
        for kind, file in files
        if not wanted or kind.name in wanted or f"{kind.name}/{file}" in wanted
    ]
    if not chosen:
        sys.exit(f"no frozen answers named {' '.join(wanted)}; there are {', '.join(KINDS)}")
    moved = 0
    for i, (kind, file) in enumerate(chosen, 1):
        print(f"{i}/{len(chosen)} {kind.name}/{file}", file=sys.stderr)
        moved += renew(kind, file)
    print(f"{moved} quantities moved in {len(chosen)} files")


if __name__ == "__main__":
    main(sys.argv[1:])
