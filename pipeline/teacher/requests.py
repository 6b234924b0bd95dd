"""Queries one teacher about a group: each path of the tree of its prompts once, and all together.

Guarantees that a refusal by the server costs that sequence alone, and that an unavailable server raises
`InfrastructureError` instead of a result.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import msgspec
import numpy as np

from lachesis.pipeline.common.tokenizer_hash import same_tokens
from lachesis.pipeline.errors import InfrastructureError, UnreadableAnswerError
from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.directory import InferenceDirectory
from lachesis.pipeline.inference.prompt_logprobs import PromptTopLogprobs
from lachesis.pipeline.inference.prompt_tree import PromptPath, prompt_tree
from lachesis.pipeline.teacher.logic.arrays import group_logprobs, group_spans, group_top_k
from lachesis.pipeline.teacher.prompt import PromptTemplate
from lachesis.pipeline.teacher.retokenize import Retokenizer, TurnPrompt, runs_of
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.errors import DataError
from lachesis.schemas.repeats import RepeatedRows
from lachesis.schemas.rollout import Message, RolloutGroup, TokenSequence

__all__ = ["Teacher", "TeacherAnswer"]

_UNREAD_TIMES = 4
_MAX_UNREAD = 256
_Tokens = tuple[int, ...]
_Answers = dict[_Tokens, PromptTopLogprobs | str]
"""By tokens: what the teacher thinks of them, or why it was refused."""


class _Part(NamedTuple):
    """An answer about a path's tokens from `start` on."""

    start: int
    answer: PromptTopLogprobs


class TeacherAnswer(NamedTuple):
    """A teacher's answer about a group: the columns of `TeacherLogprobs`, the sequences without any, and why.

    `repeats`: the rows with which sequences begin as others do; the answer about them is the same, so it is stored
    once. `weights` and `prompt_digest`: as in `TeacherLogprobs`.
    """

    columns: dict[str, Any]
    missing: list[int]
    reason: str | None
    requested_tokens: int
    repeats: list[RepeatedRows]
    weights: list[str]
    prompt_digest: str | None = None


class _Prompt(NamedTuple):
    """The teacher's prompt for a sequence, which begins with `start` tokens in place of its first `replaced` ones."""

    tokens: _Tokens
    start: int = 0
    replaced: int = 0


