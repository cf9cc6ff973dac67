"""Facts planted in a text and asked for at its end: whether a cache still holds what is needed.

What an eviction drops may never be asked for by the text itself, so that perplexity hardly notices;
a question about one sentence far back does.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from random import Random

from torch import Tensor

from kvsim.frozen import frozen
from kvsim.techniques.technique import Technique
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.quality.runs import Forced

PLACES = (
    "Amsterdam",
    "Athens",
    "Berlin",
    "Cairo",
    "Chicago",
    "Delhi",
    "Dublin",
    "Geneva",
    "Houston",
    "Lima",
    "Lisbon",
    "London",
    "Madrid",
    "Mexico",
    "Milan",
    "Moscow",
    "Oslo",
    "Paris",
    "Prague",
    "Rome",
    "Seattle",
    "Sydney",
    "Tokyo",
    "Vienna",
)
QUESTION = "\nThe secret number of {} is"
STATEMENT = QUESTION + " {}."
SECRET_DIGITS = 5
DRAWS = 8  # numbers tried per place until the tokens are as many as the others'


@frozen
class PlantedFacts:
    """Windows of a text with facts in them, and the questions behind.

    Attributes
    ----------
    prompts
        Tokens that are read at once, to the end of the first question. (windows, prompt)
    behind
        The first answer, and further questions with theirs. (windows, tokens)
    answers
        Where in ``behind`` the tokens of each answer are, the first token behind the prompt left
        out, since it comes from the prompt's pass, which reads in full precision.
    """

    prompts: list[list[int]]
    behind: list[list[int]]
    answers: list[range]

    @property
    def count(self) -> int:
        """Facts that are asked for, in all windows."""
        return len(self.answers) * len(self.prompts)


def plant(
    split: Callable[[str], list[int]],
    tokens: Sequence[int],
    sizes: tuple[int, int, int],
    start: tuple[int, ...],
) -> PlantedFacts | None:
    """Facts in windows of a text, at depths that are spread evenly; none where none fits.

    Parameters
    ----------
    split : text to tokens, without a start.
    tokens : of the text.
    sizes : windows, tokens of each that are read at once, and tokens behind them at most.
    """
    count, prompt, most = sizes
    facts = _of_one_length(split)
    told, asked = len(facts[0].told), len(facts[0].asked)
    answer = told - asked
    each = min(len(facts), 1 + (most - answer) // told) if most >= answer > 1 else 0
    own = prompt - len(start) - each * told - asked
    if each < 1 or own < each or len(tokens) < count * own:
        return None
    random, apart = Random(0), len(tokens) // count
    prompts, behind = [], []
    for window in range(count):
        mine = random.sample(facts, each)
        text = tokens[window * apart : window * apart + own]
        depths = [round((i + (window + 0.5) / count) * own / each) for i in range(each)]
        planted = [*start]
        for (begin, end), fact in zip(pairwise([0, *depths, own]), [*mine, None], strict=True):
            planted += [*text[begin:end], *(fact.told if fact else ())]
        asks = random.sample(mine, each)
        prompts.append([*planted, *asks[0].asked])
        behind.append([token for fact in asks for token in fact.told][asked:])
    answers = [range(max(1, i * told), i * told + answer - 1) for i in range(each)]
    return PlantedFacts(prompts, behind, answers)


@frozen
class _Fact:
    """One sentence in tokens, and the part of it that asks."""

    told: list[int]
    asked: list[int]


def _of_one_length(split: Callable[[str], list[int]]) -> list[_Fact]:
    """Facts whose sentences have as many tokens as most have, and their questions too."""
    found: dict[str, list[_Fact]] = {}
    for place, fact in _drawn(split):
        found.setdefault(place, []).append(fact)
    lengths = Counter(_lengths(fact) for facts in found.values() for fact in facts)
    ((usual, _),) = lengths.most_common(1)
    alike = ([f for f in facts if _lengths(f) == usual] for facts in found.values())
    return [facts[0] for facts in alike if facts]


def _lengths(fact: _Fact) -> tuple[int, int]:
    return len(fact.told), len(fact.asked)


def _drawn(split: Callable[[str], list[int]]) -> Iterator[tuple[str, _Fact]]:
    random = Random(0)
    for place in PLACES:
        asked = split(QUESTION.format(place))
        for _ in range(DRAWS):
            number = random.randrange(10 ** (SECRET_DIGITS - 1), 10**SECRET_DIGITS)
            told = split(STATEMENT.format(place, number))
            if told[: len(asked)] == asked:
                yield place, _Fact(told, asked)


class Asked(Forced):
    """A run along the questions; counts the answers whose every token is the likeliest."""

    def __init__(self, decoder: Decoder, technique: Technique, facts: PlantedFacts) -> None:
        texts = [[*a, *b] for a, b in zip(facts.prompts, facts.behind, strict=True)]
        super().__init__(decoder, technique, texts, len(facts.prompts[0]))
        self._answers = facts.answers
        self._right: dict[int, Tensor] = {}

    @property
    def recall(self) -> float:
        """Share of the facts that were found, 0 to 1."""
        right = [
            all(bool(self._right[place][window]) for place in answer)
            for answer in self._answers
            for window in range(self.batch)
        ]
        return sum(right) / len(right)

    def _score(self, logits: Tensor, place: int) -> None:
        self._right[place] = logits.argmax(-1) == self.text[:, place]
