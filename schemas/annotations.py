"""Annotations: what the stages derive from rollouts.

Each is keyed by (kind, group, revision); the first stored wins.

One message carries whatever a stage had ready for several groups of one environment; inside it each group is an item
with a column per quantity. Every item carries the stage stamps gathered on its way, which never enter a digest.
"""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Literal, Self

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from lachesis.schemas.codec import Event
from lachesis.schemas.columns import view
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ids import PolicyVersion, is_group_id
from lachesis.schemas.promotion import PROMOTED_SINCE
from lachesis.schemas.repeats import REPEATS_SINCE, RepeatedRows, are_repeated, leave_out, put_back, rows_in_all
from lachesis.schemas.sequences import check_turn_parents
from lachesis.schemas.subjects import ROLLOUTS
from lachesis.schemas.values import Count, Finite, Seq

__all__ = [
    "EXCERPT_CHARS",
    "MAX_EVALUATED_TASKS",
    "MAX_EVALUATION_EXAMPLES",
    "MAX_EXAMPLE_CHARS",
    "MAX_EXCERPT_SAMPLES",
    "AnswerExcerpts",
    "Commit",
    "CurriculumEvent",
    "DeadKind",
    "DeadLetter",
    "EvalEvent",
    "EvalExample",
    "FixedRating",
    "GroupReward",
    "GroupScore",
    "GroupShaping",
    "GroupSignals",
    "RewardEvent",
    "ScoreEvent",
    "Stamp",
    "StreamMark",
    "TeacherEvent",
    "TeacherLogprobs",
    "TeacherPointer",
    "Verdict",
    "check_rewards",
    "check_scores",
]

DeadKind = Literal["data", "poison", "deadline"]
_MAX_ABS_ADVANTAGE = 1e100
"""One whose square is still a number, so that a batch can be whitened."""
MAX_EVALUATED_TASKS = 1 << 16
"""Tasks whose results one evaluation carries; about 1 MB."""
MAX_EVALUATION_EXAMPLES = 4
MAX_EXAMPLE_CHARS = 1000
"""Characters of an example's prompt and of its answer; what is longer is cut."""
EXCERPT_CHARS = 128
"""Characters of each end of a text that an excerpt holds."""
MAX_EXCERPT_SAMPLES = 4
"""Samples of a group whose excerpts are carried, the first ones: some 1.3 KB with their prompt."""
Verdict = Literal["trainable", "zero_variance", "unscorable", "quarantined"]


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """One stage's times for one group, Unix ns: stored in its input stream, taken up, output handed to the bus.

    Each stage hands on the stamps of those before it, so this form is fixed: an older stage would drop an element that
    it does not know. What else there is to time gets a stamp of its own.
    """

    stage: str
    stored_ns: Count
    start_ns: Count
    end_ns: Count
    attempt: Count = 1


class StreamMark(msgspec.Struct, frozen=True, array_like=True):
    """A stored message: its sequence, and when the server stored it (Unix ns, the same on every copy)."""

    seq: Seq
    stored_ns: Count


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """What makes an output message a commit of a stateful stage as well.

    `term` names the writer's life, `index` counts its subject's commits from 0, `cursors` gives for each input stream
    the last sequence whose effect is in the state, and `delta` (msgpack) turns the state before into the state after.
    `read` names the newest message that the writer had read of each stream, so that a store which lost it is noticed.
    `crc32` is that of `delta`.
    """

    term: str
    index: Count
    cursors: dict[str, Count]
    delta: bytes
    read: dict[str, StreamMark] = {}
    crc32: Count


