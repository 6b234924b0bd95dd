"""The planning header: the facts about a rollout that stages need without its payload.

The batcher, the normalizer and the governor read it.

It travels as one NATS header beside `traceparent`, so that a headers-only read of ROLLOUTS gives the membership of a
run: which groups exist, in which order, and what each would weigh in a batch.
"""

from typing import Self

import msgspec

from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ids import is_group_id
from lachesis.schemas.rollout import RolloutGroup, is_word

__all__ = ["PLAN_HEADER", "ROLLOUT_HEADER", "TRACEPARENT_HEADER", "Plan", "traceparent"]

PLAN_HEADER = "Lachesis-Plan"
ROLLOUT_HEADER = "Lachesis-Rollout"
"""On what is derived from one group and lies in another stream: the group's sequence in ROLLOUTS."""
TRACEPARENT_HEADER = "traceparent"
_FORM, _UNTRAINABLE, _SPANNING = "1", "2", "3"
"""The second is for groups that cannot be trained on, and otherwise as the first. The third is for groups that several
steps of the policy made: as the first, and the newest step at the end."""
_FIELDS = {_FORM: 11, _UNTRAINABLE: 11, _SPANNING: 12}
_MAX_HEADER_BYTES = 1024
_MAX_COUNT = 1 << 31
"""What a group weighs must be below this, as in its int32 columns; so that sums over groups stay numbers."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`samples` and `tokens` are a group's weight in a batch; `policy_step` is the oldest step it was made with.

    A sample may be trained on several of the `sequences`. `newest_step`: the newest step, if that is another.

    A group without the logprobs that it was sampled with is not `trainable`.
    """

    group: str
    sequences: int
    samples: int
    tokens: int
    policy_step: int
    producer: str
    epoch: int
    counter: int
    started_ns: int
    lease: str | None = None
    trainable: bool = True
    newest_step: int | None = None

    @property
    def last_step(self) -> int:
        """The newest step it was made with."""
        return self.policy_step if self.newest_step is None else self.newest_step

    @classmethod
    def of(cls, group: RolloutGroup) -> Self:
        """Return the plan of a group."""
        trainable = group.sequences.logprobs is not None
        newest_step = max(version.step for version in group.versions)
        return cls(
            group=group.id,
            sequences=len(group.sequences),
            samples=group.sequences.n_samples,
            tokens=group.sequences.n_tokens,
            policy_step=group.policy_step,
            producer=group.producer,
            epoch=group.epoch,
            counter=group.counter,
            started_ns=group.started_ns,
            lease=group.lease,
            trainable=trainable,
            newest_step=newest_step if trainable and newest_step > group.policy_step else None,
        )

    def pack(self) -> str:
        """Return the header's text: fields separated by blanks, a form number first."""
        numbers = (
            self.sequences,
            self.samples,
            self.tokens,
            self.policy_step,
            self.epoch,
            self.counter,
            self.started_ns,
        )
        form, newest = _FORM if self.trainable else _UNTRAINABLE, list[str]()
        if self.newest_step is not None:
            form, newest = _SPANNING, [str(self.newest_step)]
        return " ".join([form, self.group, *map(str, numbers), self.producer, self.lease or "-", *newest])

    @classmethod
    def unpack(cls, text: str | None) -> Self:
        """Return the plan that `pack` wrote. Raises `SchemaError`."""
        parts = (text or "")[: _MAX_HEADER_BYTES + 1].split(" ")
        if (
            text is None
            or len(text) > _MAX_HEADER_BYTES
            or len(parts) != _FIELDS.get(parts[0])
            or not is_group_id(parts[1])
        ):
            raise SchemaError(f"header {PLAN_HEADER}: {(text or '')[:80]!r} is not a plan of form {', '.join(_FIELDS)}")
        numbers = parts[2:9] + parts[11:]
        if not all(part.isascii() and part.isdecimal() and len(part) <= 19 for part in numbers):
            raise SchemaError(f"header {PLAN_HEADER}: a number is malformed in {text[:80]!r}")
        sequences, samples, tokens, policy_step, epoch, counter, started_ns, *newest = map(int, numbers)
        if not all(0 < count < _MAX_COUNT for count in (sequences, samples, tokens)):
            raise SchemaError(
                f"header {PLAN_HEADER}: no group has {sequences} sequences, {samples} samples, {tokens} tokens"
            )
        if not all(number < 1 << 63 for number in (policy_step, epoch, counter, started_ns, *newest)):
            raise SchemaError(f"header {PLAN_HEADER}: a number is malformed in {text[:80]!r}")
        if newest and newest[0] <= policy_step:
            raise SchemaError(f"header {PLAN_HEADER}: the newest step, {newest[0]}, is not after {policy_step}")
        if not (is_word(parts[9]) and (parts[10] == "-" or is_word(parts[10]))):
            raise SchemaError(f"header {PLAN_HEADER}: producer or lease is malformed in {text[:200]!r}")
        return cls(
            group=parts[1],
            sequences=sequences,
            samples=samples,
            tokens=tokens,
            policy_step=policy_step,
            epoch=epoch,
            counter=counter,
            started_ns=started_ns,
            producer=parts[9],
            lease=None if parts[10] == "-" else parts[10],
            trainable=parts[0] != _UNTRAINABLE,
            newest_step=newest[0] if newest else None,
        )


def traceparent(group: str, *, sampled: bool) -> str:
    """Return the W3C trace context of a group.

    Its id is the trace id, so any stage can name the trace of any group.

    The root span's id is the second half of the group id, all of which is random.
    """
    return f"00-{group}-{group[16:]}-{int(sampled):02x}"
