import pytest

from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.services.process import DRAIN_TIMEOUT, DRAINED
from lachesis.services.supervisor import Supervisor


async def test_who_was_drained_begins_anew_and_is_no_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor(RunConfig(run="r", environments={"words": EnvironmentConfig(kind="gateway")}), [])
    supervisor.stop()  # so that no pause is waited for
    (row, *_), codes, lives = supervisor.running, [1, DRAINED, -9, DRAIN_TIMEOUT, 1], list[tuple[int, bool]]()

    async def run_once(_: object, *, anew: bool) -> int:
        lives.append((codes.pop(0), anew))
        row.stopping = not codes
        return lives[-1][0]

    monkeypatch.setattr(supervisor, "_run_once", run_once)
    await supervisor._keep_running(row)
    assert lives == [(1, False), (DRAINED, False), (-9, True), (DRAIN_TIMEOUT, False), (1, True)]