class Teacher:
    """The server of one role. `retokenizer`: what aligns its tokenizer; None: it must be the policy's own."""

    def __init__(
        self,
        directory: InferenceDirectory,
        name: str,
        tokenizer_hash: str | None,
        top_k: int = 0,
        prompt: PromptTemplate | None = None,
        *,
        branches: bool = False,
    ) -> None:
        """`prompt`: that of the teacher's own prompts; None: it reads the policy's. `branches`: whether the server
        scores those of a prompt in one request."""
        self.name = name
        self.student_hash: str | None = None
        self.retokenizer: Retokenizer | None = None
        self._directory = directory
        self._tokenizer_hash = tokenizer_hash
        self._top_k = top_k
        self._prompt = prompt
        self._branches = branches
        self._answered = 0
        self._unread: OrderedDict[_Tokens, tuple[int, int]] = OrderedDict()
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
        prompts, reasons = await self._prompts(group)
        answers, requested = await self._request_all(one.tokens for one in prompts if one is not None)
        found = [None if one is None else _placed(answers[one.tokens], one) for one in prompts]
        logprobs, missing = group_logprobs(group, [None if one is None else one.logprobs for one in found])
        columns: dict[str, Any] = {"logprobs": logprobs, "missing": missing}
        if self._top_k:
            columns |= group_top_k(group, [None if one is None else (one.ids, one.top) for one in found], self._top_k)
        return TeacherAnswer(
            columns,
            missing,
            _last_reason([*reasons, *answers.values()]),
            requested,
            group.sequences.starts_alike(trained=True),
            _weights(answers),
            None if self._prompt is None else self._prompt.digest,
        )

    async def _prompts(self, group: RolloutGroup) -> tuple[list[_Prompt | None], list[str]]:
        """Return the prompt of each sequence, None where the teacher's own cannot be made, and why it cannot."""
        if self._prompt is None:
            return [_Prompt(tuple(sequence.tokens.tolist())) for sequence in group.sequences], []
        client = await self._directory.current()
        parameters = group.generation.get("chat_template_kwargs")
        rendered: dict[bytes, list[int]] = {}

        async def render(messages: list[Message]) -> list[int]:
            key = msgspec.json.encode(messages)
            if key not in rendered:
                texts = [{"role": message.role, "content": message.content} for message in messages]
                rendered[key] = await client.tokenize(texts, chat_template_kwargs=parameters)
            return rendered[key]

        found: list[_Prompt | None] = []
        reasons = []
        for i, sequence in enumerate(group.sequences):
            try:
                before, own = _own_messages(group, i, len(runs_of(sequence.loss_mask)), self._prompt)
                found.append(_with_own_prompt(sequence, await render(before), await render(own)))
            except DataError as error:
                found.append(None)
                reasons.append(f"sequence {i}: {error}")
        return found, reasons

    async def _score_spans(self, group: RolloutGroup, retokenizer: Retokenizer) -> TeacherAnswer:
        turns, reasons = await anyio.to_thread.run_sync(_turns_of, group, retokenizer)
        prompts = [tuple(turn.token_ids) for one in turns if one is not None for turn in one]
        answers, requested = await self._request_all(prompts)
        spans = [None if one is None else _spans_of(one, answers) for one in turns]
        columns, missing = group_spans(group, spans)
        everything = list(range(len(turns)))  # no sequence has a logprob for each token
        plain = {"logprobs": as_bytes(np.zeros(group.sequences.n_tokens), "float32"), "missing": everything}
        reason = _last_reason([*reasons, *answers.values()])
        repeats = group.sequences.starts_alike(trained=True)
        return TeacherAnswer({**plain, **columns}, missing, reason, requested, repeats, _weights(answers))

    async def _request_all(self, prompts: Iterable[_Tokens]) -> tuple[_Answers, int]:
        """Return the answer to each prompt, and how many tokens were sent for them.

        The prompts are requested as the paths of a tree, and what several begin with is read from one answer: in one
        request if the server has that, else each path in its own. Where a path is refused, those that were to share its
        tokens, and prompts that it begins with, have further requests.
        """
        client = await self._directory.current()
        wanted = set(prompts)
        refusals: dict[_Tokens, str] = {}
        paths = prompt_tree(wanted)
        parts = await self._request_tree(client, paths)
        requested = sum(len(path.own) for path in paths) if parts else 0
        while missing := [path for path in paths if path.tokens not in parts or path.shared < parts[path.tokens].start]:
            requested += sum(len(path.tokens) for path in missing)
            for path, answer in (await self._request_paths(client, missing)).items():
                if isinstance(answer, str):
                    refusals[path.tokens] = answer
                else:
                    parts[path.tokens] = _Part(path.shared, answer)
            paths = prompt_tree(wanted - refusals.keys())
        leaves = dict(_joined(paths, parts))
        ends = [path.tokens for path in paths]
        answers: _Answers = {
            prompt: leaves[ends[bisect_left(ends, prompt)]].rows(slice(len(prompt)))
            for prompt in wanted - refusals.keys()
        }
        return answers | refusals, requested

    async def _request_tree(self, client: InferenceClient, paths: Sequence[PromptPath]) -> dict[_Tokens, _Part]:
        """Return what the teacher thinks of each path's own tokens; {} where one request cannot have all of it."""
        if not self._branches or len(paths) < 2:
            return {}
        try:
            found = await client.prompt_tree_logprobs(paths, self._requested_top_k)
            parts = {
                path.tokens: _Part(path.shared, _checked(answer, len(path.own)))
                for path, answer in zip(paths, found, strict=True)
            }
        except (DataError, UnreadableAnswerError):  # a request for each path shows which one it is
            return {}
        self._answered += len(parts)
        return parts

    @property
    def _requested_top_k(self) -> int:
        return self._top_k if self.retokenizer is None else 0

    async def _request_paths(
        self, client: InferenceClient, paths: Sequence[PromptPath]
    ) -> dict[PromptPath, PromptTopLogprobs | str]:
        """Return for each path what the teacher thinks of its own tokens, or why it was refused."""
        answers: dict[PromptPath, PromptTopLogprobs | str] = {}
        unread: dict[PromptPath, UnreadableAnswerError] = {}
        down: InfrastructureError | None = None

        async def ask(path: PromptPath) -> None:
            nonlocal down
            try:
                found = await client.prompt_top_logprobs(path.tokens, self._requested_top_k, path.shared)
                answers[path] = _checked(found, len(path.own))
            except DataError as error:
                answers[path] = str(error)
            except UnreadableAnswerError as error:
                unread[path] = error
            except InfrastructureError as error:  # raised below, alone: a task group would wrap it
                down = error

        async with anyio.create_task_group() as tasks:
            for path in paths:
                tasks.start_soon(ask, path)
        if down is not None:
            raise down
        self._answered += len(answers)
        for path, error in unread.items():
            if not self._is_to_blame(path.tokens):
                raise error
            answers[path] = str(error)
        return answers

    def _is_to_blame(self, tokens: _Tokens) -> bool:
        """Count an answer about `tokens` that makes no sense; return whether others were answered properly meanwhile,
        each time: then it is these tokens that the server has no answer to."""
        times, answered = self._unread.pop(tokens, (0, self._answered))
        self._unread[tokens] = times + 1, answered
        if len(self._unread) > _MAX_UNREAD:
            self._unread.popitem(last=False)
        return times + 1 >= _UNREAD_TIMES and self._answered - answered >= _UNREAD_TIMES


