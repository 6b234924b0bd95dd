"""The runner: every failure of a rater costs its own ratings and no other's."""

import sys
import threading
import time

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from lachesis import RaterUnavailable
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.scorer import circuit_breaker
from lachesis.pipeline.scorer.circuit_breaker import MAX_LONE_FAILURES, HungCalls
from lachesis.pipeline.scorer.config import RaterConfig
from lachesis.pipeline.scorer.loader import EnsembleRater
from lachesis.pipeline.scorer.rater import FunctionRater, Sample
from lachesis.pipeline.scorer.runner import EnsembleRunner

SAMPLES = [Sample(prompt="p", completion=str(i), item=str(i)) for i in range(4)]


def member(function, name="r", group=False, inline=False, **config):
    made = FunctionRater(function, bounds=(0.0, 10.0), group=group, inline=inline)
    config = {"timeout_s": 2.0, "backoff_s": 0.001, **config}
    return EnsembleRater(name, made, (0.0, 10.0), RaterConfig(rater="m:r", **config))


async def run(*members, samples=SAMPLES):
    return await EnsembleRunner(members).rate_group(samples)


def number(sample):
    return float(sample.completion)


def coroutine(sample):
    return number_async(sample)


async def number_async(sample):
    await anyio.lowlevel.checkpoint()
    return float(sample.completion)


async def test_a_wait_for_a_rater_that_is_away_is_reported_before_each_further_call():
    errors = [RaterUnavailable("down"), RaterUnavailable("still down")]
    waits = []

    def flaky(_):
        if errors:
            raise errors.pop(0)
        return 1.0

    results = await EnsembleRunner([member(flaky)], waits.append).rate_group(SAMPLES[:1])
    assert [rating.value for rating in results["r"]] == [1.0]
    assert [(wait.what, str(wait.error), wait.failures) for wait in waits] == [
        ("rater r", "RaterUnavailable: down", 1), ("rater r", "RaterUnavailable: still down", 2),
    ]  # fmt: skip


async def test_a_wait_for_a_rater_is_logged_where_nobody_is_told(caplog):
    errors = [RaterUnavailable("down")]

    def flaky(_):
        if errors:
            raise errors.pop(0)
        return 1.0

    await EnsembleRunner([member(flaky)]).rate_group(SAMPLES[:1])
    (message,) = caplog.messages
    assert message.startswith("trying again: rater r: RaterUnavailable: down (tried since ")


@pytest.fixture
def gate():
    """Released at the end of the test, so that an abandoned thread does not outlive it."""
    event = threading.Event()
    yield event
    event.set()


async def test_sync_async_inline_and_group_raters_agree():
    members = [
        member(number, "thread"),
        member(number, "inline", inline=True),
        member(number_async, "async"),
        member(coroutine, "coroutine from a thread"),
        member(lambda samples: [number(s) for s in samples], "group", group=True),
    ]
    results = await run(*members)
    assert {name: [r.value for r in column] for name, column in results.items()} == {
        m.name: [0.0, 1.0, 2.0, 3.0] for m in members
    }


@pytest.mark.parametrize(
    "error", [ValueError("bad"), RuntimeError("x"), SystemExit(3), FileNotFoundError("x"), StopIteration()]
)
async def test_a_rater_that_raises_on_one_sample_costs_that_rating_alone(error):
    calls = []

    def fails(sample):
        calls.append(sample)
        if sample.item == "2":
            raise error
        return 1.0

    results = await run(member(fails), member(number, "other"))
    assert [r.status for r in results["r"]] == ["ok", "ok", "error", "ok"]
    assert results["r"][2].value is None
    assert [r.status for r in results["other"]] == ["ok"] * 4
    assert len(calls) == 4, "only infrastructure failures are retried"


