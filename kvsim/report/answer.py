"""The verdict of a command and the sections that explain it.

The verdict is one paragraph of at most 60 words. The sections after it are ordered by importance.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, fields

from kvsim.frozen import frozen
from kvsim.report.json import Row
from kvsim.report.terminal import BLANK, COMMAND, Block, Command, Hanging, Items
from kvsim.report.units import likelihood, rate, rounded, seconds, usd

BRIEF = 2  # sentences of evidence that a terminal shows unless asked for more
NOTES = "Notes"  # heading of what the verdict has no room for
MAX_CHANGES = 3  # that a brief answer lists
MAX_VERDICT_WORDS = 60  # of a verdict at most

# a sentence may begin with a small letter, as names of techniques do
SENTENCE = re.compile(r"(?<=\.)(?<!approx\.)(?<!vs\.)(?<!e\.g\.) (?=\S)")

TILES: dict[str, tuple[str, Callable[[float], str]]] = {
    "requests_per_s": ("requests/s", lambda x: rounded(x, 3)),
    "output_tok_s": ("output tokens/s", rate),
    "ttft_s": ("TTFT", seconds),
    "tpot_s": ("TPOT", seconds),
    "usd_per_hour": ("price per hour", usd),
    "usd_per_million_tokens": ("per million output tokens", usd),
    "probability": ("probability of meeting the targets", likelihood),
}
"""Figures that a page shows at its top, by key: title, and how they are written."""


@frozen
class Answer:
    """The verdict of a command, with alternatives, evidence and assumptions.

    Attributes
    ----------
    verdict
        The recommendation with its main figures and reason, in at most 60 words.
    figures
        Numbers of the verdict by their names in the JSON output; ``ranges`` has intervals.
    changes
        Changes that would improve the result or make it feasible, each with its effect.
    runner_up
        The second-best choice, and when it would be better.
    settings
        How to run the recommendation: the command line of an engine, or that none supports it.
    evidence
        Measurements on this GPU, or on the most similar one, and their errors.
    assumed
        Inputs that were assumed rather than measured.
    left_out
        Techniques that cannot run, with the reason.
    notes
        Sentences for which the verdict has no room; those beyond its limit are moved here.
    """

    verdict: str
    figures: Row = field(default_factory=dict)
    changes: Sequence[str] = ()
    runner_up: str = ""
    settings: Sequence[str] = ()
    evidence: Sequence[str] = ()
    assumed: Sequence[str] = ()
    left_out: Sequence[str] = ()
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        said, more = split_verdict(self.verdict)
        self.__dict__.update(verdict=said, notes=[*more, *self.notes])

    def sections(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the heading and the lines of every section that is not empty."""
        every = {
            NOTES: self.notes,
            "What to change": self.changes,
            "Runner-up": [self.runner_up] if self.runner_up else [],
            "How to run it": self.settings,
            "Evidence": self.evidence,
            "Assumed": self.assumed,
            "Left out": self.left_out,
        }
        yield from ((heading, list(lines)) for heading, lines in every.items() if lines)

    def row(self) -> Row:
        """Return the answer as a dictionary for the JSON output."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        found["figures"] = dict(self.figures)
        row = {k: v if isinstance(v, str | dict) else list(v) for k, v in found.items()}
        return {k: v for k, v in row.items() if v or k != "notes"}

    def head(self) -> list[Block]:
        """Return the blocks that a terminal shows above the tables."""
        return [self.verdict, *map(Hanging, self.notes), BLANK]

    def body(self, brief: int = 0, changes: int = MAX_CHANGES, command: bool = True) -> list[Block]:
        """Return the blocks that a terminal shows below the tables.

        Parameters
        ----------
        brief
            Number of sentences of evidence to show, with the other sections abridged; 0 for all.
        changes
            Number of changes that a brief answer lists; with fewer than usual, it also leaves out
            what cannot run.
        command
            Whether to show the command of the engine; not where ``--emit`` writes it below.
        """
        blocks: list[Block] = []
        for heading, lines in self.sections():
            if heading == NOTES:
                continue  # of the head
            if brief and heading == "Evidence":
                lines = [" ".join(lines[:brief])]
            elif brief and heading == "Runner-up":
                continue  # a row of the table
            elif brief and heading == "Left out" and changes < MAX_CHANGES:
                continue
            elif brief and heading in ("Assumed", "Left out"):
                lines = ["; ".join(line.rstrip(".") for line in lines) + "."]
            elif brief and heading == "What to change" and (cut := self._cut(changes)):
                lines = [*lines[:changes], f"{len(cut)} more with --verbose."]
            if heading == "How to run it" and (found := COMMAND.match(lines[0])):
                engine, line, needs = found.groups()
                lines = lines[1:]
                if command:
                    blocks += [f"How to run it with {engine}{needs or ''}:", Command(line)]
                    blocks += [Items(lines)] if lines else []
                if command or not lines:
                    continue
            single = len(lines) == 1
            blocks += (
                [Hanging(f"{heading}: {lines[0]}")] if single else [f"{heading}:", Items(lines)]
            )
        return blocks

    def _cut(self, changes: int) -> Sequence[str]:
        """Return the changes that a brief answer does not list; one too many is listed."""
        return self.changes[changes:] if len(self.changes) > changes + 1 else ()

    def rest(self, brief: int, changes: int = MAX_CHANGES) -> list[Block]:
        """Return the blocks that :meth:`body` leaves out, for ``--verbose``.

        Parameters
        ----------
        brief, changes
            The numbers that were given to :meth:`body`.
        """
        told = [*self._cut(changes), *([self.runner_up] if self.runner_up else [])]
        told += self.evidence[brief:]
        told += self.left_out if changes < MAX_CHANGES else ()
        return [Items(told)] if told else []

    def tiles(self) -> Iterator[tuple[str, str, str]]:
        """Yield title, value and interval of the main figures, for the top of a page."""
        ranges = self.figures.get("ranges", {})
        for key, (title, show) in TILES.items():
            value = self.figures.get(key)
            if isinstance(value, dict):  # percentiles: the one that was asked for, else p90
                part = next((p for p in ("at_target", "p90", "p99") if value.get(p)), "")
                title, value = f"{title} {part}".replace(" at_target", ""), value.get(part)
            if isinstance(value, int | float):
                found = ranges.get(key)
                between = found and f"{show(found['low'])} to {show(found['high'])}"
                yield title, show(value), between or ""

    def html(self) -> str:
        """Return the answer as HTML, for a page or a notebook."""
        from kvsim.report.page import render_part

        return render_part("answer.html", "answer", self)

    def _repr_html_(self) -> str:
        return self.html()

    def __str__(self) -> str:
        """The verdict and what follows it, as text."""
        parts = [self.verdict]
        for heading, lines in self.sections():
            parts.append("\n".join([f"{heading}:", *(f"- {line}" for line in lines)]))
        return "\n\n".join(parts)


def split_verdict(text: str) -> tuple[str, list[str]]:
    """Split a verdict after the last sentence, clause or word within ``MAX_VERDICT_WORDS`` words.

    Parameters
    ----------
    text
        The verdict, of any length.

    Returns
    -------
    tuple of str and list of str
        The part within the limit, and the sentences after it.
    """
    if len(text.split()) <= MAX_VERDICT_WORDS:
        return text, []
    first, *others = SENTENCE.split(text)
    if len(first.split()) <= MAX_VERDICT_WORDS:
        while len(f"{first} {others[0]}".split()) <= MAX_VERDICT_WORDS:
            first = f"{first} {others.pop(0)}"
        return first, others
    within = " ".join(first.split()[:MAX_VERDICT_WORDS])
    marks = [mark.start() for mark in re.finditer(r"(?<=\S)[;,](?= )", within)]
    end = max(marks, default=len(within))
    rest = first[end:].lstrip(" ;,")
    return f"{within[:end]}.", [rest[:1].upper() + rest[1:], *others]


def verdict(needed: Sequence[str], wanted: Sequence[str] = ()) -> str:
    """Combine sentences into a verdict of at most ``MAX_VERDICT_WORDS`` words.

    Parameters
    ----------
    needed
        Sentences that are always included; empty ones are skipped.
    wanted
        Sentences that are added in order while there is room.

    Returns
    -------
    str
        One paragraph.
    """
    kept = [text for text in needed if text]
    for text in wanted:
        if text and len(" ".join([*kept, text]).split()) <= MAX_VERDICT_WORDS:
            kept.append(text)
    told = " ".join(kept)
    return f"F{told[1:]}" if told.startswith("full KV") else told
