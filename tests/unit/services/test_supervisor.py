import pytest

from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.services.process import DRAIN_TIMEOUT, DRAINED
from lachesis.services.supervisor import Supervisor


async def test_after_a_drain_no_spare_of_before_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor(RunConfig(run="r", environments={"words": EnvironmentConfig(kind="gateway")}), [])
    supervisor.stop()  # so that no pause is waited for
    (row, *_), codes, happened = supervisor.running, [1, DRAINED, -9, DRAIN_TIMEOUT, 1], list[int | str]()

    async def run_once(_: object) -> int:
        happened.append(codes.pop(0))
        row.stopping = not codes
        return int(happened[-1])

    monkeypatch.setattr(supervisor, "_run_once", run_once)
    monkeypatch.setattr(supervisor._spares, "renew", lambda: happened.append("renewed"))
    await supervisor._keep_running(row)
    assert happened == [1, DRAINED, "renewed", -9, DRAIN_TIMEOUT, "renewed", 1]
