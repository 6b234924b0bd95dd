"""Defines a task: one item of an environment's pool, as the environment's author writes it."""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from lachesis.schemas.rollout import Message

__all__ = ["Task", "prompt_hash", "prompt_text"]


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt for the model, and the data to score its answer."""

    item: str
    """Name of the item, the same in every process and run: the curriculum keeps its statistics under it."""
    prompt: str | list[Message]
    """The user's message, or a whole conversation that ends where the model must answer."""
    task: dict[str, Any] = {}
    """Data for raters: by convention `answer` (reference) and `metadata`. Must be encodable as msgpack."""
    skill: str | None = None
    """Items of one skill are learned together; None: the environment is one skill."""
    difficulty: float | None = None
    """Difficulty on any scale; higher is harder. None: unknown."""

    @property
    def messages(self) -> list[Message]:
        return [Message(role="user", content=self.prompt)] if isinstance(self.prompt, str) else list(self.prompt)


def prompt_text(messages: Sequence[Message]) -> str:
    """Return a conversation as the one text from which the hash and the keys of a task are made."""
    return "\n".join(f"{one.role}: {one.content}" for one in messages)


def prompt_hash(prompt: str) -> str:
    """Return the SHA-256 of a prompt's text, 64 hex digits.

    Two prompts are the same when this is the same.
    """
    return hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()
