"""Texts of samples: stop strings in any split into tokens, and streams whose pieces are the whole text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.inference.serving.text import GrowingText, StopStrings, first_stop, text_of

pytestmark = pytest.mark.hostile


def decode(tokens: list[int]) -> str:
    """A tokenizer of single bytes: every character beyond ASCII is several tokens."""
    return bytes(tokens).decode(errors="replace")


TEXT = st.text(alphabet="ab</ é漢😀", max_size=30)
STOPS = st.lists(st.text(alphabet="ab</ é", min_size=1, max_size=4), max_size=3)


def sampled(text: str, stops: list[str]) -> tuple[list[int], str | None]:
    """Return the tokens of a sample that would have become `text`, and the stop string that ended it."""
    tokens: list[int] = []
    ends = StopStrings(stops, decode).search() if stops else None
    for token in text.encode():
        tokens.append(token)
        if ends is not None and (stop := ends.append(token)) is not None:
            return tokens, stop
    return tokens, None


@given(TEXT, STOPS)
def test_a_sample_ends_at_the_first_stop_string_and_its_text_before_it(text: str, stops: list[str]) -> None:
    tokens, stop = sampled(text, stops)
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    assert (stop is None) == (not ends)
    assert decode(tokens) == text[: min(ends, default=len(text))]
    if stop is not None:
        assert text_of(tokens, stop, decode) == decode(tokens)[: decode(tokens).index(stop)]


@given(TEXT, STOPS)
def test_the_pieces_of_a_stream_are_the_whole_text(text: str, stops: list[str]) -> None:
    tokens, stop = sampled(text, stops)
    whole = text_of(tokens, stop, decode)
    growing, shown = GrowingText(stops, decode), ""
    for token in tokens:
        shown += growing.append(token)
        assert whole.startswith(shown)  # neither half a character nor the beginning of a stop string
        assert growing.shown == shown
    assert shown + growing.finish(stop) == whole


@pytest.mark.parametrize("byte", [0x61, 0x80, 0xF0])
def test_a_token_decodes_few_others_however_long_sample_and_stop_strings_are(byte: int) -> None:
    decoded: list[int] = []

    def counted(tokens: list[int]) -> str:
        decoded.append(len(tokens))
        return decode(tokens)

    search, growing = StopStrings(["x" * 1000] * 16, counted, counted).search(), GrowingText(["x" * 1000], counted)
    for _ in range(3000):
        assert search.append(byte) is None
        growing.append(byte)
    assert max(decoded) <= 32


def test_a_stop_token_is_no_part_of_the_text() -> None:
    assert text_of([*b"ab"], ord("b"), decode) == "a"
    assert text_of([*b"ab"], None, decode) == "ab"


@pytest.mark.parametrize(("text", "found"), [("xaby", (1, "ab")), ("xby", (1, "b")), ("xy", None), ("bab", (0, "b"))])
def test_the_first_of_several_is_taken_and_the_longest_of_those(text: str, found: tuple[int, str] | None) -> None:
    assert first_stop(text, ["b", "a", "ab"]) == found


@pytest.mark.parametrize(
    ("stop", "ends_after"),
    [("|", None), ("im_", None), ("end|>", None), ("<|im_end|>", 2), ("a<|im_end|>", 2), ("<|im_end|>b", 3), ("ab", 3)],
)
def test_a_stop_string_may_hold_a_special_token_and_is_no_part_of_its_name(stop: str, ends_after: int | None) -> None:
    shown, whole = ["a", "", "b"], ["a", "<|im_end|>", "b"]
    search = StopStrings(
        [stop], lambda ids: "".join(shown[one] for one in ids), lambda ids: "".join(whole[one] for one in ids)
    ).search()
    assert next((token + 1 for token in range(3) if search.append(token) is not None), None) == ends_after
