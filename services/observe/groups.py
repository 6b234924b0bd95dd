"""Groups of rollouts as people look at them: rows, their filter and order, one with its samples. Pure."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.schemas.annotations import GroupReward, GroupScore
from lachesis.schemas.errors import ConfigError, SchemaError
from lachesis.schemas.rollout import Message, RolloutGroup, Sequences
from lachesis.schemas.sequences import VersionSpan
from lachesis.schemas.subjects import check_name
from lachesis.services.observe.rollout import RolloutTimeline

__all__ = [
    "MAX_SAMPLES",
    "CallView",
    "GroupFilter",
    "GroupOrder",
    "GroupRow",
    "GroupView",
    "NumberRange",
    "SampleView",
    "TurnView",
    "group_row",
    "group_view",
    "has_text",
    "left_out_samples",
    "with_prompt",
]

MAX_SAMPLES = 1024
"""Samples of a group that are shown, and searched for a text, at most."""
_MAX_PROMPT_CHARS = 200
_MAX_CALLS = 256
"""Calls of a sample that are shown."""


class NumberRange(NamedTuple):
    """The numbers from `low` to `high`, both included; None: without end on that side."""

    low: float | None = None
    high: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `LOW:HIGH`, `LOW:`, `:HIGH` or one number. Raises `ConfigError`."""
        low, colon, high = text.partition(":")
        try:
            ends = [float(part) if part else None for part in (low, high if colon else low)]
        except ValueError:
            ends = []
        if not ends or ends == [None, None]:
            raise ConfigError(f"{text!r} is no range of numbers: write LOW:HIGH, LOW:, :HIGH or one number")
        return cls(*ends)

    def __contains__(self, value: object) -> bool:
        """Whether it is a number in the range; what is missing is not."""
        if not isinstance(value, float | int):
            return False
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """A group in a few figures. What is not known, or not yet, is None.

    `state` is trained, batched, under way, left over, or what else became of it, `reason` why it was not trained or
    what it waits for. `step` is the optimizer step of its batch. `score` is the mean over samples, `low` and `high` the
    worst and the best; `disagreement` the mean over samples of the standard deviation between raters; `advantage` the
    largest absolute one, of samples or turns; `ratings` the mean over samples by rater. `prompt` is the beginning of
    the last message that all samples answer, and `turns` the mean number of the model's messages a sample: both are
    known where the rollout itself was read.
    """

    group: str
    seq: int
    env: str
    item: str | None
    stored_ns: int
    policy_step: int
    samples: int
    tokens: int
    state: str
    reason: str | None
    step: int | None
    score: float | None
    low: float | None
    high: float | None
    disagreement: float | None
    advantage: float | None
    ratings: dict[str, float | None] = {}
    prompt: str | None = None
    turns: float | None = None


def group_row(rollout: RolloutTimeline, config: BatchingConfig) -> GroupRow:
    """Return the row of a rollout of which all is gathered."""
    score, reward = rollout.score, rollout.reward
    scores = [value for value in score.scores if value is not None] if score else []
    columns: list[Sequence[float | None]] = []
    if reward is not None:
        columns = [reward.advantages, *(turns or [] for turns in reward.turn_advantages)]
    advantages = [abs(value) for column in columns for value in column if value is not None]
    state, waits_for = rollout.state(config)
    judged = score or reward
    return GroupRow(
        group=rollout.plan.group,
        seq=rollout.seq,
        env=rollout.env,
        item=judged.item if judged else None,
        stored_ns=rollout.stored_ns,
        policy_step=rollout.plan.policy_step,
        samples=rollout.plan.samples,
        tokens=rollout.plan.tokens,
        state=state,
        reason=rollout.reason or (f"waits for {waits_for}" if waits_for else None),
        step=None if rollout.batch is None else rollout.batch + 1,
        score=_mean(scores),
        low=min(scores, default=None),
        high=max(scores, default=None),
        disagreement=score.disagreement[0] if score and score.disagreement else None,
        advantage=max(advantages, default=None),
        ratings={rater: _mean(column) for rater, column in score.ratings.items()} if score else {},
    )


