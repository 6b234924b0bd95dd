"""The events of `schemas/` from msgpack, and the texts that travel in headers.

What decodes must encode to an equal event, hold only finite numbers where a field is declared a float, and serve
its next reader: columns iterate, a rollout has a plan that its header gives back, samples can be made for raters.
"""

import math
from functools import partial

from fuzz.examples import EXAMPLES, floats, group
from fuzz.mutate import mutate_msgpack, mutate_text
from fuzz.oracle import Target

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.common.trainability import TrainerLimits
from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.normalizer.estimators.loader import group_advantage
from lachesis.pipeline.runtime.rollouts import read_rollout
from lachesis.pipeline.scorer.scorer import samples_of
from lachesis.pipeline.trainer.packed_batch import pack
from lachesis.pipeline.trainer.sequences import training_sequences
from lachesis.schemas.annotations import ScoreEvent, TeacherLogprobs
from lachesis.schemas.codec import Event, decode, encode
from lachesis.schemas.control import CurriculumSnapshot
from lachesis.schemas.errors import DataError
from lachesis.schemas.ids import PolicyVersion
from lachesis.schemas.ledger import GroupRef, LedgerEntry
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.rollout import RolloutGroup

__all__ = ["targets"]


def targets() -> list[Target]:
    """Return one target an event, and those of the headers."""
    by_kind: dict[type[Event], list[bytes]] = {}
    for example in EXAMPLES:
        by_kind.setdefault(type(example), []).append(encode(example))
    found = [
        Target(f"wire.{kind.__name__}", seeds, mutate_msgpack, partial(_feed, kind), weight=_weight(kind))
        for kind, seeds in by_kind.items()
    ]
    plan = Plan.of(group()).pack().encode()
    return [
        *found,
        Target("header.plan", [plan, plan[:-1] + b"lease-1"], mutate_text, _feed_plan, weight=2),
        Target("header.rollout", [plan], mutate_text, _feed_header),
        Target("text.policy_version", [b"3-first-abcdef"], mutate_text, _feed_version),
    ]


def _weight(kind: type[Event]) -> float:
    return 6.0 if kind is RolloutGroup else 1.5


def _feed(kind: type[Event], data: bytes) -> None:
    event = decode(kind, data)
    again = decode(kind, encode(event))
    assert again == event or repr(again) == repr(event), "it does not come back equal"  # NaN in free-form data
    assert encode(again) == encode(event)
    assert all(map(math.isfinite, floats(event))), "a number is not finite"
    if isinstance(event, RolloutGroup):
        _use_group(event)
    elif isinstance(event, ScoreEvent):
        for item in event.groups:
            group_advantage(item.scores, AdvantageConfig(), item.lengths)
    elif isinstance(event, TeacherLogprobs | CurriculumSnapshot):
        assert math.isfinite(float(event.values().astype("float64").sum()))
    elif isinstance(event, LedgerEntry):
        assert len(event.digest()) == 64


def _use_group(event: RolloutGroup) -> None:
    plan = Plan.of(event)
    assert Plan.unpack(plan.pack()) == plan, "the planning header does not come back"
    assert sum(len(sequence.tokens) for sequence in event.sequences) == plan.tokens
    ref = GroupRef(
        group=event.id, seq=1, env=event.env, sequences=plan.sequences, tokens=plan.tokens,
        policy_step=plan.policy_step, advantages=[1.0] * plan.samples,
    )  # fmt: skip
    try:
        sequences = training_sequences(ref, event, None, TrainerLimits(event.tokenizer_hash, reads=None))
        if sequences and len(sequences) * max(len(s.tokens) for s in sequences) < 1 << 16:
            assert bool(pack(sequences).advantages_BT.isfinite().all()), "an advantage is not finite"
        samples_of(event)
    except DataError:  # a valid group that this trainer or these raters cannot use
        return


def _feed_plan(data: bytes) -> None:
    plan = Plan.unpack(data.decode("latin-1"))
    assert Plan.unpack(plan.pack()) == plan
    assert plan.pack().encode("latin-1") == data, "two headers mean the same plan"


def _feed_header(data: bytes) -> None:
    """A good group under a bad header: only the header that fits it exactly may pass."""
    message = StoredMessage(
        "ROLLOUTS", "rl.rollout.r.sums", 1, encode(group()), 1, {PLAN_HEADER: data.decode("latin-1")}
    )
    read_rollout(message)
    assert data.decode("latin-1") == Plan.of(group()).pack()


def _feed_version(data: bytes) -> None:
    version = PolicyVersion.parse(data.decode("utf-8", "replace"))
    assert PolicyVersion.parse(str(version)) == version
