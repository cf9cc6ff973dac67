"""The only place where kvsim opens files: one reader and one writer for all commands.

Reading takes regular files only, no more of them than their kind may have, and text in UTF-8.
Writing replaces a file as a whole: a locked draft beside it takes its place once it is on disk.
"""

from kvsim.files.drafts import remove_orphans
from kvsim.files.kinds import Kind, check_room, system_text
from kvsim.files.ledger import current, ledger, own_output
from kvsim.files.parsing import (
    parsed_json,
    read_json,
    read_json_lines,
    read_records,
    read_rows,
    read_toml,
)
from kvsim.files.reading import (
    check_input,
    check_type,
    opened,
    read_bytes,
    read_lines,
    read_text,
    shown,
)
from kvsim.files.toml_text import toml_lines
from kvsim.files.writing import (
    append,
    check_target,
    cut_off,
    held,
    make_folder,
    replace_text,
    replacing,
    replacing_all,
    write_draft,
)

__all__ = [
    "Kind",
    "append",
    "check_input",
    "check_room",
    "check_target",
    "check_type",
    "current",
    "cut_off",
    "held",
    "ledger",
    "make_folder",
    "opened",
    "own_output",
    "parsed_json",
    "read_bytes",
    "read_json",
    "read_json_lines",
    "read_lines",
    "read_records",
    "read_rows",
    "read_text",
    "read_toml",
    "remove_orphans",
    "replace_text",
    "replacing",
    "replacing_all",
    "shown",
    "system_text",
    "toml_lines",
    "write_draft",
]
