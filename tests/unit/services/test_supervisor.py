from pathlib import Path

import pytest

from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.schemas.errors import FencedError, SettingsChangedError, StartupError
from lachesis.services.process import DRAIN_TIMEOUT, DRAINED, FENCED, SETTINGS_CHANGED, STARTUP, _explain
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


async def test_settings_that_do_not_go_with_what_is_stored_end_the_run_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = RunConfig(run="r", folder=str(tmp_path), environments={"words": EnvironmentConfig(kind="gateway")})
    supervisor = Supervisor(config, [])
    (row, *_), lives = supervisor.running, list[int]()
    supervisor.logs.mkdir()
    log = supervisor.logs / f"{row.planned.name}.log"

    async def run_once(_: object, *, anew: bool) -> int:
        lives.append(SETTINGS_CHANGED)
        row.up = True  # it was up before the settings were changed
        log.write_text("2026 ERROR normalization.window is 8 now\n")
        return SETTINGS_CHANGED

    monkeypatch.setattr(supervisor, "_run_once", run_once)
    with pytest.raises(StartupError, match=r"cannot go on:\n2026 ERROR normalization\.window is 8 now"):
        await supervisor._keep_running(row)
    assert lives == [SETTINGS_CHANGED]


def test_a_changed_setting_has_an_exit_code_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    changed = SettingsChangedError("curriculum.strategy is 'pools' now")
    assert _explain(BaseExceptionGroup("", [changed, SettingsChangedError("the same of another")])) == SETTINGS_CHANGED
    assert caplog.messages == ["curriculum.strategy is 'pools' now", "the same of another"]
    assert _explain(BaseExceptionGroup("", [changed, StartupError("no server")])) == STARTUP
    assert _explain(FencedError("another")) == FENCED
