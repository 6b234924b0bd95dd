"""How long processes may take to become ready, and what those that are not have been doing. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from lachesis.pipeline.config.run import RunConfig
from lachesis.schemas.control import StageVitals

__all__ = ["LateProcess", "describe_late", "ready_within_s"]

_MAX_LINE = 300


class LateProcess(NamedTuple):
    """A process that is not ready. `stage`: its newest heartbeat in this life; `log_line`: the last of its log."""

    name: str
    runs: bool
    stage: StageVitals | None
    log_line: str


def ready_within_s(config: RunConfig, services: Sequence[str]) -> float:
    """Return how long services that start together may take to become ready, seconds.

    Those of a supervisor that was killed may still be draining, and hold what these need.
    """
    return config.services.ready_s + _drain_s(config, services)


def _drain_s(config: RunConfig, services: Sequence[str]) -> float:
    return max(config.drain_s(service) for service in services)


def describe_late(config: RunConfig, services: Sequence[str], late: Sequence[LateProcess]) -> str:
    """Return what is said when some of the `services` that started together are not ready in time."""
    within_s, drain_s, ready_s = ready_within_s(config, services), _drain_s(config, services), config.services.ready_s
    title = f"not ready after {within_s:g} s (services.ready_s = {ready_s:g}, {drain_s:g} for a predecessor to drain):"
    mend = f"if they only need longer, raise services.ready_s; else see {config.path / 'logs'}"
    return "\n".join([title, *(f"  {one.name}: {_doing(one)}" for one in late), mend])


def _doing(process: LateProcess) -> str:
    if not process.runs:
        doing = "is being started"
    elif process.stage is None:
        doing = "runs and has not reached the server"
    else:
        doing = f"{process.stage.state}: {process.stage.note or 'it does not say at what'}"
    return doing + (f"; its log ends: {process.log_line[:_MAX_LINE]}" if process.log_line else "; its log is empty")