def with_prompt(row: GroupRow, group: RolloutGroup) -> GroupRow:
    """Return the row with what its rollout says."""
    shared = _shared(group.messages, _calls(group))
    said = [message.content for message in group.messages[0][:shared] if message.content]
    turns = [sum(message.role == "assistant" for message in talk[shared:]) for talk in group.messages]
    prompt = " ".join(said[-1].split())[:_MAX_PROMPT_CHARS] if said else None
    return msgspec.structs.replace(row, prompt=prompt, turns=_mean(turns))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFilter:
    """Which groups are wanted; what is None or empty does not matter. Texts are looked for in any case.

    `ratings`: by rater, in which range its mean over samples is.
    """

    envs: Sequence[str] = ()
    states: Sequence[str] = ()
    item: str | None = None
    text: str | None = None
    score: NumberRange | None = None
    disagreement: NumberRange | None = None
    advantage: NumberRange | None = None
    step: NumberRange | None = None
    policy_step: NumberRange | None = None
    ratings: Mapping[str, NumberRange] = field(default_factory=dict)

    @classmethod
    def parse(
        cls,
        *,
        envs: Sequence[str] = (),
        states: Sequence[str] = (),
        item: str | None = None,
        text: str | None = None,
        ranges: Mapping[str, str | None],
        ratings: Sequence[str] = (),
        prefix: str = "",
    ) -> Self:
        """Read a filter as people write it.

        `ranges` are texts by the field's name, None: not given; `ratings` texts such as `RATER=LOW:HIGH`. Raises
        `ConfigError` that names the field, `prefix` before it.
        """
        parsed: dict[str, NumberRange] = {}
        for name, text_of_range in ranges.items():
            if text_of_range is not None:
                try:
                    parsed[name] = NumberRange.parse(text_of_range)
                except ConfigError as error:
                    raise ConfigError(f"{prefix}{name.replace('_', '-')} {error}") from error
        by_rater: dict[str, NumberRange] = {}
        for given in ratings:
            rater, _, range_ = given.rpartition("=")
            if not rater:
                raise ConfigError(f"{prefix}rating {given!r}: write RATER=LOW:HIGH, RATER=LOW: or RATER=:HIGH")
            try:
                by_rater[rater] = NumberRange.parse(range_)
            except ConfigError as error:
                raise ConfigError(f"{prefix}rating {error}") from error
        named = tuple(check_name("environment", name) for name in envs)
        return cls(envs=named, states=tuple(states), item=item, text=text, ratings=by_rater, **parsed)

    def takes(self, row: GroupRow) -> bool:
        """Whether a row is wanted, by all but the text."""
        ranges = (
            (self.score, row.score), (self.disagreement, row.disagreement), (self.advantage, row.advantage),
            (self.step, row.step), (self.policy_step, row.policy_step),
        )  # fmt: skip
        return (
            (not self.envs or row.env in self.envs)
            and (not self.states or row.state in self.states)
            and (self.item is None or self.item.lower() in (row.item or "").lower())
            and all(wanted is None or value in wanted for wanted, value in ranges)
            and all(row.ratings.get(rater) in wanted for rater, wanted in self.ratings.items())
        )


@dataclass(frozen=True, slots=True)
class GroupOrder:
    """Which groups come first: those with the highest or the lowest of one figure.

    `by` is a rater, or score, disagreement or advantage. Where none of `ratings` is called so, a group has no such
    figure, and is left out.
    """

    by: str
    highest: bool = True

    @classmethod
    def parse(cls, highest: str | None, lowest: str | None, prefix: str = "") -> Self | None:
        """Read the two ways in which an order is given. Raises `ConfigError` where both are."""
        if highest is not None and lowest is not None:
            raise ConfigError(f"{prefix}highest and {prefix}lowest: give one of them")
        by = highest if highest is not None else lowest
        return None if by is None else cls(by, highest=highest is not None)

    def key(self, row: GroupRow) -> float | None:
        """Return what rows are compared by, the largest first; None: the row has no such figure."""
        fields = {"score": row.score, "disagreement": row.disagreement, "advantage": row.advantage}
        value = row.ratings[self.by] if self.by in row.ratings else fields.get(self.by)
        return value if value is None or self.highest else -value


def has_text(group: RolloutGroup, text: str) -> bool:
    """Whether `text` is in the messages to or from the model, or in its tool calls.

    Upper and lower case are the same.
    """
    text = text.lower()
    for conversation in group.messages:
        for message in conversation:
            said = (message.content, *(call.arguments for call in message.tool_calls))
            if any(text in one.lower() for one in said):
                return True
    return False


