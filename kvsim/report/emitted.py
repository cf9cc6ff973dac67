"""Engine flags in an answer: who asks for them reads them in the verdict."""

import re
from collections.abc import Sequence
from dataclasses import replace

from kvsim.report.answer import COMMAND, WORDS, Answer
from kvsim.report.json import Row

SENTENCE = re.compile(r"(?<=[^\d]\.) (?=[A-Z-])|(?<=\d\.) (?=[A-Z-])")
ROOM = WORDS // 2  # words of a command line that leave room for what it gives


def with_flags(answer: Answer, rows: Sequence[Row]) -> Answer:
    """The answer with the first engine's command line at the end of its verdict.

    Parameters
    ----------
    rows : an engine's settings each; files that are no command line are left to what follows.
    """
    told = next((row for row in rows if row["line"] and len(row["line"].split()) <= ROOM), None)
    if told is None:
        return answer
    line = f"{told['engine']}: {told['line']}"
    kept: list[str] = []
    for sentence in SENTENCE.split(answer.verdict):
        if len(" ".join([*kept, sentence, line]).split()) > WORDS:
            break
        kept.append(sentence)
    others = [text for text in answer.settings if not COMMAND.match(text)]  # nor the line twice
    return replace(answer, verdict=" ".join([*kept, line]), settings=others)