def _checked(answer: PromptTopLogprobs, tokens: int) -> PromptTopLogprobs:
    if answer.logprobs.shape != (tokens,) or not np.isfinite(answer.logprobs).all():
        raise UnreadableAnswerError(f"{answer.logprobs.shape} logprobs, finite or not, for {tokens} tokens")
    return answer


def _turns_of(group: RolloutGroup, retokenizer: Retokenizer) -> tuple[list[list[TurnPrompt] | None], list[str]]:
    """Return the prompts of each sequence, None if the teacher cannot score it, and why."""
    found: list[list[TurnPrompt] | None] = []
    reasons = []
    parameters = group.generation.get("chat_template_kwargs") or {}
    for i, sequence in enumerate(group.sequences):
        talk = _conversation(group, i)
        try:
            found.append(retokenizer.turns(sequence.tokens, sequence.loss_mask, talk, parameters))
        except DataError as error:
            found.append(None)
            reasons.append(f"sequence {i}: {error}")
    return found, reasons


def _conversation(group: RolloutGroup, i: int) -> list[Message]:
    """Return the messages of a sequence: a conversation is that of its sample's last sequence, others have none."""
    samples = group.sequences.sample_index or range(len(group.sequences))
    sample = samples[i]
    is_last = sample not in samples[i + 1 :]
    return group.messages[sample] if is_last and sample < len(group.messages) else []


def _own_messages(
    group: RolloutGroup, i: int, turns: int, prompt: PromptTemplate
) -> tuple[list[Message], list[Message]]:
    """Return the messages before the first of the sampled `turns` of a sequence: the policy's, and the teacher's.

    Raises `DataError` where there are none, or the prompt cannot be filled.
    """
    talk = _conversation(group, i)
    spoken = [at for at, message in enumerate(talk) if message.role == "assistant"]
    if not 0 < turns <= len(spoken):
        raise DataError(f"{turns} sampled turns, and {len(spoken)} messages of the assistant")
    before = talk[: spoken[-turns]]
    if any(message.tool_calls or message.attachments for message in before):
        raise DataError("its prompt has tool calls or attachments, which are not rendered for a teacher")
    users = [at for at, message in enumerate(before) if message.role == "user"]
    if not users:
        raise DataError("no message of the user comes before what was sampled")
    question = before[users[-1]]
    filled = msgspec.structs.replace(question, content=prompt.fill(question.content, group.task))
    return before, [*before[: users[-1]], filled, *before[users[-1] + 1 :]]


def _with_own_prompt(sequence: TokenSequence, policy: list[int], teacher: list[int]) -> _Prompt:
    """Return the prompt with `teacher` in place of the first tokens, which must be `policy` and not sampled."""
    tokens, replaced = sequence.tokens.tolist(), len(policy)
    if policy != tokens[:replaced] or sequence.loss_mask[:replaced].any():
        raise DataError("its first tokens are not what the chat template makes of its messages")
    return _Prompt((*teacher, *tokens[replaced:]), len(teacher), replaced)


def _placed(answer: PromptTopLogprobs | str, prompt: _Prompt) -> PromptTopLogprobs | None:
    """Return an answer in the sequence's own places: nothing at those of the replaced prompt. None: a refusal."""
    if isinstance(answer, str):
        return None
    if not prompt.replaced:
        return answer
    blanks = prompt.replaced, answer.ids.shape[1]
    rest = slice(prompt.start, None)
    return PromptTopLogprobs(
        np.concatenate([np.zeros(prompt.replaced, np.float32), answer.logprobs[rest]]),
        np.concatenate([np.full(blanks, -1, np.int32), answer.ids[rest]]),
        np.concatenate([np.full(blanks, -np.inf, np.float32), answer.top[rest]]),
    )


def _weights(answers: _Answers) -> list[str]:
    """Return the versions of weights that the server answered with, as far as it said."""
    versions = [one.version for one in answers.values() if isinstance(one, PromptTopLogprobs)]
    return sorted({version for version in versions if version is not None})


def _joined(paths: Sequence[PromptPath], parts: Mapping[_Tokens, _Part]) -> Iterator[tuple[_Tokens, PromptTopLogprobs]]:
    """Yield the whole answer to each path: what it shares is that of the path before it."""
    whole: PromptTopLogprobs | None = None
    for path in paths:
        start, own = parts[path.tokens]
        if whole is None or not path.shared:
            whole = own
        else:
            whole = whole.rows(slice(path.shared)).followed_by(own.rows(slice(path.shared - start, None)))
        yield path.tokens, whole


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
