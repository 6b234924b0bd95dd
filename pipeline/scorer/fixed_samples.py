"""Keeps samples of an environment's first groups, which raters rate again beside later groups.

The policy has no part in these ratings: if they change, a rater did, and the health check `rater_drift` names it. No
score depends on them. The samples are in the run's bucket, so every replica and every life of the scorer has the same
ones. Which group comes with a rating, and of which sample, follows from the group's id: a rating is a part of the
group's score, so it counts once, however often the group is delivered.
"""

import hashlib
import logging

import anyio
import msgspec

from lachesis.pipeline.errors import DamagedError, FencedError, InfrastructureError
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.scorer.rater import Sample
from lachesis.pipeline.scorer.scorer import EnvironmentScorer, sample_of
from lachesis.pipeline.tasks.thoughts import OPENED_KEY, opened_thought
from lachesis.schemas import keys
from lachesis.schemas.annotations import FixedRating, GroupScore
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import FixedSample, FixedSamples
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.rollout import RolloutGroup

__all__ = ["MAX_SAMPLES", "FixedSampleSet", "choose_sample", "is_due"]

log = logging.getLogger("lachesis")

MAX_SAMPLES = 32
_MAX_ALIKE = 16
"""Samples of groups in which all had one score: where nothing succeeds at first, all would be failures."""
_MAX_SAMPLE_BYTES = 128 << 10
_MAX_BYTES = 2 << 20
"""Bytes of all samples of an environment: a message of the bus has room for them."""
_FIRST_TIMES = 3
"""Further ratings of a sample that becomes a fixed one: they say how much raters differ from themselves."""
_DRAWS = 1 << 32


def choose_sample(known: FixedSamples, group: RolloutGroup, score: GroupScore) -> FixedSample | None:
    """Return the sample of a scored group that is to be a fixed one; None: none is.

    In turn it is one with the highest score of its group and one with the lowest, so that there are good and bad ones.
    """
    rated = [i for i, value in enumerate(score.scores) if value is not None and i not in score.excluded]
    if len(known.samples) >= MAX_SAMPLES or not rated:
        return None
    alike = len(rated) > 1 and len({score.scores[i] for i in rated}) == 1
    before = sum(sample.alike == alike for sample in known.samples)
    if alike and before >= _MAX_ALIKE:
        return None
    best = min if before % 2 else max
    chosen = best(rated, key=lambda i: score.scores[i] or 0.0)
    found = FixedSample(
        group=group.id,
        sample=chosen,
        item=group.item,
        messages=group.messages[chosen],
        task=group.task,
        tokens=group.sequences.lengths[chosen],
        ending=group.sequences.endings[chosen],
        opened=opened_thought(str(group.metadata.get(OPENED_KEY, ""))),
        alike=alike,
    )
    return found if len(msgspec.msgpack.encode(found)) <= _MAX_SAMPLE_BYTES else None


def is_due(group: str, share: float, samples: int) -> int | None:
    """Return the number of the fixed sample that is rated beside a group; None: none is.

    It is any number: modulo that of the fixed samples. `share` is of the ratings, and the group has so many `samples`.
    """
    digest = hashlib.blake2b(group.encode(), digest_size=8, person=b"fixed samples").digest()
    drawn, number = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
    return number if drawn < share * samples * _DRAWS else None


class FixedSampleSet:
    """The fixed samples of one environment. `share`: of the ratings, those of fixed samples; 0: there are none."""

    def __init__(self, service: Service, env: str, share: float) -> None:
        self._bus = service.bus
        self._env = env
        self._key = keys.fixed_samples(service.revision, env)
        self._share = share
        self._known = FixedSamples()
        self._is_read = False
        self._is_full = False
        self._one_at_a_time = anyio.Lock()

    async def rate(self, group: RolloutGroup, score: GroupScore, scorer: EnvironmentScorer) -> FixedRating | None:
        """Return how a fixed sample is rated now: the group's own if it has one, or the one that is due.

        None: no sample is due, it cannot be read, or no rater rates it.
        """
        if self._share <= 0 or not scorer.rates_samples:
            return None
        try:
            sample = await self._own_sample(group, score)
        except (InfrastructureError, FencedError):
            return None  # another group will do
        except DamagedError as error:
            log.warning("environment %s has no fixed samples: %s", self._env, error)
            self._share = 0.0
            return None
        if sample is None:
            number = is_due(group.id, self._share, len(score.scores))
            if number is None or not self._known.samples:
                return None
            sample = self._known.samples[number % len(self._known.samples)]
        times = _FIRST_TIMES if sample.group == group.id else 1
        ratings = await scorer.rate_fixed(self._as_sample(sample), times)
        if not ratings:
            return None
        raters = {name: scorer.rater_digests[name] for name in ratings}
        return FixedRating(group=sample.group, sample=sample.sample, ratings=ratings, raters=raters)

    async def _own_sample(self, group: RolloutGroup, score: GroupScore) -> FixedSample | None:
        """Return the fixed sample of this group, which may become one; None if it has none."""
        if not self._is_read or (not self._is_full and choose_sample(self._known, group, score) is not None):
            async with self._one_at_a_time:
                await self._add(group, score)
        return next((sample for sample in self._known.samples if sample.group == group.id), None)

    async def _add(self, group: RolloutGroup, score: GroupScore) -> None:
        """Read what other replicas stored, and store a sample of this group unless there are enough."""
        entry = await self._bus.value(self._key)
        if entry is not None:
            try:
                self._known = decode(FixedSamples, entry.value)
            except SchemaError as error:
                log.warning(
                    "environment %s: its fixed samples cannot be read, so others are chosen: %s", self._env, error
                )
        self._is_read = True
        if any(sample.group == group.id for sample in self._known.samples):
            return
        chosen = choose_sample(self._known, group, score)
        if chosen is None:
            return
        grown = FixedSamples(samples=[*self._known.samples, chosen])
        data = encode(grown)
        if len(data) > _MAX_BYTES:
            self._is_full = True
            return
        await self._bus.put(self._key, data, revision=0 if entry is None else entry.revision)
        self._known = grown

    def _as_sample(self, sample: FixedSample) -> Sample:
        return sample_of(
            sample.messages,
            f"fixed sample {sample.sample} of group {sample.group}",
            task=sample.task,
            token_count=sample.tokens,
            finish_reason=sample.ending,
            item=sample.item,
            env=self._env,
            opened=sample.opened,
        )