async def test_infrastructure_failures_are_retried_and_then_missing():
    attempts = {s.item: 0 for s in SAMPLES}

    async def flaky(sample):
        attempts[sample.item] += 1
        if attempts[sample.item] <= int(sample.item):
            raise InfrastructureError("judge is down")
        return 1.0

    results = await run(member(flaky, retries=2))
    assert [r.status for r in results["r"]] == ["ok", "ok", "ok", "unavailable"]
    assert "judge is down" in results["r"][3].detail
    assert "3 attempts" in results["r"][3].detail
    assert list(attempts.values()) == [1, 2, 3, 3]


async def test_a_hanging_sync_rater_times_out_alone(gate):
    def hangs(sample):
        if sample.item == "1":
            gate.wait(30)
        return 1.0

    results = await run(member(hangs, timeout_s=1.0), member(number, "other"))
    assert [r.status for r in results["r"]] == ["ok", "timeout", "ok", "ok"]
    assert [r.status for r in results["other"]] == ["ok"] * 4


async def test_a_hanging_async_rater_times_out():
    async def hangs(sample):
        await anyio.sleep_forever()

    results = await run(member(hangs, timeout_s=0.05, concurrency=2))
    assert [r.status for r in results["r"]] == ["timeout"] * 4
    assert results["r"][0].value is None


async def test_calls_that_take_far_longer_than_others_are_named_long_before_they_are_given_up():
    hangs, called = anyio.Event(), anyio.Event()

    async def slow_at_times(sample):
        if sample.item == "late":
            called.set()
            await hangs.wait()
        return 1.0

    runner = EnsembleRunner([member(slow_at_times, timeout_s=600.0)])
    for _ in range(3):
        await runner.rate_group(SAMPLES)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.rate_group, [Sample(prompt="p", completion="1", item="late")])
        await called.wait()
        now_s = anyio.current_time()
        for second in range(7):
            assert runner.find_late(now_s + second) == {}
        assert runner.find_late(now_s + 50) == {}, "this process was held up, and did not hear whether it answered"
        (found,) = runner.find_late(now_s + 52).values()
        assert "1 of 1 calls under way hangs, the longest for 8 s" in found.text
        assert "given up after timeout_s, 600 s" in found.text
        assert found.are_all
        hangs.set()
    assert runner.find_late(anyio.current_time() + 100) == {}


async def test_calls_that_no_rater_answers_say_nothing_of_how_long_answers_take():
    hangs, called, away = anyio.Event(), anyio.Event(), True

    async def away_at_first(sample):
        if away:
            raise RaterUnavailable
        called.set()
        await hangs.wait()
        return 1.0

    runner = EnsembleRunner([member(away_at_first, timeout_s=600.0, retries=0, breaker_failures=1000)])
    for _ in range(8):
        await runner.rate_group(SAMPLES)
    away = False
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.rate_group, SAMPLES)
        await called.wait()
        assert runner.find_late(anyio.current_time() + 50) == {}
        hangs.set()


async def test_abandoned_threads_are_bounded_and_the_rater_recovers(gate):
    started = []

    def hangs(sample):
        started.append(sample)
        gate.wait(30)
        return 1.0

    runner = EnsembleRunner([member(hangs, timeout_s=0.1, concurrency=2)])
    for _ in range(3):
        results = await runner.rate_group(SAMPLES)
        assert [r.status for r in results["r"]] == ["timeout"] * 4
    assert 2 <= len(started) <= 3, "one more where a slot is free before the other call's time is up"
    assert "still running" in results["r"][0].detail
    gate.set()
    with anyio.fail_after(10):
        while {r.status for r in (await runner.rate_group(SAMPLES))["r"]} != {"ok"}:
            pass


def test_calls_that_never_end_do_not_keep_a_rater_away_once_a_trial_is_answered():
    calls, now_s, trials = HungCalls(2), 0.0, []
    for call in "ab":
        assert calls.admits(now_s)
        calls.gave_up(call, now_s)
    while now_s < 1000:
        now_s += 1
        if calls.admits(now_s):
            trials.append(now_s)
            calls.gave_up(now_s, now_s)
    assert trials == [5, 15, 35, 75, 155, 315, 615, 915]
    calls.answered()
    assert len(calls) == 0
    assert all(calls.admits(now_s) for _ in range(9))
    calls.ended("a")
    assert len(calls) == 0


