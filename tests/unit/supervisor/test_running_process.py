import pytest

from lachesis.services.supervisor import running_process as module


def test_the_kernel_is_asked_for_thestate_of_silent_processes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(module, "process_state", lambda pid: asked.append(pid) or "T")
    assert module.state_of(7, 1.0) == "R"
    assert not asked
    assert module.state_of(7, 2.0) == "T"
    assert asked == [7]
