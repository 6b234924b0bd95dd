"""Reads the results of a finished revision in the order of ROLLOUTS and verifies its digest.

Guarantees that the results are those that the replay folded: a missing commit, or a score or reward that differs from
its recorded digest, is an error before anything is returned.
"""

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.last_event import decode_owned, read_last_event
from lachesis.pipeline.bus.skipped_messages import read_skipped
from lachesis.pipeline.errors import LedgerError, NotFoundError
from lachesis.pipeline.offline.replay.logic.fold import extended_digest
from lachesis.schemas import subjects
from lachesis.schemas.annotations import GroupReward
from lachesis.schemas.replay import RescoreEvent, RevisionRecord
from lachesis.schemas.subjects import REPLAY, ROLLOUTS

__all__ = ["RevisionResult", "joined_digest", "read_results", "revision_digest"]


class RevisionResult(NamedTuple):
    """A rollout under a revision: its reward, or why it has none."""

    seq: int
    env: str
    group: str
    reward: GroupReward | None
    reason: str


async def revision_digest(bus: Bus, record: RevisionRecord) -> str:
    """Return what names all scores and rewards of a revision, as its replay said it when it was finished.

    Raises `NotFoundError` when it is not finished.
    """
    last_seq = _end(record)
    digests = {}
    for env in sorted(record.selection.envs):
        subject = subjects.replay("rescore", record.run, record.revision, env)
        last, _, _ = await read_last_event(bus, REPLAY, subject, RescoreEvent, lambda event: event.run == record.run)
        if last is None or last.commit.cursors.get(ROLLOUTS, 0) <= last_seq:
            raise NotFoundError(
                f"revision {record.revision!r} of run {record.run} is not finished in {env}: repeat the command that "
                "began it (`lachesis replay`), which continues where it stopped"
            )
        digests[env] = last.digest
    return joined_digest(digests)


async def read_results(bus: Bus, record: RevisionRecord) -> list[RevisionResult]:
    """Return every rollout of a finished revision in rising sequence.

    Raises `LedgerError` where what is stored is not what the replay stored.
    """
    found = [one for env in record.selection.envs for one in await _of_environment(bus, record, env)]
    return sorted(found, key=lambda one: one.seq)


async def _of_environment(bus: Bus, record: RevisionRecord, env: str) -> list[RevisionResult]:
    subject = subjects.replay("rescore", record.run, record.revision, env)
    found: list[RevisionResult] = []
    commits, digest, reached = 0, "", 0
    left_out = await read_skipped(bus)
    async with bus.read(REPLAY, [subject], follow=False) as messages:
        async for message in messages:
            event = await decode_owned(bus, RescoreEvent, message, lambda event: event.env == env, left_out=left_out)
            if event is None or event.commit.index < commits:  # an old commit once more
                continue
            where = f"revision {record.revision} of run {record.run}, {env}, sequence {message.seq} of {REPLAY}"
            if event.commit.index != commits:
                raise LedgerError(f"{where}: commit {event.commit.index} where {commits} follows; commits are gone")
            commits, reached = commits + 1, event.commit.cursors.get(ROLLOUTS, 0)
            result, digest = _unfold(event, digest)
            if digest != event.digest:
                raise LedgerError(
                    f"{where}: its scores and rewards are {digest}, but were {event.digest} when they were stored: "
                    "they were changed; replay the history under another revision"
                )
            found += result
    if reached <= _end(record):
        raise LedgerError(
            f"revision {record.revision} of run {record.run} ends in {env} before sequence {reached} of {ROLLOUTS}, "
            f"and was to go up to {record.last}: commits are gone"
        )
    return found


def _end(record: RevisionRecord) -> int:
    if record.last is None:
        raise NotFoundError(
            f"revision {record.revision!r} of run {record.run} follows the run and has no end: `lachesis replay` "
            "scores what is there under a name of its own"
        )
    return record.last


def _unfold(event: RescoreEvent, digest: str) -> tuple[list[RevisionResult], str]:
    """Return what an event says of each group, in order, and the digest that it comes to."""
    scores = {score.seq: score for score in event.scores}
    rewards = {reward.seq: reward for reward in event.rewards}
    unscored = {item.seq: item for item in event.unscored}
    found = []
    for seq in sorted({*scores, *unscored}):
        score, reward = scores.get(seq), rewards.get(seq)
        group = score.group if score is not None else unscored[seq].group
        digest = extended_digest(digest, seq, group, score, reward)
        reason = unscored[seq].reason if seq in unscored else "a copy of an earlier one" if reward is None else ""
        found.append(RevisionResult(seq, event.env, group, reward, reason))
    return found, digest


def joined_digest(digests: Mapping[str, str]) -> str:
    """Return what names a revision, of what names it in each environment."""
    content = "\n".join(f"{name} {digest}" for name, digest in sorted(digests.items()))
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