class _Item(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What every per-group item names: the group and its sequence in the ROLLOUTS stream."""

    group: str
    seq: Seq


class _TaskItem(_Item, frozen=True, kw_only=True, omit_defaults=True):
    """What scores and rewards say of the group's task. `index`: its place in the environment's pool, if it has one."""

    item: str
    policy_step: Count
    index: Count | None = None
    skill: str | None = None


class AnswerExcerpts(msgspec.Struct, frozen=True, array_like=True):
    """The ends of a group's texts: of its last question, and of each of the first samples the answer's.

    An excerpt is the whole text, its beginning and its end, or nothing ([]: there is no text).
    """

    prompt: list[str]
    answers: list[list[str]]


class GroupSignals(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a group's generated tokens look like, for health checks. Lists have one entry per sample.

    `logprobs`: mean logprob of its tokens (None: it has none). `texts`: CRC-32 of its tokens. `truncated`: samples cut
    off at the token limit. `zeros`: tokens whose logprob is exactly 0. `unlikely`: tokens of the vocabulary's rare end
    drawn against the odds ([]: none). `sure_run`: longest run of tokens with a probability above .99 in any sample.
    `distinct`: share of distinct 3-grams in a sample's last 256 tokens, mean of those of 32 or more (None: none is).
    `shared`: chance that a distinct 3-gram of one of those is in another one as well (None: fewer than two are).
    `untrainable`: why the run's trainer cannot use the group (None: nothing speaks against it). `greedy`: it was
    sampled at temperature 0, so its samples are alike by right. `excerpts`: how its answers begin and end (None: it is
    not one of the groups of which they are carried, or has no texts).
    """

    logprobs: list[Finite | None]
    texts: list[Count]
    truncated: Count = 0
    zeros: Count = 0
    unlikely: list[Count] = []
    sure_run: Count = 0
    distinct: Finite | None = None
    shared: Finite | None = None
    untrainable: str | None = None
    greedy: bool = False
    excerpts: AnswerExcerpts | None = None


class GroupShaping(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What form and length would add to the scores of a group. Lists have one entry per sample.

    `bonus`: the most that a sample may get, None for one that did not fail. `succeeded` is None where it is not known.
    No shaped score exceeds `ceiling`. What the bonus is made of: by marker whether the sample has it, and what its
    length is worth.
    """

    bonus: list[Finite | None]
    succeeded: list[bool | None]
    ceiling: Finite
    markers: dict[str, list[bool]]
    length: list[Finite]


class FixedRating(msgspec.Struct, frozen=True, kw_only=True):
    """How a fixed sample, that of number `sample` of `group`, was rated beside a group, once or several times: by
    rater, and what was missing is left out. `raters` names how each of them was configured.
    """

    group: str
    sample: Count
    ratings: dict[str, list[Finite]]
    raters: dict[str, str]


class GroupScore(_TaskItem, frozen=True, kw_only=True, omit_defaults=True):
    """Ratings of one group. Lists have one entry per sample; a missing rating is None and its status says why.

    `scores` is the ensemble's verdict, `ratings` the calibrated ones by rater, `lengths` generated tokens,
    `disagreement` the (mean, maximum) over samples of the standard deviation between raters, `success` their mean
    success. `figures` are what raters say further of each sample, by `RATER/FIGURE`: how well it meets a criterion, for
    instance. They enter no score, and neither do `controls`: what raters give the same samples as answers to another
    task ({}: not rated so), and `fixed`: a rating of a fixed sample, which says whether raters change (None: there is
    none beside this group). `excluded` are the samples that the environment keeps from being trained on.
    `turn_rewards` are those of the rollout ([]: it has none), `turn_parents` the turns that they continue ([]: the ones
    before). `signals` and `failures` (by rater why the first of its missing ratings is missing) are for the health
    checks and for people, who look at the live revision alone: elsewhere there are none.
    """

    scores: list[Finite | None]
    ratings: dict[str, list[Finite | None]]
    figures: dict[str, list[Finite | None]] = {}
    controls: dict[str, list[Finite | None]] = {}
    fixed: FixedRating | None = None
    lengths: list[Count]
    statuses: dict[str, list[str]] = {}
    disagreement: tuple[Finite, Finite] | None = None
    success: Finite | None = None
    signals: GroupSignals | None = None
    failures: dict[str, str] = {}
    shaping: GroupShaping | None = None
    excluded: list[Count] = []
    turn_rewards: list[list[Finite]] = []
    turn_parents: list[list[int]] = []
    stamps: list[Stamp] = []


class GroupReward(_TaskItem, frozen=True, kw_only=True, omit_defaults=True):
    """Rewards and advantages of one group; lists have one entry per sample.

    `rewards` are normalized with the immutable snapshot `snapshot`; `mean`, `std`, `range` describe them. `lengths`,
    the tokens that are trained on, are there where the batcher is to whiten the advantages over its batch ([]: it is
    not). `turn_advantages`: of a rollout with rewards of turns the advantage of each turn, that of its sample included
    (None: the sample has no reward); [] where `advantages` are those of every token. `shaping` is what was added to
    each reward for form and length, with the share `shaping_scale` in force ([], None: no shaping); `rewards`, what
    describes them and the verdict are without it. `tokens` were generated for all samples together (None: not known).
    """

    verdict: Verdict
    scores: list[Finite | None]
    rewards: list[Finite | None]
    advantages: list[Finite | None]
    snapshot: str
    mean: Finite | None
    std: Finite | None
    range: Finite | None
    n_valid: Count
    success: Finite | None = None
    reason: str | None = None
    lengths: list[Count] = []
    turn_advantages: list[list[Finite] | None] = []
    shaping: list[Finite | None] = []
    shaping_scale: Finite | None = None
    tokens: Count | None = None
    stamps: list[Stamp] = []

    @property
    def trains(self) -> bool:
        """Whether there is something to train on: rewards that differ, or shaping that does where they do not."""
        shaped = self.verdict == "zero_variance" and any(self.shaping) and any(self.advantages)
        return self.verdict == "trainable" or shaped


class TeacherPointer(_Item, frozen=True, kw_only=True, omit_defaults=True):
    """Where the teacher's arrays for a group lie: `stored` is their sequence in the TEACHER stream, None if it failed.

    `missing` lists the sequences without logprobs and `reason` says why.
    """

    stored: Seq | None
    missing: list[Count] = []
    reason: str | None = None
    stamps: list[Stamp] = []


class _Annotation(Event, frozen=True, kw_only=True):
    """What every annotation message names."""

    run: str
    env: str
    revision: str


def _check_items(items: "list[GroupScore] | list[GroupReward] | list[TeacherPointer]") -> None:
    for item in items:
        if not is_group_id(item.group) or item.seq < 1:
            raise SchemaError(f"groups: {item.group[:40]!r} at sequence {item.seq} is no stored group")


def _check_signals(group: str, signals: GroupSignals, n: int) -> None:
    if len(signals.logprobs) != n or len(signals.texts) != n or len(signals.unlikely) not in {0, n}:
        raise SchemaError(f"group {group}: signals of another number of samples than {n}")
    if not all(value is None or math.isfinite(value) for value in (*signals.logprobs, signals.distinct)):
        raise SchemaError(f"group {group}: a signal is NaN or infinite; a missing one is None")
    if signals.excerpts is not None:
        texts = [signals.excerpts.prompt, *signals.excerpts.answers]
        if len(texts) - 1 > min(n, MAX_EXCERPT_SAMPLES) or any(len(parts) > 2 for parts in texts):
            raise SchemaError(f"group {group}: more excerpts than {n} samples have")
        if any(len(part) > 2 * EXCERPT_CHARS for parts in texts for part in parts):
            raise SchemaError(f"group {group}: an excerpt of more than {2 * EXCERPT_CHARS} characters")


def _check_shaping(group: str, shaping: GroupShaping, n: int) -> None:
    columns: list[list[float | None]] = [shaping.bonus, [*shaping.length]]
    lengths = {len(shaping.succeeded), *map(len, columns), *map(len, shaping.markers.values())}
    if lengths != {n}:
        raise SchemaError(f"group {group}: shaping of another number of samples than {n}")
    values = [*(value for column in columns for value in column), shaping.ceiling]
    if not all(value is None or math.isfinite(value) for value in values):
        raise SchemaError(f"group {group}: a bonus is NaN or infinite; a missing one is None")


def _check_fixed(group: str, fixed: FixedRating) -> None:
    if not is_group_id(fixed.group) or fixed.ratings.keys() != fixed.raters.keys():
        raise SchemaError(f"group {group}: its fixed sample is of no group, or ratings and raters of it differ")
    if not all(map(math.isfinite, chain.from_iterable(fixed.ratings.values()))):
        raise SchemaError(f"group {group}: a rating of a fixed sample is NaN or infinite; a missing one is left out")


def check_scores(groups: list[GroupScore]) -> None:
    """Raise `SchemaError` unless every list of every group fits, and every number is one."""
    _check_items(groups)
    for item in groups:
        n, columns = len(item.scores), (*item.ratings.values(), *item.figures.values(), *item.controls.values())
        if n == 0 or len(item.lengths) != n or any(len(values) != n for values in columns):
            raise SchemaError(f"group {item.group}: scores, lengths, ratings, figures and controls differ in length")
        if any(sample >= n for sample in item.excluded):
            raise SchemaError(f"group {item.group}: it excludes samples {item.excluded[:8]}, and has {n}")
        values = [item.scores, *columns, item.disagreement or (), (item.success,)]
        if not all(value is None or math.isfinite(value) for values in values for value in values):
            raise SchemaError(f"group {item.group}: a score is NaN or infinite; a missing one is None")
        if item.fixed is not None:
            _check_fixed(item.group, item.fixed)
        if item.turn_rewards and len(item.turn_rewards) != n:
            raise SchemaError(f"group {item.group}: turn_rewards of {len(item.turn_rewards)} samples, where it has {n}")
        if item.turn_parents:
            check_turn_parents(item.turn_parents, item.turn_rewards)
        if item.signals is not None:
            _check_signals(item.group, item.signals, n)
        if item.shaping is not None:
            _check_shaping(item.group, item.shaping, n)


def check_rewards(groups: list[GroupReward]) -> None:
    """Raise `SchemaError` unless every list of every group fits, and every advantage is a number."""
    _check_items(groups)
    for item in groups:
        n = len(item.scores)
        columns = (item.lengths, item.shaping, item.turn_advantages)
        if len(item.rewards) != n or len(item.advantages) != n or any(len(column) not in {0, n} for column in columns):
            raise SchemaError(f"group {item.group}: scores, rewards, advantages, lengths and shaping differ in length")
        if not all(value is None or math.isfinite(value) for value in (*item.shaping, item.shaping_scale)):
            raise SchemaError(f"group {item.group}: shaping is NaN or infinite")
        values = [*item.advantages, *(value for turns in item.turn_advantages for value in turns or ())]
        if not all(value is None or abs(value) <= _MAX_ABS_ADVANTAGE for value in values):
            raise SchemaError(f"group {item.group}: an advantage is NaN, infinite or beyond {_MAX_ABS_ADVANTAGE}")


class ScoreEvent(_Annotation, frozen=True, kw_only=True):
    """Scores of some groups. `ensemble` is the digest of raters, versions, parameters and aggregation.

    `promoted` is the `first` of the promotion that scored them, None: the run's own configuration did.
    """

    ensemble: str
    raters: dict[str, str]
    groups: list[GroupScore]
    promoted: Seq | None = None

    @property
    def needs(self) -> int:
        return 1 if self.promoted is None else PROMOTED_SINCE

    def check(self) -> None:
        check_scores(self.groups)


class RewardEvent(_Annotation, frozen=True, kw_only=True):
    """Rewards of some groups, and the commit of the normalizer's state for this environment.

    `promoted` is as in scores.
    """

    advantage: str
    commit: Commit
    groups: list[GroupReward]
    promoted: Seq | None = None

    @property
    def needs(self) -> int:
        return 1 if self.promoted is None else PROMOTED_SINCE

    def check(self) -> None:
        check_rewards(self.groups)


class TeacherEvent(_Annotation, frozen=True, kw_only=True):
    """Pointers to teacher logprobs."""

    teacher: str
    groups: list[TeacherPointer]

    def check(self) -> None:
        _check_items(self.groups)


class CurriculumEvent(_Annotation, frozen=True, kw_only=True):
    """A commit of the curriculum: the groups it observed and the snapshot in force afterwards."""

    strategy: str
    snapshot_id: str
    commit: Commit
    observed: list[str]


class DeadLetter(_Annotation, frozen=True, kw_only=True):
    """A message that cannot be handled, kept with its reason. The message itself stays where it is (`stream`, `seq`).

    `kind`: data (bad message), poison (kills the process that handles it), deadline (not handled in time).
    `leased`: the message has the header of a rollout that was generated under a lease.
    """

    stage: str
    kind: DeadKind
    stream: str
    seq: Seq
    group: str | None
    reason: str
    place: str
    time_ns: Count
    trace_id: str | None = None
    attempts: Count = 1
    leased: bool

    @property
    def ends_rollout(self) -> bool:
        """Whether the rollout at `seq` ends with this letter.

        Not if the stage is one that a batch can do without.
        """
        return self.stream == ROLLOUTS and self.stage in {"scorer", "normalizer", "batcher"}


class EvalExample(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluated task (its index) for people to read: the last question, the answer at temperature 0, its score.

    `score` is None where no rater could give one. Prompt and answer are cut to `MAX_EXAMPLE_CHARS`.
    """

    task: Count
    prompt: str
    answer: str
    score: Finite | None = None


class EvalEvent(_Annotation, frozen=True, kw_only=True):
    """Result of one evaluation against a named policy version; it never enters the ledger.

    `avg` is the mean success of k samples an item, `pass_at_k` the share of items with any success, `greedy` the mean
    success at temperature 0 (None: not measured); all of them leave out `unjudged` samples, which no rater could score.
    `error` is the standard error of `avg`, with tasks as the unit of chance (None: not known, as with a single task).
    `tasks` are the indices of the tasks in their environment, and of the answers sampled for each `task_judged`
    could be scored and `task_successes` succeeded; empty if they were not counted, or were too many for a message.
    `task_keys` name the same tasks by their content, in any order of the pool; empty in older evaluations. `examples`
    are the first tasks, the same in every evaluation; empty where nothing was sampled at temperature 0.
    """

    policy_version: str
    policy_step: Count
    items: Count
    k: Count
    temperature: Finite
    avg: Finite
    pass_at_k: Finite
    started_ns: Count
    ended_ns: Count
    greedy: Finite | None = None
    unjudged: Count = 0
    error: Annotated[float, Meta(ge=0, le=1)] | None = None
    tasks: list[Count] = []
    task_keys: list[Count] = []
    task_successes: list[Count] = []
    task_judged: list[Count] = []
    examples: list[EvalExample] = []

    def check(self) -> None:
        if len(self.examples) > MAX_EVALUATION_EXAMPLES:
            raise SchemaError(f"examples: {len(self.examples)}, where at most {MAX_EVALUATION_EXAMPLES} are carried")
        if any(max(len(one.prompt), len(one.answer)) > MAX_EXAMPLE_CHARS for one in self.examples):
            raise SchemaError(f"examples: a text of more than {MAX_EXAMPLE_CHARS} characters")
        if not len(self.tasks) == len(self.task_successes) == len(self.task_judged) <= MAX_EVALUATED_TASKS:
            raise SchemaError("tasks, task_successes and task_judged differ in length, or are too long")
        if self.task_keys and len(self.task_keys) != len(self.tasks):
            raise SchemaError("task_keys: as many as tasks, or none")
        if any(good > all_ for good, all_ in zip(self.task_successes, self.task_judged, strict=True)):
            raise SchemaError("task_successes: more than could be scored")
        PolicyVersion.parse(self.policy_version)


class TeacherLogprobs(Event, frozen=True, kw_only=True):
    """The teacher's logprobs of one group's sampled tokens: float32 [T] in the group's own order of sequences.

    Position t is conditioned on the tokens before t; a sequence's first position is 0 and masked, and so is all of a
    sequence listed in `missing`. Optional top-k columns: `topk_ids` int32 [T, K] (padding -1), `topk_logprobs`
    float16 [T, K] (padding -inf), `topk_mass` float16 [T] (their summed probability) and `topk_tail` float16 [T] (the
    logprob of all other tokens together, which is more precise than 1 - mass).

    A teacher of another tokenizer has no logprob for each token, so its sequences are in `missing`; readers that know
    no more do without it. What it has are logprobs of spans, runs of tokens that end where a token of its own ends:
    `span_starts` int32 [T], for each token the position in its sequence at which its span begins (-1: it has none),
    and `span_logprobs` float32 [T], a span's logprob at its first token and 0 elsewhere.

    `weights` are the versions of weights that the teacher's server says it computed with ([]: it does not say).
    `prompt_digest` is the SHA-256 (hex) of the template of the teacher's own prompt, `teacher.prompt` (None: it reads
    that of the policy).

    `repeats`: on the wire alone: rows that are left out of all columns, since sequences begin alike.
    """

    run: str
    env: str
    group: str
    teacher: str
    tokenizer_hash: str
    temperature: Finite
    logprobs: bytes
    missing: list[Count] = []
    k: Count = 0
    topk_ids: bytes | None = None
    topk_logprobs: bytes | None = None
    topk_mass: bytes | None = None
    topk_tail: bytes | None = None
    span_starts: bytes | None = None
    span_logprobs: bytes | None = None
    weights: list[str] = []
    prompt_digest: str | None = None
    repeats: list[RepeatedRows] = []

    @property
    def needs(self) -> int:
        return REPEATS_SINCE if self.repeats else 1

    @property
    def n_tokens(self) -> int:
        return len(self.logprobs) // 4

    def without_repeats(self, repeats: Sequence[RepeatedRows]) -> Self:
        """Return the form that travels, without those of `repeats` that have the same values in all columns."""
        columns = self._columns()
        same = [are_repeated(data, repeats, width) for data, width in columns.values()]
        left_out = [one for one, *everywhere in zip(repeats, *same, strict=True) if all(everywhere)]
        found = {name: leave_out(data, left_out, width) for name, (data, width) in columns.items()}
        return self.replace(**found, repeats=left_out)

    def from_wire(self, data: bytes | memoryview) -> Self:
        if not self.repeats:
            return self
        stored = self.n_tokens
        rows_in_all(stored, self.repeats)
        columns = self._columns()
        whole = {name: put_back(data, self.repeats, stored, width) for name, (data, width) in columns.items()}
        return self.replace(**whole, repeats=[], v=1)  # raised for the form that travelled

    def _columns(self) -> dict[str, tuple[bytes, int]]:
        """Return the columns that are there, each with the bytes of a row."""
        widths = {
            "logprobs": 4,
            "topk_ids": 4 * self.k,
            "topk_logprobs": 2 * self.k,
            "topk_mass": 2,
            "topk_tail": 2,
            "span_starts": 4,
            "span_logprobs": 4,
        }
        return {name: (data, width) for name, width in widths.items() if (data := getattr(self, name)) is not None}

    def values(self) -> NDArray[np.float32]:
        """Return the logprobs float32 [T]."""
        return view(self.logprobs, "float32", self.n_tokens, "logprobs")

    def alternatives(self) -> tuple[NDArray[np.int32], NDArray[np.float32]] | None:
        """Return the likeliest tokens and their logprobs; None if none were requested from the teacher.

        int32 [T, K], -1 for none, and float32 [T, K+1], nats, -inf where there is no token; the last of all others.
        """
        if self.topk_ids is None or self.topk_tail is None:
            return None
        ids = view(self.topk_ids, "int32", self.n_tokens, "topk_ids", self.k).reshape(self.n_tokens, self.k)
        logprobs = view(self.topk_logprobs or b"", "float16", self.n_tokens, "topk_logprobs", self.k)
        tail = view(self.topk_tail, "float16", self.n_tokens, "topk_tail")
        joined = np.concatenate([logprobs.reshape(self.n_tokens, self.k), tail.reshape(self.n_tokens, 1)], axis=1)
        return ids, joined.astype(np.float32)

    def spans(self) -> tuple[NDArray[np.int32], NDArray[np.float32]] | None:
        """Return `span_starts` and `span_logprobs`; None if the teacher has the policy's tokenizer."""
        if self.span_starts is None or self.span_logprobs is None:
            return None
        starts = view(self.span_starts, "int32", self.n_tokens, "span_starts")
        return starts, view(self.span_logprobs, "float32", self.n_tokens, "span_logprobs")

    def check(self) -> None:
        if not np.isfinite(self.values()).all():
            raise SchemaError("logprobs: NaN or infinite; a missing sequence is listed in `missing`")
        absent = {column is None for column in (self.topk_ids, self.topk_logprobs, self.topk_mass)}
        if absent != {self.k == 0}:
            raise SchemaError(f"k: {self.k} does not fit the top-k columns present: all three, or none and k 0")
        if self.topk_ids is not None:
            view(self.topk_ids, "int32", self.n_tokens, "topk_ids", self.k)
            view(self.topk_logprobs or b"", "float16", self.n_tokens, "topk_logprobs", self.k)
            view(self.topk_mass or b"", "float16", self.n_tokens, "topk_mass")
        if (self.span_starts is None) != (self.span_logprobs is None):
            raise SchemaError("span_starts and span_logprobs: one without the other")
        for found in (self.alternatives(), self.spans()):
            if found is not None and np.isnan(found[1]).any():
                raise SchemaError("teacher logprobs: NaN")
