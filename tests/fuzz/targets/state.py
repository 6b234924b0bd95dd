"""What stateful stages read back: snapshots and deltas of the normalizer and the curriculum, the batcher's last entry.

A state that was taken over must work: feed it, step it, save it, and load what it saved.
"""

import msgspec
import numpy as np
from fuzz.examples import group
from fuzz.mutate import mutate_msgpack
from fuzz.oracle import Target

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.batcher.join import Joiner
from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.known_strategies import STRATEGIES
from lachesis.pipeline.curriculum.logic.registry import load_strategy
from lachesis.pipeline.curriculum.logic.strategy import ItemFeedback, ItemPool, Strategy
from lachesis.pipeline.errors import LedgerError
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.normalizer.logic.normalizer import EnvNormalizer
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.schemas.ledger import GENESIS, LedgerEntry
from lachesis.schemas.planning_header import Plan

__all__ = ["targets"]

_REFUSALS = (DataError, LedgerError, ConfigError)
_ITEMS = ItemPool(8, difficulty=np.arange(8.0), skill=np.arange(8, dtype=np.int32) % 2, skills=("a", "b"))


def targets() -> list[Target]:
    """Return the targets, one a strategy of the curriculum."""
    normalizer, delta = _normalizer()
    found = [
        Target(
            "state.normalizer",
            [msgspec.msgpack.encode(normalizer.state_dict())],
            mutate_msgpack,
            _feed_normalizer,
            _REFUSALS,
            weight=2,
        ),
        Target("state.normalizer_delta", [msgspec.msgpack.encode(delta)], mutate_msgpack, _feed_delta, _REFUSALS),
        Target("state.batcher", [encode(_entry())], mutate_msgpack, _feed_entry, _REFUSALS, weight=2),
    ]
    for name in STRATEGIES:
        strategy = _taught(_strategy(name))
        found.append(
            Target(
                f"state.curriculum.{name}",
                [msgspec.msgpack.encode(strategy.state_dict())],
                mutate_msgpack,
                lambda data, name=name: _feed_strategy(name, data),
                _REFUSALS,
            )
        )
    return found


def _normalizer() -> tuple[EnvNormalizer, dict[str, object]]:
    normalizer = EnvNormalizer("sums", NormalizationConfig(window=4, warmup_samples=2, warmup_groups=1))
    delta = None
    for seq in range(1, 14):
        normalizer.member(seq, f"{seq:032x}")
        normalizer.resolve(f"{seq:032x}", seq, {"score": [0.0, float(seq)]}, source=seq)
        delta = normalizer.step().delta or delta
    assert delta is not None
    return normalizer, delta


def _use(normalizer: EnvNormalizer) -> None:
    start = normalizer.watermark
    assert start >= 1
    for seq in range(start, start + 9):
        normalizer.member(seq, f"{seq:032x}")
        normalizer.resolve(f"{seq:032x}", seq, {"score": [0.0, 1.0]}, source=seq)
    for ready in normalizer.step().ready:
        values = ready.snapshot.normalize("score", ready.values["score"])
        assert all(value is not None and abs(value) < 1e12 for value in values)
    normalizer.metrics()
    again = EnvNormalizer("sums", normalizer.config)
    again.load_state_dict(msgspec.msgpack.decode(msgspec.msgpack.encode(normalizer.state_dict())))
    assert again.state_dict() == normalizer.state_dict()


def _feed_normalizer(data: bytes) -> None:
    normalizer = EnvNormalizer("sums", NormalizationConfig(window=4, warmup_samples=2, warmup_groups=1))
    normalizer.load_state_dict(_unpacked(data))
    _use(normalizer)


def _feed_delta(data: bytes) -> None:
    normalizer = EnvNormalizer("sums", NormalizationConfig(window=4, warmup_samples=2, warmup_groups=1))
    normalizer.apply(_unpacked(data))
    _use(normalizer)


def _strategy(name: str) -> Strategy:
    return load_strategy(_ITEMS, CurriculumConfig(strategy=name))


def _taught(strategy: Strategy) -> Strategy:
    for number in range(12):
        strategy.observe(
            ItemFeedback(
                id=f"g{number}",
                env="sums",
                item=number % 8,
                skill="a",
                n=4,
                success=number % 3 / 2,
                policy_step=number,
            )
        )
    return strategy


def _feed_strategy(name: str, data: bytes) -> None:
    strategy = _strategy(name)
    strategy.load_state_dict(_unpacked(data))
    _taught(strategy)
    weights = strategy.snapshot().weights
    assert bool(np.isfinite(weights).all()), "a weight is not finite"
    assert float(weights.sum()) > 0
    strategy.metrics()
    assert len(strategy.sample(3, np.random.default_rng(0))) == 3
    msgspec.msgpack.encode(strategy.state_dict())


def _unpacked(data: bytes) -> object:
    try:
        return msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise LedgerError(str(error)) from error


def _entry() -> LedgerEntry:
    return LedgerEntry(
        run="r", trainer="main", index=0, previous=GENESIS, watermark=3, resolved=b"\x05", events_cursor=2,
        next_batch=1, totals={"batched": 1},
    )  # fmt: skip


def _feed_entry(data: bytes) -> None:
    """A batcher that starts from the entry takes a rollout in and describes itself again."""
    joiner = Joiner(BatchingConfig(), decode(LedgerEntry, data))
    joiner.drop_stale(0)
    joiner.member(joiner.frontier + 1, "sums", Plan.of(group()), 1, 1)
    state = joiner.state()
    assert state.watermark <= joiner.frontier
