"""Plans a load for a run's configuration: what the command line leaves out is taken from it."""

import os
import re
import time

from lachesis.pipeline.config.run import RunConfig
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.rollout import RolloutGroup
from lachesis.services.run.load_costs import CostTable, read_costs
from lachesis.services.run.load_messages import GroupShape, make_group, measure_messages
from lachesis.services.run.load_plan import Load, LoadPlan, plan_load

__all__ = ["measure_loop", "parse_retention", "parse_shape", "plan_configured_load"]

_SHAPE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,7})")
_TIME = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_MAX_GROUP_TOKENS = 1 << 23
"""Tokens of a planned group, which is made to be measured; some 64 MB."""
_DEFAULT_SHAPE = (8, 1024)
"""Of a run that names no environment."""
_LOOP_SHAPE = GroupShape(samples=8, tokens=1024)
_LOOP_ROUNDS, _LOOP_GROUPS = 20, 20


def plan_configured_load(
    config: RunConfig,
    groups_per_s: float,
    *,
    tokens: str | None = None,
    raters: int | None = None,
    teacher_top_k: int | None = None,
    retention: str | None = None,
    replicas: int | None = None,
    cores: int | None = None,
    machine_factor: float | None = None,
) -> LoadPlan:
    """Return the plan of a load. Raises `ConfigError` where what is given cannot be planned."""
    samples, length = _largest(config) if tokens is None else parse_shape(tokens)
    if samples * length > _MAX_GROUP_TOKENS:
        raise ConfigError(
            f"--tokens: a group of {samples}x{length} has more than {_MAX_GROUP_TOKENS:,} tokens, the most of a plan"
        )
    if replicas not in {None, 1, 3, 5}:
        raise ConfigError(f"--replicas is {replicas}: use 1, 3 or 5")
    if teacher_top_k is None and config.teacher.enabled:
        teacher_top_k = config.teacher.top_k
    shape = GroupShape(
        samples=samples, tokens=length, raters=len(config.scoring.raters) if raters is None else raters,
        teacher_top_k=teacher_top_k, batch_groups=max(1, config.batching.batch_size // samples),
    )  # fmt: skip
    costs = read_costs()
    load = Load(
        groups_per_s=groups_per_s, shape=shape, budgets=config.streams.budgets(),
        kept_share=config.flow.retention.trim_to or config.flow.retention.trim_at,
        retention_s=None if retention is None else parse_retention(retention),
        replicas=replicas or config.streams.replicas, cores=cores or os.cpu_count() or 1,
        pace=_pace(costs) if machine_factor is None else machine_factor, has_health=config.health.enabled,
    )  # fmt: skip
    environments = max(1, len(config.environments))
    return plan_load(load, measure_messages(shape, config, groups_per_s / environments), costs)


def parse_shape(text: str) -> tuple[int, int]:
    """Return samples and tokens of `8x1024`. Raises `ConfigError`."""
    found = _SHAPE.fullmatch(text)
    if found is None:
        raise ConfigError(f"--tokens is {text[:40]!r}: give samples of a group and tokens of each, such as 8x1024")
    return int(found[1]), int(found[2])


def parse_retention(text: str) -> float:
    """Return the seconds of `3600`, `30m`, `24h` or `7d`. Raises `ConfigError`."""
    found = _TIME.fullmatch(text)
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not seconds:
        raise ConfigError(f"--retention is {text[:40]!r}: give seconds, or a time such as 30m, 24h or 7d")
    return seconds


def measure_loop() -> float:
    """Return how fast this machine is at the pipeline's work: one loop's processor time, milliseconds.

    The loop encodes and decodes a group of 8x1024 tokens. The time is the least of several rounds, so that other
    processes of the machine change it little; measuring takes about a second.
    """
    group, least_s = make_group(_LOOP_SHAPE), float("inf")
    for _ in range(_LOOP_ROUNDS):
        start_s = time.process_time()
        for _ in range(_LOOP_GROUPS):
            decode(RolloutGroup, encode(group))
        least_s = min(least_s, time.process_time() - start_s)
    return 1e3 * least_s / _LOOP_GROUPS


def _largest(config: RunConfig) -> tuple[int, int]:
    """Return samples and tokens of the environment with the largest groups."""
    shapes = [(one.samples, one.longest_tokens) for one in config.environments.values()]
    return max(shapes, key=lambda shape: shape[0] * shape[1], default=_DEFAULT_SHAPE)


def _pace(costs: CostTable) -> float:
    """Return this machine's processor time by that of the machine of the measurements; 1 where that is not known."""
    return 1.0 if costs.loop_ms is None else measure_loop() / costs.loop_ms
