"""Which silence is a hang, and what is said of it."""

import pytest

from lachesis.services.supervisor.hung import SilentProcess, why_hung
from lachesis.services.supervisor.restarts import ProcessLife


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (SilentProcess(59.0, "S", starts=False), None),
        (SilentProcess(61.0, "S", starts=False), "something in it blocked all else"),
        (SilentProcess(61.0, "R", starts=False), "something in it blocked all else"),
        (SilentProcess(61.0, "T", starts=False), "a signal had stopped its process"),
        (SilentProcess(61.0, "D", starts=False), "it waited for a disk"),
        (SilentProcess(6000.0, "t", starts=False), None),  # a debugger holds it
        (SilentProcess(6000.0, "F", starts=False), None),  # its container is paused
        (SilentProcess(100.0, "R", starts=True), None),  # it loads a model
        (SilentProcess(131.0, "R", starts=True), "services.ready_s"),
    ],
)
def test_silence_beyond_its_bound_is_a_hang(one: SilentProcess, why: str | None) -> None:
    said = why_hung(one, silent_s=60.0, ready_s=130.0)
    assert (why in said) if why is not None else not said


def test_the_life_of_a_process_says_that_it_hung() -> None:
    life = ProcessLife(-9, 80.0, ready=True, hung=why_hung(SilentProcess(61.0, "T", starts=False), 60.0, 130.0))
    assert str(life) == (
        "was killed because it hung, no heartbeat for 61 s (services.silent_s): a signal had stopped its process"
    )
