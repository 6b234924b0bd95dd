"""Queries one teacher about a group: each distinct token sequence once, and all at the same time.

Guarantees that a refusal by the server costs that sequence alone, and that an unavailable server raises
`InfrastructureError` instead of a result.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.common.tokenizer_hash import same_tokens
from lachesis.pipeline.errors import InfrastructureError, UnreadableAnswerError
from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.directory import InferenceDirectory
from lachesis.pipeline.inference.prompt_logprobs import PromptTopLogprobs
from lachesis.pipeline.teacher.logic.arrays import group_logprobs, group_spans, group_top_k
from lachesis.pipeline.teacher.retokenize import Retokenizer, TurnPrompt
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.errors import DataError
from lachesis.schemas.repeats import RepeatedRows
from lachesis.schemas.rollout import RolloutGroup

__all__ = ["Teacher", "TeacherAnswer"]

_UNREAD_TIMES = 4
_MAX_UNREAD = 256
_Answers = dict[tuple[int, ...], PromptTopLogprobs | str]
"""By tokens: what the teacher thinks of them, or why it was refused."""


class TeacherAnswer(NamedTuple):
    """A teacher's answer about a group: the columns of `TeacherLogprobs`, the sequences without any, and why.

    `repeats`: the rows with which sequences begin as others do; the answer about them is the same, so it is stored
    once.
    """

    columns: dict[str, Any]
    missing: list[int]
    reason: str | None
    requested_tokens: int
    repeats: list[RepeatedRows]


class Teacher:
    """The server of one role. `retokenizer`: what aligns its tokenizer; None: it must be the policy's own."""

    def __init__(self, directory: InferenceDirectory, name: str, tokenizer_hash: str | None, top_k: int = 0) -> None:
        self.name = name
        self.student_hash: str | None = None
        self.retokenizer: Retokenizer | None = None
        self._directory = directory
        self._tokenizer_hash = tokenizer_hash
        self._top_k = top_k
        self._answered = 0
        self._unread: OrderedDict[tuple[int, ...], tuple[int, int]] = OrderedDict()
        """By tokens: how often the answer made no sense, and how many others had been answered at the first time."""

    def refusal(self, group: RolloutGroup) -> str | None:
        """Return why this teacher has nothing to say of a group, by the tokenizers; None if it has."""
        expected = self._tokenizer_hash if self.retokenizer is None else self.student_hash
        if expected is None or same_tokens(expected, group.tokenizer_hash):
            return None
        whose = "the teacher's tokenizer" if self.retokenizer is None else "the tokenizer to be aligned"
        return f"{whose} {str(expected)[:12]} is not {group.tokenizer_hash[:12]}"

    async def score(self, group: RolloutGroup) -> TeacherAnswer:
        """Return the columns of a group. Raises `InfrastructureError` when the server cannot be reached."""
        if self.retokenizer is None:
            return await self._score_tokens(group)
        return await self._score_spans(group, self.retokenizer)

    async def _score_tokens(self, group: RolloutGroup) -> TeacherAnswer:
        prompts = [tuple(sequence.tokens.tolist()) for sequence in group.sequences]
        answers = await self._request_all(prompts)
        repeats = group.sequences.starts_alike(trained=True)
        found = [one if isinstance(one := answers[prompt], PromptTopLogprobs) else None for prompt in prompts]
        _share_starts(found, repeats, group.sequences.cuts().tolist())
        logprobs, missing = group_logprobs(group, [None if one is None else one.logprobs for one in found])
        columns: dict[str, Any] = {"logprobs": logprobs, "missing": missing}
        if self._top_k:
            columns |= group_top_k(group, [None if one is None else (one.ids, one.top) for one in found], self._top_k)
        return TeacherAnswer(columns, missing, _last_reason(answers.values()), sum(map(len, answers)), repeats)

    async def _score_spans(self, group: RolloutGroup, retokenizer: Retokenizer) -> TeacherAnswer:
        turns, reasons = await anyio.to_thread.run_sync(_turns_of, group, retokenizer)
        prompts = [tuple(turn.token_ids) for one in turns if one is not None for turn in one]
        answers = await self._request_all(prompts)
        spans = [None if one is None else _spans_of(one, answers) for one in turns]
        columns, missing = group_spans(group, spans)
        everything = list(range(len(turns)))  # no sequence has a logprob for each token
        plain = {"logprobs": as_bytes(np.zeros(group.sequences.n_tokens), "float32"), "missing": everything}
        reason = _last_reason([*reasons, *answers.values()])
        repeats = group.sequences.starts_alike(trained=True)
        return TeacherAnswer({**plain, **columns}, missing, reason, sum(map(len, answers)), repeats)

    async def _request_all(self, prompts: Iterable[tuple[int, ...]]) -> _Answers:
        """Return the answer to each distinct prompt; equal sequences, of which a group has many, are sent once."""
        client = await self._directory.current()
        answers: _Answers = {}
        unread: dict[tuple[int, ...], UnreadableAnswerError] = {}
        down: InfrastructureError | None = None

        async def ask(tokens: tuple[int, ...]) -> None:
            nonlocal down
            try:
                answers[tokens] = _checked(await self._request(client, list(tokens)), len(tokens))
            except DataError as error:
                answers[tokens] = str(error)
            except UnreadableAnswerError as error:
                unread[tokens] = error
            except InfrastructureError as error:  # raised below, alone: a task group would wrap it
                down = error

        async with anyio.create_task_group() as tasks:
            for tokens in dict.fromkeys(prompts):
                tasks.start_soon(ask, tokens)
        if down is not None:
            raise down
        self._answered += len(answers)
        for tokens, error in unread.items():
            if not self._is_to_blame(tokens):
                raise error
            answers[tokens] = str(error)
        return answers

    def _is_to_blame(self, tokens: tuple[int, ...]) -> bool:
        """Count an answer about `tokens` that makes no sense; return whether others were answered properly meanwhile,
        each time: then it is these tokens that the server has no answer to."""
        times, answered = self._unread.pop(tokens, (0, self._answered))
        self._unread[tokens] = times + 1, answered
        if len(self._unread) > _MAX_UNREAD:
            self._unread.popitem(last=False)
        return times + 1 >= _UNREAD_TIMES and self._answered - answered >= _UNREAD_TIMES

    async def _request(self, client: InferenceClient, tokens: list[int]) -> PromptTopLogprobs:
        if self._top_k and self.retokenizer is None:
            return await client.prompt_top_logprobs(tokens, self._top_k)
        none: NDArray[np.int32] = np.zeros((len(tokens), 0), np.int32)
        return PromptTopLogprobs(await client.prompt_logprobs(tokens), none, none.astype(np.float32))


