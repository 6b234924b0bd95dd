"""Plain hooks that hold the event loop leave room for what waits, and are named."""

from collections.abc import Iterator
from types import SimpleNamespace

import anyio
import anyio.lowlevel
import pytest

from lachesis.pipeline.environment import plain_hooks
from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.environment.fake_inference import FakeInference
from lachesis.pipeline.environment.plain_hooks import HookTimes
from lachesis.pipeline.environment.rollout import collect_group
from lachesis.pipeline.environment.session import Session
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.tasks.task import Task


class Clock:
    """A clock that moves only where a test says so, or by a sleep."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        await anyio.lowlevel.checkpoint()


class Slow(Environment):
    """Its reward takes `took_s`."""

    def __init__(self, clock: Clock, took_s: float) -> None:
        self.clock, self.took_s = clock, took_s
        self.order: list[str] = []

    def __len__(self) -> int:
        return 1

    def task(self, index: int) -> Task:
        return Task(item="0", prompt="q")

    def reward(self, task: Task, session: Session) -> float:
        self.clock.now_s += self.took_s
        self.order.append("reward")
        return 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    vanilla = {"sleep": clock.sleep, "move_on_after": anyio.move_on_after, "sleep_forever": anyio.sleep_forever}
    monkeypatch.setattr(plain_hooks, "anyio", SimpleNamespace(**vanilla))
    return clock


async def _played(clock: Clock, took_s: float, hooks: HookTimes) -> list[str]:
    env = Slow(clock, took_s)

    async def one() -> None:
        await hooks.call(env.reward, None, None)

    async def other() -> None:
        env.order.append("other")

    async with anyio.create_task_group() as tasks:
        for work in (one, one, other):
            tasks.start_soon(work)
    return env.order


async def test_other_tasks_come_between_two_slow_hooks_and_not_between_quick_ones(clock: Clock) -> None:
    assert await _played(clock, 2.0, HookTimes(clock)) == ["reward", "other", "reward"]
    assert await _played(clock, 0.01, HookTimes(clock)) == ["reward", "reward", "other"]


async def test_a_slow_hook_is_named_for_a_minute(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    hooks = HookTimes(clock)
    await _played(clock, 0.9, hooks)
    assert hooks.describe() is None
    await _played(clock, 2.0, hooks)
    assert hooks.describe() == "Slow.reward takes up to 2.0 s, in which nothing else of its process runs"
    assert caplog.text.count("Slow.reward held the event loop for 2.0 s") == 1
    clock.now_s += 61.0
    assert hooks.describe() is None


async def test_a_hook_that_raises_or_ends_the_process_is_timed_and_raises_the_same(clock: Clock) -> None:
    hooks = HookTimes(clock)

    def fails() -> None:
        clock.now_s += 3.0
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        await hooks.call(fails)
    assert hooks.describe() == "function.fails takes up to 3.0 s, in which nothing else of its process runs"


async def test_rewards_of_a_group_are_called_so(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_hooks.HOOKS, "_clock", clock)
    env = Slow(clock, 1.5)
    draft = await collect_group(env, env.task(0), FakeInference(lambda prompt, call: "a"), 2, SamplingParams())
    assert draft.rewards == [{"environment": 1.0}] * 2
    assert plain_hooks.HOOKS.describe() is not None


async def test_time_in_which_the_loop_is_held_counts_for_no_limit(clock: Clock) -> None:
    hooks = HookTimes(clock)

    def slow() -> None:
        clock.now_s += 700.0

    with hooks.move_on_after(600.0) as scope:
        before_s = scope.deadline
        await hooks.call(slow)
        assert scope.deadline == before_s + 700.0
    await hooks.call(slow)
    assert scope.deadline == before_s + 700.0, "it has ended"
    assert hooks.held_s == 1400.0


async def test_a_limit_that_is_over_raises_and_a_time_out_of_the_body_stays_its_own() -> None:
    hooks = HookTimes()
    with pytest.raises(TimeoutError), hooks.fail_after(0.0):
        await anyio.sleep_forever()
    with pytest.raises(TimeoutError, match="its own"), hooks.fail_after(60.0):
        raise TimeoutError("its own")
    with hooks.fail_after(60.0):
        await anyio.lowlevel.checkpoint()


async def test_what_holds_the_loop_is_known_while_it_does(clock: Clock) -> None:
    hooks = HookTimes(clock)
    seen = []

    def outer() -> None:
        with hooks.timed("Inner.task"):
            seen.append(hooks.held)
        seen.append(hooks.held)

    await hooks.call(outer)
    assert [one.name for one in seen if one is not None] == ["Inner.task", "function.outer"]
    assert hooks.held is None