async def test_a_rater_whose_calls_hang_for_good_is_asked_again(monkeypatch, gate):
    monkeypatch.setattr(circuit_breaker, "_FIRST_TRIAL_S", 0.1)
    hangs = True

    def rate(sample):
        if hangs:
            gate.wait(30)
        return 1.0

    runner = EnsembleRunner([member(rate, timeout_s=0.1, concurrency=2)])
    for _ in range(2):
        assert {r.status for r in (await runner.rate_group(SAMPLES))["r"]} == {"timeout"}
    hangs = False
    with anyio.fail_after(30):
        while {r.status for r in (await runner.rate_group(SAMPLES))["r"]} != {"ok"}:
            pass
    assert not gate.is_set(), "the earlier calls have not ended"


async def test_an_outage_that_outlasts_the_time_limit_is_one_and_named():
    async def down(sample):
        raise InfrastructureError("503")

    results = await run(member(down, timeout_s=0.05, retries=50, backoff_s=0.01))
    assert results["r"][0].status == "unavailable"
    assert "503" in results["r"][0].detail


async def test_concurrency_is_limited_and_waiting_is_not_part_of_the_time_limit():
    running = most = 0

    async def counted(sample):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await anyio.sleep(0.25)
        running -= 1
        return 1.0

    samples = [Sample(prompt="", completion="") for _ in range(12)]
    results = await run(member(counted, concurrency=2, timeout_s=1.0), samples=samples)
    assert most == 2
    assert {r.status for r in results["r"]} == {"ok"}


@pytest.mark.parametrize(
    ("answer", "says"),
    [([1.0, 2.0], "2 ratings for 4"), ([1.0] * 5, "5 ratings for 4"), (1.0, "for a group of 4"),
     ("1234", "for a group"), (None, "for a group"), (iter([1.0] * 4), "for a group"), (np.array(0.5), "unsized"),
     ({1.0, 2.0, 3.0, 4.0}, "for a group"), (dict.fromkeys("1234", 1.0), "for a group")],
)  # fmt: skip
@pytest.mark.parametrize("inline", [False, True])
async def test_a_group_rater_that_answers_the_wrong_shape_rates_nothing(answer, says, inline):
    results = await run(member(lambda _: answer, group=True, inline=inline))
    assert {r.status for r in results["r"]} == {"error"}
    assert all(says in r.detail for r in results["r"])


async def test_a_group_rater_may_miss_single_samples():
    results = await run(member(lambda _: [1.0, None, float("nan"), 99.0], group=True))
    assert [r.status for r in results["r"]] == ["ok", "abstain", "nonfinite", "error"]


async def test_cancelling_from_outside_stops_the_group(gate):
    runner = EnsembleRunner([member(lambda _: gate.wait(30), timeout_s=60.0)])
    start = time.monotonic()
    with anyio.move_on_after(0.1) as scope:
        await runner.rate_group(SAMPLES)
    assert scope.cancelled_caught
    assert time.monotonic() - start < 10


async def test_an_empty_group():
    assert await run(member(number), samples=[]) == {"r": []}


