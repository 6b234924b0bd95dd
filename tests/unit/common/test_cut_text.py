from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.common.cut_text import cut_middle


@given(st.text(max_size=60), st.integers(0, 60))
def test_a_text_is_cut_in_its_middle_alone(text: str, max_chars: int) -> None:
    cut = cut_middle(text, max_chars)
    assert len(cut) <= max_chars
    assert cut == text or len(text) > max_chars
    if cut != text and max_chars > len(" ... "):
        first, last = cut.split(" ... ", 1) if " ... " not in text else (cut[:1], cut[-1:])
        assert text.startswith(first)
        assert text.endswith(last)
