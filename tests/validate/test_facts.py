"""Planted facts: once in the prompt, asked for behind it, counted as a plain loop counts them."""

import pytest

pytest.importorskip("torch")

from kvsim.techniques import parse
from kvsim.validate.quality.measure import PLACES, SECRET_DIGITS, Asked, PlantedFacts, plant
from tests.support.decoders import decoder, oracle_logits, prompts

START = (300,)
SIZES = 3, 260, 150


def letters(text: str) -> list[int]:
    """A tokeniser that is easy to read back."""
    return [ord(letter) for letter in text]


def words(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


def planted() -> PlantedFacts:
    found = plant(letters, letters("word " * 2000), SIZES, START)
    assert found is not None
    return found


def test_every_fact_that_is_asked_for_stands_once_in_the_prompt() -> None:
    found, (windows, prompt, behind) = planted(), SIZES
    assert len(found.prompts) == len(found.behind) == windows
    assert {len(tokens) for tokens in found.prompts} == {prompt}
    assert len({len(tokens) for tokens in found.behind}) == 1 and len(found.behind[0]) <= behind
    assert found.count == windows * len(found.answers) and len(found.answers) > 2
    for tokens, asked in zip(found.prompts, found.behind, strict=True):
        assert tokens[0] == START[0]
        read = words(tokens[1:])
        told = (read + words(asked)).split("The secret number of ")[-len(found.answers) :]
        assert read.endswith(" is") and not read.endswith("word is")
        for sentence in told:
            place, _, number = sentence.rstrip(".\n").partition(" is ")
            assert place in PLACES.split() and len(number) == SECRET_DIGITS and number.isdigit()
            assert read.count(f"The secret number of {place} is {number}.") == 1


def test_answers_are_the_numbers_but_for_the_token_that_the_prompt_gives() -> None:
    found = planted()
    for asked in found.behind:
        first, *others = ("".join(chr(asked[place]) for place in some) for some in found.answers)
        assert first.isdigit() and len(first) == SECRET_DIGITS  # the space before it is not scored
        assert all(text[0] == " " and text[1:].isdigit() for text in others)


def test_depths_are_spread_over_the_whole_text() -> None:
    depths = [
        words(tokens[1:]).index("\nThe secret", at) / SIZES[1]
        for tokens in planted().prompts
        for at in (0, 60, 120)
    ]
    assert min(depths) < 0.15 and max(depths) > 0.5


@pytest.mark.parametrize("sizes", [(3, 40, 150), (3, 260, 4), (190, 260, 150)])
def test_where_none_fits_there_is_none(sizes: tuple[int, int, int]) -> None:
    assert plant(letters, letters("word " * 2000), sizes, START) is None


def test_a_fact_is_found_where_every_token_is_the_likeliest() -> None:
    texts, prompt = prompts(80, 80), 60
    likeliest = [oracle_logits("llama", t[:prompt], t[prompt:]).argmax(-1).tolist() for t in texts]
    # one answer is what the model would say next, the others are not
    for text, said in zip(texts[:1], likeliest, strict=False):
        text[prompt + 1] = said[1]
    facts = PlantedFacts(
        [t[:prompt] for t in texts], [t[prompt:] for t in texts], [range(1, 2), range(9, 11)]
    )
    asked = Asked(decoder("llama"), parse("full"), facts)
    asked.complete()
    expected = []
    for text in texts:
        said = oracle_logits("llama", text[:prompt], text[prompt:]).argmax(-1).tolist()
        for some in facts.answers:
            expected.append(all(said[at] == text[prompt + at] for at in some))
    assert asked.recall == pytest.approx(sum(expected) / 4)