@pytest.mark.outside
def test_importing_the_runner_loads_no_optional_package():
    import subprocess

    code = (
        "import sys, lachesis.pipeline.scorer.runner;"
        "print([name for name in ('torch', 'reasoning_gym') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_an_inline_rater_that_fails_is_treated_as_any_other():
    asked = []

    def flaky(sample):
        asked.append(sample.item)
        if sample.item == "1":
            raise ValueError("bad")
        if sample.item == "2" and asked.count("2") == 1:
            raise InfrastructureError("down for a moment")
        return None if sample.item == "3" else 1.0

    results = await run(member(flaky, inline=True), member(lambda _: "text", "text", inline=True))
    assert [(r.value, r.status) for r in results["r"]] == [(1.0, "ok"), (None, "error"), (1.0, "ok"), (None, "abstain")]
    assert asked == ["0", "1", "2", "2", "3"]
    assert {r.status for r in results["text"]} == {"error"}


async def test_an_inline_rater_that_is_down_is_left_alone():
    asked = []

    def down(sample):
        asked.append(sample)
        raise InfrastructureError("down")

    results = await run(member(down, inline=True, retries=0, breaker_failures=2))
    assert [r.status for r in results["r"]] == ["unavailable"] * 4
    assert results["r"][3].detail.startswith(
        "not called: its last calls all failed, the newest with InfrastructureError: down; away since "
    )
    assert len(asked) == 4  # two samples, each at once and then patiently


async def test_an_inline_function_that_returns_an_awaitable_is_awaited():
    results = await run(member(coroutine, inline=True))
    assert [r.value for r in results["r"]] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("error", [TimeoutError("read"), ConnectionRefusedError("no"), RaterUnavailable("quota")])
async def test_a_rater_whose_judge_is_away_is_unavailable(error, inline):
    calls = []

    def fails(sample):
        calls.append(sample.item)
        raise error

    (sample,) = SAMPLES[:1]
    results = await run(member(fails, inline=inline, retries=2), samples=[sample])
    assert results["r"][0].status == "unavailable"
    assert f"{type(error).__name__}: {error}" in results["r"][0].detail
    assert len(calls) == 3 + inline


async def test_one_sample_that_the_judge_cannot_take_is_not_an_outage():
    """Else it would be tried for ever, and hold up everything behind it."""

    async def judge(sample):
        await anyio.lowlevel.checkpoint()
        if sample.item == "2":
            raise ConnectionResetError("the judge breaks off")
        return 1.0

    runner = EnsembleRunner([member(judge, retries=0, breaker_failures=10_000)])
    seen = [(await runner.rate_group(SAMPLES))["r"][2].status for _ in range(MAX_LONE_FAILURES + 1)]
    assert seen == ["unavailable"] * MAX_LONE_FAILURES + ["error"]


@pytest.mark.parametrize("answers", [0, 1])
async def test_while_the_judge_fails_more_than_it_answers_nothing_is_given_up(answers):
    async def judge(sample):
        await anyio.lowlevel.checkpoint()
        if int(sample.item) >= answers:
            raise ConnectionResetError("busy")
        return 1.0

    runner = EnsembleRunner([member(judge, retries=0, breaker_failures=10_000)])
    for _ in range(3 * MAX_LONE_FAILURES):
        assert (await runner.rate_group(SAMPLES))["r"][3].status == "unavailable"


async def test_what_the_rater_says_itself_is_always_believed():
    def judge(sample):
        if sample.item == "2":
            raise RaterUnavailable("the second one is out for repair")
        return 1.0

    runner = EnsembleRunner([member(judge, retries=0, breaker_failures=10_000)])
    for _ in range(2 * MAX_LONE_FAILURES):
        assert (await runner.rate_group(SAMPLES))["r"][2].status == "unavailable"


@pytest.mark.parametrize("times", [2, 10_000], ids=["for a moment", "for long"])
async def test_a_machine_without_threads_is_an_outage_and_rates_nothing(monkeypatch, times):
    """The group waits, as for a judge that is away; it is not closed as one that cannot be scored."""
    from anyio._backends._asyncio import WorkerThread

    failures = []
    start = WorkerThread.start

    def refused(thread):
        if len(failures) < times:
            failures.append(1)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(WorkerThread, "start", refused)
    results = await run(member(number, timeout_s=0.5), samples=SAMPLES[:1])
    assert failures
    if times == 2:
        assert [rating.value for rating in results["r"]] == [0.0]
    else:
        assert [rating.status for rating in results["r"]] == ["unavailable"]
        assert "can't start new thread" in results["r"][0].detail