def _checked(answer: PromptTopLogprobs, tokens: int) -> PromptTopLogprobs:
    if answer.logprobs.shape != (tokens,) or not np.isfinite(answer.logprobs).all():
        raise UnreadableAnswerError(f"{answer.logprobs.shape} logprobs, finite or not, for {tokens} tokens")
    return answer


def _turns_of(group: RolloutGroup, retokenizer: Retokenizer) -> tuple[list[list[TurnPrompt] | None], list[str]]:
    """Return the prompts of each sequence, None if the teacher cannot score it, and why."""
    found: list[list[TurnPrompt] | None] = []
    reasons = []
    parameters = group.generation.get("chat_template_kwargs") or {}
    samples = group.sequences.sample_index or range(len(group.sequences))
    last_of = {sample: i for i, sample in enumerate(samples)}  # a conversation is that of its sample's last sequence
    for i, (sequence, sample) in enumerate(zip(group.sequences, samples, strict=True)):
        talk = group.messages[sample] if last_of[sample] == i and sample < len(group.messages) else []
        try:
            found.append(retokenizer.turns(sequence.tokens, sequence.loss_mask, talk, parameters))
        except DataError as error:
            found.append(None)
            reasons.append(f"sequence {i}: {error}")
    return found, reasons


def _share_starts(
    answers: list[PromptTopLogprobs | None], repeats: Sequence[RepeatedRows], cuts: Sequence[int]
) -> None:
    """Give sequences that begin alike one answer about these tokens, which a server computes with other roundings."""
    sequence_at = {start: i for i, start in enumerate(cuts[:-1])}
    for repeat in reversed(repeats):
        i = sequence_at[repeat.at]
        own, other = answers[i], answers[sequence_at[repeat.source]]
        if own is not None and other is not None:
            columns = zip(other, own, strict=True)
            answers[i] = PromptTopLogprobs(*(np.concatenate([a[: repeat.rows], b[repeat.rows :]]) for a, b in columns))


def _spans_of(turns: list[TurnPrompt], answers: _Answers) -> list[tuple[slice, float]]:
    """Return the spans of a sequence with the teacher's logprob of each, without turns that it refused."""
    found = []
    for turn in turns:
        answer = answers[tuple(turn.token_ids)]
        if isinstance(answer, PromptTopLogprobs):
            logprobs = answer.logprobs.astype(np.float64)
            found += [(span.student, float(logprobs[span.teacher].sum())) for span in turn.spans]
    return found


def _last_reason(answers: Iterable[PromptTopLogprobs | str]) -> str | None:
    refusals = [one for one in answers if isinstance(one, str)]
    return refusals[-1] if refusals else None
