"""Chooses groups of which health checks see texts, and cuts their answers to how they begin and end.

One group in four, by its id alone, so that a group that is scored again gives the same. The cost is a slice or two of
each text, however long the answers are.
"""

import zlib

from lachesis.schemas.annotations import EXCERPT_CHARS, MAX_EXCERPT_SAMPLES, AnswerExcerpts
from lachesis.schemas.rollout import Message, RolloutGroup

__all__ = ["excerpts_of"]

_ONE_IN = 4


def excerpts_of(group: RolloutGroup) -> AnswerExcerpts | None:
    """Return the excerpts of a group, None for three groups in four and where no answer has a text."""
    if zlib.crc32(group.id.encode()) % _ONE_IN:
        return None
    answers = [_answer(conversation) for conversation in group.messages[:MAX_EXCERPT_SAMPLES]]
    if not any(answers):
        return None
    asked = [message.content for message in group.messages[0] if message.role == "user"]
    return AnswerExcerpts(prompt=_ends(asked[-1]) if asked else [], answers=answers)


def _answer(conversation: list[Message]) -> list[str]:
    """Return how the model's first message begins and its last one ends; all if it is short, [] without any."""
    said = [message.content for message in conversation if message.role == "assistant" and message.content]
    if len(said) < 2:
        return _ends(said[0]) if said else []
    return [said[0][:EXCERPT_CHARS], said[-1][-EXCERPT_CHARS:]]


def _ends(text: str) -> list[str]:
    if len(text) <= 2 * EXCERPT_CHARS:
        return [text] if text else []
    return [text[:EXCERPT_CHARS], text[-EXCERPT_CHARS:]]
