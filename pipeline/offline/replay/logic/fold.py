"""Folds one environment's scores, in the order of ROLLOUTS, into rewards and a state to commit. Pure.

The normalizer is that of the live run: its windows hold the selected groups and nothing else
(`normalizer/logic/windows.py`). So a replay of all history under the live settings gives the live rewards to the bit,
and a replay of some of it depends on nothing that was not selected. Scores come in order and each group is resolved as
it comes: after a step nothing waits, and a restart needs only the normalizer's own state and the scores of the one
window still open.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.normalizer.logic.normalizer import EnvNormalizer
from lachesis.pipeline.normalizer.logic.reward import KEY, RewardRule
from lachesis.schemas.annotations import GroupReward, GroupScore
from lachesis.schemas.errors import DataError
from lachesis.schemas.replay import UnscoredGroup
from lachesis.schemas.values import Finite, Seq, convert_plain, unpack

__all__ = ["FoldCommit", "RewardFold", "extended_digest"]

_Scores = list[Finite | None]


class _OpenGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group of a window that is still open; `scores` None: it has none. `more`: what else is folded, by key."""

    seq: Seq
    group: str
    scores: _Scores | None
    more: dict[str, _Scores] = {}


class _FoldState(msgspec.Struct, frozen=True):
    """A delta, with what the normalizer's steps changed, or with a whole state of it."""

    normalizer: Any
    open: list[_OpenGroup]
    digest: str


class FoldCommit(NamedTuple):
    """What a commit holds. `delta` turns the state before into the one after."""

    scores: list[GroupScore]
    rewards: list[GroupReward]
    unscored: list[UnscoredGroup]
    delta: bytes


class RewardFold:
    """Feed it with `add_group`, in rising sequence; `step` hands out what was fed since the last one."""

    def __init__(self, env: str, normalization: NormalizationConfig, rule: RewardRule) -> None:
        self._normalizer = EnvNormalizer(env, normalization, rule.finish)
        self._rule = rule
        self._open: list[_OpenGroup] = []
        self._fed: list[tuple[_OpenGroup, GroupScore | None]] = []
        self._unscored: list[UnscoredGroup] = []
        self.fed = 0
        """Samples fed since the last step, and one more for each group."""
        self.digest = ""
        """Names every score and reward handed out so far, in order; stamps and reasons are not in it."""

    def restore(self, state: bytes | None, deltas: Sequence[bytes]) -> None:
        """Take over what was committed, before anything is fed. Raises `SchemaError` when it is malformed."""
        if state is not None:
            saved = convert_plain("replay state", _FoldState, unpack("replay state", state))
            self._normalizer.load_state_dict(saved.normalizer)
            self._open, self.digest = saved.open, saved.digest
        for delta in deltas:
            saved = convert_plain("replay delta", _FoldState, unpack("replay delta", delta))
            for part in saved.normalizer:
                self._normalizer.apply(part)
            self._open, self.digest = self._open + saved.open, saved.digest
        self._open = self._still_open()
        for part in self._open:
            self._resolve(part)

    def add_group(self, seq: int, group: str, score: GroupScore | None, reason: str = "") -> None:
        """Feed the group stored at `seq`; without a score comes the reason why it has none."""
        columns = {key: list(column) for key, column in self._rule.columns(score).items()} if score is not None else {}
        part = _OpenGroup(seq, group, columns.pop(KEY, None), columns)
        try:
            self._resolve(part)
        except DataError as error:  # scores that cannot be normalized: as in the live run, the group has none
            part, reason = _OpenGroup(seq, group, None), str(error)
            self._normalizer.resolve(group, seq, None, source=seq)
        if part.scores is None:
            self._unscored.append(UnscoredGroup(group=group, seq=seq, reason=reason[:500]))
        self._fed.append((part, score))
        self.fed += 1 + len(part.scores or ())

    def step(self) -> FoldCommit:
        """Hand out scores and rewards of what was fed since the last step."""
        scores = {part.seq: score for part, score in self._fed if score is not None}
        rewards: list[GroupReward] = []
        changes = []
        while (step := self._normalizer.step()).delta is not None:
            rewards += [_unstamped(self._rule.reward(ready, scores[ready.seq])) for ready in step.ready]
            changes.append(step.delta)
        rewards.sort(key=lambda reward: reward.seq)
        self._extend_digest(rewards)
        new = [part for part, _ in self._fed]
        self._open = self._open + new
        self._open = self._still_open()
        folded = FoldCommit(
            list(scores.values()),
            rewards,
            self._unscored,
            msgspec.msgpack.encode(_FoldState(changes, new, self.digest)),
        )
        self._fed, self._unscored, self.fed = [], [], 0
        return folded

    def state(self) -> bytes:
        """Return the whole state as of the last step."""
        return msgspec.msgpack.encode(_FoldState(self._normalizer.state_dict(), self._open, self.digest))

    def _resolve(self, part: _OpenGroup) -> None:
        self._normalizer.member(part.seq, part.group)
        values = None if part.scores is None else {KEY: part.scores, **part.more}
        self._normalizer.resolve(part.group, part.seq, values, source=part.seq)

    def _still_open(self) -> list[_OpenGroup]:
        watermark = self._normalizer.watermark
        return [part for part in self._open if part.seq >= watermark]

    def _extend_digest(self, rewards: Sequence[GroupReward]) -> None:
        by_seq = {reward.seq: reward for reward in rewards}
        for part, score in self._fed:
            self.digest = extended_digest(self.digest, part.seq, part.group, score, by_seq.get(part.seq))


def extended_digest(digest: str, seq: int, group: str, score: GroupScore | None, reward: GroupReward | None) -> str:
    """Return what names everything up to this group, where `digest` names everything before it.

    Stamps, controls and ratings of fixed samples do not count, nor does what the rollout itself says.
    """
    scored = score
    if score is not None:
        scored = msgspec.structs.replace(score, stamps=[], excluded=[], controls={}, fixed=None)
    rewarded = msgspec.structs.replace(reward, tokens=None) if reward is not None else None
    content = msgspec.msgpack.encode((digest, seq, group, scored, rewarded), order="deterministic")
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _unstamped(reward: GroupReward) -> GroupReward:
    """Its score, in the same message, has the stamps."""
    return msgspec.structs.replace(reward, stamps=[])