class TurnView(msgspec.Struct, frozen=True, kw_only=True):
    """The `reward` and the `advantage` of a turn, and the place of the turn that it continues, -1 for none."""

    reward: float
    advantage: float | None
    continues: int


class CallView(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the model in a sample: `tokens` that it sampled after `new` ones, which the call before it lacks.

    It lies in the sample's sequence `sequence`, whose first is 0, from token `start` on. `new` of a sequence's first
    call are all before it, those that other sequences share, too. `steps`: those of the policies that sampled its
    first and its last token. `finish_reason` None: not known, since others follow in the sequence. `turn`: its place
    among the sample's turns, None where these have no rewards.
    """

    sequence: int
    start: int
    new: int
    tokens: int
    steps: tuple[int, int]
    finish_reason: str | None
    turn: int | None


class SampleView(msgspec.Struct, frozen=True, kw_only=True):
    """One sample: what it says beyond the common prompt, and what everybody made of it.

    `ratings` and `statuses` are by rater: a missing rating is None, and its status says why. `figures` are what raters
    say further, by `RATER/FIGURE`. `logprob` is the mean of
    its `tokens` generated ones, which lie in so many `sequences`; `rewards` are the environment's own. An `excluded`
    sample is not trained on. `turns` are those of a sample that has rewards of turns, whose conversation ends in so
    many `branches`. `calls` are the calls of the model whose tokens are trained on, the first `_MAX_CALLS`; none where
    the sample is one call alone.
    """

    messages: list[Message]
    finish_reason: str
    tokens: int
    sequences: int
    logprob: float | None
    score: float | None
    ratings: dict[str, float | None]
    statuses: dict[str, str]
    reward: float | None
    advantage: float | None
    rewards: dict[str, float | None]
    excluded: bool
    turns: list[TurnView] = []
    branches: int = 1
    calls: list[CallView] = []
    figures: dict[str, float] = {}


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """One group, with its first `MAX_SAMPLES` samples; `row` says how many there are.

    `prompt` are the messages that all samples begin with; `failures` say by rater why ratings miss, and `left_out` of
    samples that failed in the environment, by their number in the request, why.
    """

    row: GroupRow
    item: str
    task: dict[str, Any]
    skill: str | None
    difficulty: float | None
    policy_versions: list[str]
    prompt: list[Message]
    samples: list[SampleView]
    failures: dict[str, str]
    left_out: dict[int, str]
    verdict: str | None


def group_view(rollout: RolloutTimeline, group: RolloutGroup, config: BatchingConfig) -> GroupView:
    """Return all that is known of a group."""
    score, reward = rollout.score, rollout.reward
    count = min(group.sequences.n_samples, MAX_SAMPLES)
    conversations = group.messages[:count] or [[]] * count
    calls = _calls(group)
    shared = _shared(conversations, calls)
    endings, generated, excluded = group.sequences.endings, group.sequences.generated, group.sequences.excluded_samples
    index, branches = group.sequences.sample_index, group.sequences.branches
    samples = []
    for i, part in enumerate(generated.samples[:count]):
        logprobs = None if generated.logprobs is None else generated.logprobs[part]
        samples.append(
            SampleView(
                messages=conversations[i][shared:],
                finish_reason=endings[i],
                tokens=group.sequences.lengths[i],
                sequences=1 if index is None else index.count(i),
                logprob=None if logprobs is None or not len(logprobs) else float(logprobs.mean()),
                score=score.scores[i] if score else None,
                ratings={rater: values[i] for rater, values in score.ratings.items()} if score else {},
                statuses=_statuses(score, i),
                reward=reward.rewards[i] if reward else None,
                advantage=reward.advantages[i] if reward else None,
                rewards={name: values[i] for name, values in group.sequences.rewards.items()},
                excluded=i in excluded,
                turns=_turns(group.sequences, reward, i),
                branches=branches[i] if branches else 1,
                calls=calls[i][:_MAX_CALLS] if len(calls[i]) > 1 else [],
                figures=_figures(score, i),
            )
        )
    return GroupView(
        row=group_row(rollout, config),
        item=group.item,
        task=group.task,
        skill=group.skill,
        difficulty=group.difficulty,
        policy_versions=group.policy_versions,
        prompt=conversations[0][:shared],
        samples=samples,
        failures=score.failures if score else {},
        left_out=left_out_samples(group),
        verdict=reward.verdict if reward else None,
    )


def left_out_samples(group: RolloutGroup) -> dict[int, str]:
    """Return why samples were left out, by number.

    Metadata may come from anybody: what does not fit is no entry.
    """
    found = group.metadata.get("failed_samples")
    return {
        one["sample"]: str(one.get("error", ""))
        for one in (found if isinstance(found, list) else [])[:MAX_SAMPLES]
        if isinstance(one, dict) and isinstance(one.get("sample"), int)
    }


def _turns(sequences: Sequences, reward: GroupReward | None, sample: int) -> list[TurnView]:
    """Return the turns of a sample, if the group has rewards of turns."""
    if sequences.turn_rewards is None:
        return []
    rewards = sequences.turn_rewards[sample]
    parents = sequences.turn_parents[sample] if sequences.turn_parents else range(-1, len(rewards) - 1)
    found = reward.turn_advantages[sample] if reward is not None and reward.turn_advantages else None
    known = found if found is not None and len(found) == len(rewards) else [None] * len(rewards)
    return [
        TurnView(reward=value, advantage=advantage, continues=before)
        for value, advantage, before in zip(rewards, known, parents, strict=True)
    ]


def _calls(group: RolloutGroup) -> list[list[CallView]]:
    """Return by sample its calls, which are the runs of tokens under the loss mask, in the order of its sequences."""
    sequences = group.sequences
    places = _places(sequences)
    cuts, mask = sequences.cuts(), sequences.mask
    steps = [version.step for version in group.versions]
    spans: list[list[VersionSpan]] = [[] for _ in range(len(sequences))]
    for span in sequences.version_spans:
        spans[span.sequence].append(span)
    found: list[list[CallView]] = [[] for _ in range(sequences.n_samples)]
    counts = [0] * len(found)
    for number, reason in enumerate(sequences.finish_reasons):
        sample = number if sequences.sample_index is None else sequences.sample_index[number]
        first, after = int(cuts[number]), int(cuts[number + 1])
        edges = np.flatnonzero(np.diff(mask[first:after].astype(np.int8), prepend=0, append=0)).tolist()
        before = 0
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            found[sample].append(
                CallView(
                    sequence=counts[sample],
                    start=start,
                    new=start - before,
                    tokens=end - start,
                    steps=(steps[_version_at(spans[number], start)], steps[_version_at(spans[number], end - 1)]),
                    finish_reason=reason if end == after - first else None,
                    turn=None if places is None else int(places[first + start]),
                )
            )
            before = end
        counts[sample] += 1
    return found


def _version_at(spans: Sequence[VersionSpan], token: int) -> int:
    """Return the version that generated a token, by the spans of its sequence."""
    return spans[bisect_right(spans, token, key=lambda span: span.start) - 1].version


def _places(sequences: Sequences) -> NDArray[np.int32] | None:
    """Return each token's place among the turns of its sample; None: turns have no rewards, or do not fit."""
    if sequences.turn_rewards is None:
        return None
    try:
        return sequences.turns()
    except SchemaError:
        return None  # no trainer can use it either, and says why


def _figures(score: GroupScore | None, sample: int) -> dict[str, float]:
    """Return what raters say further of a sample."""
    columns = {} if score is None else score.figures
    return {name: value for name, column in columns.items() if (value := column[sample]) is not None}


def _statuses(score: GroupScore | None, sample: int) -> dict[str, str]:
    """Return by rater the status of a sample's rating where it is missing."""
    if score is None:
        return {}
    return {
        rater: score.statuses[rater][sample] if sample < len(score.statuses.get(rater, ())) else "missing"
        for rater, values in score.ratings.items()
        if values[sample] is None
    }


def _shared(conversations: Sequence[Sequence[Message]], calls: Sequence[Sequence[CallView]]) -> int:
    """Return how many messages all begin with, before the first one that the policy wrote.

    `calls` are those of each sample; as many of its last messages of the model at most are the policy's, and those
    before them are part of the prompt. A conversation keeps its last message.
    """
    first, shared = conversations[0], 0
    most = min(map(len, conversations)) - 1
    for talk, own in zip(conversations, calls, strict=False):
        said = [place for place, message in enumerate(talk) if message.role == "assistant"]
        if own and said:
            most = min(most, said[-len(own) :][0])
    while shared < most and all(talk[shared] == first[shared] for talk in conversations):
        shared += 1
    return shared
