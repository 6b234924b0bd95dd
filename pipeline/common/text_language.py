"""Names the language of a text, by py3langid's model, which is loaded when it is first needed.

Says nothing where it is not sure: of numbers, formulas, programs and a few words. The model takes some 70 MB of memory
and half a second, so it is loaded when the first text is looked at, and a process that looks at none has none of it.
It is unpacked by way of a temporary file, so a process needs one folder that it can write to.
"""

import re
from functools import cache
from typing import Any

from lachesis.pipeline.errors import LanguageModelError

__all__ = ["language_of"]

_SURE = 0.6
"""Probability from which on a language counts: prose of ten words has more, programs and formulas less than .3."""
_VARIETIES = frozenset({"wuu", "yue", "ary", "arz", "nn", "bs", "pcm", "uzs", "sdh", "an", "ext", "gcr", "gcf"})
"""Close relatives of a language that the model knows as well; a few words of it could be of either."""
_NO_LANGUAGE = "zxx"
_MIN_LETTERS = 12
"""Letters below which nothing is said; a third of that in scripts of whole words."""
_LETTERS = re.compile(r"[^\W\d_]")
_WORD_SCRIPTS = re.compile(r"[\u3041-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]")


def language_of(text: str) -> str | None:
    """Return the ISO 639 code of the language that `text` is in, None where that is not clear.

    Raises `LanguageModelError` if the model cannot be loaded.
    """
    letters = len(_LETTERS.findall(text))
    if letters < _MIN_LETTERS and letters + 2 * len(_WORD_SCRIPTS.findall(text)) < _MIN_LETTERS:
        return None
    language, probability = _identifier().classify(text)
    return str(language) if probability >= _SURE and language != _NO_LANGUAGE else None


@cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_DIR, MODEL_FILE, LanguageIdentifier
    from py3langid.modelio import load_model

    try:
        weights, prior, languages, moves, rows, features = load_model(MODEL_DIR / MODEL_FILE)
    except OSError as error:
        raise LanguageModelError(
            f"no language is named, as py3langid's model cannot be unpacked: {error}. Set TMPDIR to a folder that this "
            "process can write to; it takes some 70 MB for a moment"
        ) from error
    known = [number for number, language in enumerate(languages) if language not in _VARIETIES]
    return LanguageIdentifier(  # of these alone: one that is restricted later holds all of them as well
        weights[:, known], prior[known], [languages[number] for number in known], moves, features,
        norm_probs=True, tk_row=rows,
    )  # fmt: skip
