"""Single statements of techniques, each by hand at a point where nothing else hides it."""

import pytest

from kvsim.techniques import parse, technique
from kvsim.techniques.axes.drafting import SINK
from tests.support.arithmetic import deployment


@pytest.mark.parametrize(
    ("text", "one_pass"),
    [("full", True), ("place:parts=2", False), ("place:parts=1", True), ("fastdecode", False),
     ("place:host_share=0.5", False), ("place:values_host=1", True)],
)  # fmt: skip
def test_a_prompt_joins_a_round_where_nothing_is_streamed(text: str, one_pass: bool) -> None:
    """Columns of a batch are passes of their own, even with everything on the GPU."""
    assert parse(text).mixes is one_pass


def test_a_technique_forgets_what_it_knew_of_a_deployment_once_it_is_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(technique, "MAX_CACHED", 2)
    t, d, asked = parse("full"), deployment("llama2-7b"), []

    def ask(what: str) -> str:
        return t.cached(d, what, lambda: asked.append(what) or what)  # type: ignore[func-returns-value]

    assert [ask(what) for what in "abab"] == [*"abab"]
    assert asked == [*"ab"]
    assert [ask(what) for what in "cac"] == [*"cac"]
    assert asked == [*"abca"]


def test_a_streamingllm_draft_keeps_the_sinks_that_streamingllm_keeps() -> None:
    """Four of them: Xiao et al., ICLR 2024, table 2."""
    draft = parse("selfdraft:reads=streamingllm,gamma=3")
    assert draft.drafts == 3 and draft.settings["reads"] == "streamingllm"
    assert parse("streamingllm").settings["sink"] == SINK == 4
