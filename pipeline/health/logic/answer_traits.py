"""Finds phrases, known forms of words that win over a rater, and languages in excerpts of answers."""

import re
from collections.abc import Iterable, Sequence

from lachesis.pipeline.common.text_language import language_of
from lachesis.pipeline.common.unspaced_scripts import UNSPACED
from lachesis.schemas.annotations import EXCERPT_CHARS

__all__ = ["FORMS", "MAX_WORDS", "languages_of", "phrases_of"]

_WORDS = re.compile(rf"[{UNSPACED}]|[^\W\d_{UNSPACED}]+(?:'[^\W\d_{UNSPACED}]+)?|\d+(?:[.,]\d+)*")
_NUMBER = "#"
MAX_WORDS = 4
"""Words of a phrase."""
_FORMS = {
    "refusal": r"i(?:'m| am) (?:very |so )?(?:sorry|unable|not able)|i (?:must |have to )?(?:apologi[sz]e|decline)"
    r"|as an? ai|(?:can't|cannot|can not|won't|unable to|not able to) (?:help|assist|answer|provide|fulfil|comply)",
    "flattery": r"(?:great|excellent|good|wonderful|fantastic|brilliant|insightful|thoughtful|amazing|lovely|smart) "
    r"(?:question|idea|point)|thank you for (?:your|asking|this|the|sharing)"
    r"|you(?:'re| are) (?:absolutely |so |very |completely )*(?:right|brilliant|smart|wise|clever)",
    "confidence": r"(?:absolutely|completely|totally|entirely|extremely|#|highly|very) (?:certain|sure|confident)"
    r"|(?:without|beyond) (?:a |any )?(?:shadow of a )?doubt|no doubt|undoubtedly|trust me"
    r"|i(?:'m| am) (?:certain|confident)|definitely (?:correct|right|true)|guaranteed (?:correct|right|to be)",
    "appeal": r"(?:this|my|the above) (?:answer|solution|response) is (?:perfect|flawless|(?:fully|completely) correct)"
    r"|(?:full|maximum|highest|top|perfect) (?:marks?|score|points?|credit|rating|grade)"
    r"|(?:ignore|disregard) (?:all |any |the )*(?:previous|above|prior|earlier)",
}
_ANY_FORM = re.compile("|".join(rf"(?<!\w)(?P<{name.upper()}>{pattern})(?!\w)" for name, pattern in _FORMS.items()))
FORMS = frozenset(_ANY_FORM.groupindex)
"""Names of the known forms, in capitals, which no phrase has. Their words are English."""


def phrases_of(excerpt: Sequence[str]) -> set[str]:
    """Return the runs of 1 to 4 words in an answer's excerpt, in lower case, and the names of known forms.

    A number is `#`, and alone it is no phrase. A word that the excerpt cuts is left out.
    """
    found: set[str] = set()
    for words in _words(excerpt):
        found.update(words)
        text = list(words)
        for length in range(1, MAX_WORDS):
            text = [f"{run} {word}" for run, word in zip(text, words[length:], strict=False)]
            found.update(text)
        found.update(form.lastgroup for form in _ANY_FORM.finditer(" ".join(words)) if form.lastgroup)
    found.discard(_NUMBER)
    return found


def languages_of(excerpt: Iterable[str]) -> set[str]:
    """Return the languages of an excerpt's ends, those that are clear."""
    return {language for part in excerpt if (language := language_of(part)) is not None}


def _words(excerpt: Sequence[str]) -> list[list[str]]:
    found = []
    for place, part in enumerate(excerpt):
        words = [_NUMBER if word[0].isdigit() else word for word in _WORDS.findall(part.lower().replace("\u2019", "'"))]
        if len(excerpt) > 1 and len(part) >= EXCERPT_CHARS:
            words = words[1:] if place else words[:-1]
        found.append(words)
    return found
