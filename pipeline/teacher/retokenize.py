"""Retokenizes a policy's rollouts for a teacher with another tokenizer.

From a sequence's tokens, its loss mask and its conversation it makes a `TurnPrompt` for each turn that the policy
sampled: the conversation before it under the teacher's own chat template, the same text in the teacher's tokens, and
which tokens stand for the same bytes. Guarantees that a span's bytes are the same on both sides, that the end of a turn
is matched with the teacher's own end token, and that a turn ends where its bytes stop being text.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.model.chat_template import read_parameters, render_chat
from lachesis.pipeline.teacher.logic.alignment import ByteSpan, common_spans, valid_text
from lachesis.pipeline.teacher.token_bytes import token_bytes
from lachesis.schemas.errors import DataError
from lachesis.schemas.rollout import Message

__all__ = ["Retokenizer", "TurnPrompt", "runs_of"]


class TurnPrompt(NamedTuple):
    """The teacher's prompt for one turn. `spans`: places in the policy's sequence, and in `token_ids`."""

    token_ids: list[int]
    spans: list[ByteSpan]


class Retokenizer:
    """From one tokenizer to another; both are `PreTrainedTokenizerFast`, the policy's first."""

    def __init__(self, student: Any, teacher: Any, *, names: tuple[str, str]) -> None:
        """`names`: what the two are called in errors. Raises `ConfigError` for a tokenizer of an unknown kind."""
        self._teacher = teacher
        self._student_bytes, self._teacher_bytes = token_bytes(student, names[0]), token_bytes(teacher, names[1])
        ids = teacher.get_vocab()
        self._specials = {
            i: ids[token.content]
            for i, token in student.added_tokens_decoder.items()
            if token.special and token.content in ids
        }
        if student.eos_token_id is not None and teacher.eos_token_id is not None:
            self._specials[student.eos_token_id] = teacher.eos_token_id

    def turns(
        self,
        tokens: NDArray[np.int32],
        mask: NDArray[np.bool_],
        conversation: Sequence[Message],
        parameters: Mapping[str, Any] | None = None,
    ) -> list[TurnPrompt]:
        """Return what to ask about each run of sampled tokens of a sequence.

        `tokens` int32 [T], `mask` bool [T]. `conversation` holds an assistant's message for each run; `parameters` are
        those of the chat template.

        Raises `DataError` where a run has no message, where a message calls tools, or where the teacher's tokenizer or
        chat template cannot write the text.
        """
        runs = runs_of(mask)
        spoken = [at for at, message in enumerate(conversation) if message.role == "assistant"]
        if len(spoken) < len(runs):
            raise DataError(f"{len(runs)} sampled turns, and {len(spoken)} messages of the assistant")
        return [
            self._turn(tokens[run].tolist(), run.start, self._render(conversation[:at], parameters or {}))
            for run, at in zip(runs, spoken[len(spoken) - len(runs) :], strict=True)
        ]

    def _turn(self, run: list[int], start: int, context: list[int]) -> TurnPrompt:
        written: list[int] = []
        spans: list[ByteSpan] = []
        segment: list[bytes] = []

        def end_segment(at: int) -> bool:
            """Write the segment that ends before token `at` of the run; return whether all of it is text."""
            data, first = b"".join(segment), at - len(segment)
            text = valid_text(data)
            ids, pieces = self._encode(text)
            spans.extend(
                span.moved(start + first, len(context) + len(written)) for span in common_spans(segment, pieces)
            )
            written.extend(ids)
            segment.clear()
            return len(text.encode()) == len(data)

        for at, token in enumerate(run):
            special = self._specials.get(token)
            if special is None:
                segment.append(self._bytes_of(token))
                continue
            if not end_segment(at):
                break
            place = len(context) + len(written)
            spans.append(ByteSpan(slice(start + at, start + at + 1), slice(place, place + 1)))
            written.append(special)
        else:
            end_segment(len(run))
        return TurnPrompt([*context, *written], spans)

    def _bytes_of(self, token: int) -> bytes:
        found = self._student_bytes.get(token)
        if found is None:
            raise DataError(f"token {token} is not in the policy's tokenizer")
        return found

    def _encode(self, text: str) -> tuple[list[int], list[bytes]]:
        """Return a text in the teacher's tokens, and the bytes of each, which make up the text."""
        ids: list[int] = self._teacher.encode(text, add_special_tokens=False)
        pieces = [self._teacher_bytes.get(i, b"") for i in ids]
        written = b"".join(pieces)
        if written == b" " + text.encode():  # sentencepiece begins every text with a space of its own
            first = next(at for at, piece in enumerate(pieces) if piece)
            pieces[first] = pieces[first][1:]
        elif written != text.encode():
            raise DataError(f"the teacher's tokenizer does not keep the text {text[:60]!r} as it is")
        return ids, pieces

    def _render(self, before: Sequence[Message], parameters: Mapping[str, Any]) -> list[int]:
        if any(message.tool_calls or message.attachments for message in before):
            raise DataError("its conversation has tool calls or attachments, which are not rendered for another model")
        messages = [{"role": message.role, "content": message.content} for message in before]
        try:
            ids = render_chat(self._teacher, messages, parameters=read_parameters(self._teacher, parameters))
        except DataError as error:
            raise DataError(f"its conversation does not fit the teacher's chat template: {error}") from error
        if not ids:
            raise DataError("the teacher's chat template writes nothing before the turn, so its first token is unknown")
        return ids


def runs_of(mask: NDArray[np.bool_]) -> list[slice]:
    """Return where each run of true values lies."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [slice(int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
