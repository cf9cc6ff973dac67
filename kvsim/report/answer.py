"""The answer that every reader gets: one object for the terminal, pages, JSON and Python.

The verdict is one paragraph of at most 60 words. What follows it is in sections, each with a
heading, so that a reader who stops early has read what matters most.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from html import escape

from kvsim.frozen import frozen
from kvsim.report.json import Row
from kvsim.report.terminal import BLANK, Block, Hanging, Items

MAX_VERDICT_WORDS = 60  # of a verdict at most
CODE = re.compile("`([^`]+)`")
COMMAND = re.compile(r"^([\w-]+): ((?:[\w-]+ serve|python -m sglang\.\w+) .*)$")

SENTENCE = re.compile(r"(?<=[^\d]\.) (?=[A-Z-])|(?<=\d\.) (?=[A-Z-])")
MAX_COMMAND_WORDS = (
    MAX_VERDICT_WORDS // 2
)  # words of a command line that leave room for what it gives


@frozen
class Answer:
    """What to do, what it gives, how sure that is, and what else would do.

    Attributes
    ----------
    verdict
        What to run on what, its figures and the reason, in at most 60 words.
    figures
        The numbers of the verdict under their contract names, with ``low`` and ``high`` where a
        range is known.
    changes
        What to change if it does not fit or misses a target, each with its figures.
    runner_up
        What comes second, and where it would take over.
    settings
        How to run it: the options of an engine, or that no engine has it.
    evidence
        What was measured on this card, or which card comes nearest.
    assumed
        Numbers that the result rests on and that were not measured.
    left_out
        Techniques that cannot run there, with the reason.
    """

    verdict: str
    figures: Row = field(default_factory=dict)
    changes: Sequence[str] = ()
    runner_up: str = ""
    settings: Sequence[str] = ()
    evidence: Sequence[str] = ()
    assumed: Sequence[str] = ()
    left_out: Sequence[str] = ()

    def __post_init__(self) -> None:
        if len(self.verdict.split()) > MAX_VERDICT_WORDS:
            raise ValueError(f"a verdict of more than {MAX_VERDICT_WORDS} words: {self.verdict}")

    def sections(self) -> Iterator[tuple[str, list[str]]]:
        """Headings and what stands under them; empty ones are left out."""
        every = {
            "What to change": self.changes,
            "Runner-up": [self.runner_up] if self.runner_up else [],
            "How to run it": self.settings,
            "Evidence": self.evidence,
            "Assumed": self.assumed,
            "Left out": self.left_out,
        }
        yield from ((heading, list(lines)) for heading, lines in every.items() if lines)

    def row(self) -> Row:
        """The answer as JSON has it."""
        return {
            "verdict": self.verdict,
            "figures": dict(self.figures),
            "changes": list(self.changes),
            "runner_up": self.runner_up,
            "settings": list(self.settings),
            "evidence": list(self.evidence),
            "assumed": list(self.assumed),
            "left_out": list(self.left_out),
        }

    def head(self) -> list[Block]:
        """What a terminal shows first."""
        return [self.verdict, BLANK]

    def body(self) -> list[Block]:
        """What a terminal shows after the tables: the other sections."""
        blocks: list[Block] = []
        for heading, lines in self.sections():
            single = len(lines) == 1
            blocks += (
                [Hanging(f"{heading}: {lines[0]}")] if single else [f"{heading}:", Items(lines)]
            )
        return blocks

    def html(self) -> str:
        """The answer as part of a page."""
        parts = [f'<p class="verdict">{escape(self.verdict)}</p>']
        for heading, lines in self.sections():
            items = "".join(f"<li>{_mark_command(line)}</li>" for line in lines)
            parts.append(f"<h2>{escape(heading)}</h2><ul>{items}</ul>")
        return f'<section class="answer">{"".join(parts)}</section>'

    def _repr_html_(self) -> str:
        return self.html()

    def __str__(self) -> str:
        """The verdict and what follows it, as text."""
        parts = [self.verdict]
        for heading, lines in self.sections():
            parts.append("\n".join([f"{heading}:", *(f"- {line}" for line in lines)]))
        return "\n\n".join(parts)


def mark_code(text: str) -> str:
    """Escape text for HTML and set what stands in back ticks as code.

    Parameters
    ----------
    text
        Plain text.

    Returns
    -------
    str
        HTML.
    """
    return CODE.sub(r"<code>\1</code>", escape(text))


def _mark_command(line: str) -> str:
    return COMMAND.sub(r"\1: <code>\2</code>", mark_code(line))


def verdict(needed: Sequence[str], wanted: Sequence[str] = ()) -> str:
    """Join sentences to a verdict of at most ``MAX_VERDICT_WORDS`` words.

    Parameters
    ----------
    needed
        Sentences that it always has; empty ones are skipped.
    wanted
        Sentences that are added in order as long as there is room.

    Returns
    -------
    str
        The verdict as one paragraph.
    """
    kept = [text for text in needed if text]
    for text in wanted:
        if text and len(" ".join([*kept, text]).split()) <= MAX_VERDICT_WORDS:
            kept.append(text)
    return " ".join(kept)


def add_command_line(answer: Answer, rows: Sequence[Row]) -> Answer:
    """The answer with the first engine's command line at the end of its verdict.

    Parameters
    ----------
    rows : an engine's settings each; files that are no command line are left to what follows.
    """
    told = next(
        (row for row in rows if row["line"] and len(row["line"].split()) <= MAX_COMMAND_WORDS), None
    )
    if told is None:
        return answer
    line = f"{told['engine']}: {told['line']}"
    kept: list[str] = []
    for sentence in SENTENCE.split(answer.verdict):
        if len(" ".join([*kept, sentence, line]).split()) > MAX_VERDICT_WORDS:
            break
        kept.append(sentence)
    others = [text for text in answer.settings if not COMMAND.match(text)]  # nor the line twice
    return replace(answer, verdict=" ".join([*kept, line]), settings=others)
