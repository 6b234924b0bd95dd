"""A run without conversations requests nothing of the server for their sake."""

from types import SimpleNamespace
from typing import Any

from lachesis.pipeline.calls.open_groups import OpenGroups
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.governor.logic import Governor
from lachesis.pipeline.retention.trimming import HistoryTrimmer
from lachesis.schemas.calls import CallKey
from lachesis.services.stage_settings import history_settings


class CountingBus:
    """Notes what is requested."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    async def server_time_ns(self) -> int:
        self.requests.append("time")
        return 0

    async def usage(self, stream: str) -> Any:
        self.requests.append(stream)
        return SimpleNamespace(bytes=0, max_bytes=1)


def trimmer(bus: CountingBus, groups: OpenGroups) -> HistoryTrimmer:
    config = RunConfig(run="demo")
    service: Any = SimpleNamespace(bus=bus, run="demo", revision="live", instance="1")
    budget = Governor(config.flow, config.batching, term="t").budget
    return HistoryTrimmer(service, history_settings(config), budget, groups)


async def test_nothing_is_requested_while_no_conversation_is_under_way():
    bus = CountingBus()
    idle = trimmer(bus, OpenGroups(lambda env, lease: True))
    await idle._trim_calls()
    assert bus.requests == []
    assert idle.metrics["flow/conversations"] == 0


async def test_one_that_is_under_way_is_given_up_in_time():
    bus, groups = CountingBus(), OpenGroups(lambda env, lease: True)
    groups.apply(1, "words", CallKey(kind="start", group="g", holder="h", life=1), 0)
    await trimmer(bus, groups)._trim_calls()
    assert bus.requests == ["time", "CALLS"]
