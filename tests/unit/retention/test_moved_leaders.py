"""A recovery changes nothing where another copy of a stream leads than the one that it was planned with."""

from types import SimpleNamespace

import pytest

from lachesis.pipeline.bus.api import StreamUsage
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.ledger.rollbacks import RECOVERY_FILE
from lachesis.pipeline.retention.recovery import apply_plan
from lachesis.pipeline.retention.recovery_record import RecoveryPlan
from lachesis.schemas.subjects import BUCKET, EVENTS, ROLLOUTS, stream_name
from lachesis.services.stage_settings import recovery_settings


def usage(last: int, last_ns: int) -> StreamUsage:
    return StreamUsage(first=1, last=last, messages=last, bytes=9, max_bytes=99, last_ns=last_ns)


class BusOfACluster:
    """Answers with what the leaders have, and counts what would change the streams."""

    def __init__(self, last: int, last_ns: int, *, planned: tuple[int, int] | None = None) -> None:
        """`planned`: the end and its time until the first copies are made again; None: from the beginning."""
        self.usages = [usage(*planned)] if planned is not None else []
        self.usages.append(usage(last, last_ns))
        self.renewed: list[str] = []

    async def describe_streams(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(name=stream_name("r", kind), usage=self.usages[0], replicas=3)
            for kind in (ROLLOUTS, EVENTS, BUCKET)
        ]

    async def servers_of(self, stream: str) -> list[str]:
        return ["the only one"]

    async def renew_copies(self, stream: str, copies: int) -> None:
        assert copies == 3
        self.renewed.append(stream)
        del self.usages[:-1]


@pytest.mark.parametrize(("last", "last_ns"), [(7, 100), (9, 100), (8, 101), (8, 99)])
async def test_a_leader_of_another_end_or_of_other_content_ends_the_recovery(tmp_path, last, last_ns):
    config = RunConfig(run="r", folder=str(tmp_path), environments={"sums": EnvironmentConfig(kind="x")})
    ends = {ROLLOUTS: 8, BUCKET: 3}
    plan = RecoveryPlan(run="r", id="1", problems=["p"], losses=[], ends=ends, ended_ns={ROLLOUTS: 100, BUCKET: 1})
    for bus, renewed, but in (
        (BusOfACluster(last, last_ns), [], "changed"),
        (BusOfACluster(last, last_ns, planned=(8, 100)), [ROLLOUTS], "changed but that all copies of ROLLOUTS are"),
    ):
        told = rf"another copy of ROLLOUTS led .* they end at sequence {last} now\. Nothing was {but}.*Repeat"
        with pytest.raises(StartupError, match=told):
            await apply_plan(bus, recovery_settings(config), plan)
        assert bus.renewed == renewed, "copies that may be whole are not deleted"
        assert not (tmp_path / RECOVERY_FILE).exists(), "it would be taken up again"


async def test_the_leader_of_the_plan_is_gone_on_with(tmp_path):
    config = RunConfig(run="r", folder=str(tmp_path), environments={"sums": EnvironmentConfig(kind="x")})
    plan = RecoveryPlan(run="r", id="1", problems=["p"], losses=[], ends={ROLLOUTS: 8}, ended_ns={ROLLOUTS: 100})
    with pytest.raises(AttributeError):  # what comes next: this bus has no keys
        await apply_plan(BusOfACluster(8, 100), recovery_settings(config), plan)
    assert b'"has_new_copies": true' in (tmp_path / RECOVERY_FILE).read_bytes()
