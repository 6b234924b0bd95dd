"""Computes the tokens between two assistant turns by the server's chat template.

The tokens that the model generated stay as they are.

Text that a model generated does not survive decoding and encoding (other token boundaries, other ids), so the
sequence of a conversation is put together from ids alone: prompt ids, generated ids, the ids rendered here, generated
ids, and so on. What the template puts between two turns (the rest of the assistant's closing, the new messages, the
next generation prompt) is found by rendering the new messages after a placeholder answer, twice with different
placeholders: the longest common suffix of the two renderings is everything that follows the answer. The generated
ids end with the stop token, with which the suffix usually begins; it is not repeated. Where a later rendering of the
same conversation begins as before, up to the placeholder, the rest is that suffix: it is not rendered twice again.

Limits: the placeholder stands alone, without tool calls (the model wrote its calls itself); a template that closes
the assistant's turn with plain text which the tokenizer merges with the answer's last letter would lose that text.
"""

from collections.abc import Awaitable, Callable, Sequence

from lachesis.schemas.errors import ConfigError
from lachesis.schemas.rollout import Message

__all__ = ["TurnRenderer", "render_turn"]

PLACEHOLDERS = ("a", "b")


Tokenize = Callable[[Sequence[Message]], Awaitable[list[int]]]
"""Returns the ids of messages, the generation prompt included."""


class TurnRenderer:
    """Renders what follows the answers of one conversation, whose opening does not change."""

    def __init__(self) -> None:
        self._before: list[int] = []
        """The ids of the opening and the first placeholder, empty before the first turn."""

    async def render(
        self, tokenize: Tokenize, opening: Sequence[Message], new: Sequence[Message], last_token: int
    ) -> list[int]:
        """As `render_turn`."""
        first = await _with_placeholder(tokenize, opening, PLACEHOLDERS[0], new)
        if not self._before or first[: len(self._before)] != self._before:
            second = await _with_placeholder(tokenize, opening, PLACEHOLDERS[1], new)
            self._before = first[: len(first) - _common_suffix(first, second)]
        suffix = first[len(self._before) :]
        if not suffix:
            raise ConfigError("the chat template puts nothing after an assistant turn, so a next turn cannot begin")
        return suffix[1:] if suffix[0] == last_token else suffix


async def render_turn(
    tokenize: Tokenize,
    opening: Sequence[Message],
    new: Sequence[Message],
    last_token: int,
) -> list[int]:
    """Return the ids that follow the generated token `last_token` and lead to the next assistant turn.

    `opening`: the conversation's first messages, up to the first answer; `new`: the messages after the latest answer.
    Raises ConfigError if the template drops the placeholders or renders them alike, so that no suffix can be found.
    """
    return await TurnRenderer().render(tokenize, opening, new, last_token)


async def _with_placeholder(
    tokenize: Tokenize, opening: Sequence[Message], placeholder: str, new: Sequence[Message]
) -> list[int]:
    return await tokenize([*opening, Message(role="assistant", content=placeholder), *new])


def _common_suffix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many ids two renderings end with that are the same. Raises `ConfigError` if all of them are."""
    if first == second:
        raise ConfigError(
            "the chat template renders two different assistant messages alike, so the tokens after a turn cannot be "
            "found; use a tokenizer and template that keep earlier assistant messages for multi-turn environments"
        )
    length = 0
    while length < min(len(first), len(second)) and first[-1 - length] == second[-1 - length]:
        length += 1
    return length
