"""Held-out rates that fall: an alert for each evaluation that finds it, none once it is over, whatever is killed."""

import random

import anyio
import msgspec
import pytest

from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.evaluator.logic.rates import TaskResult, standard_error
from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.stage import run_health
from lachesis.schemas import subjects
from lachesis.schemas.alerts import AlertEvent
from lachesis.schemas.annotations import EvalEvent, ScoreEvent
from lachesis.schemas.codec import encode
from lachesis.services.observe.health import read_health
from lachesis.services.stage_settings import health_settings

CONFIG = RunConfig(
    run="r",
    environments={"sums": EnvironmentConfig(kind="x"), "other": EnvironmentConfig(kind="x")},
    health=HealthConfig(window=16),
)
RATES = [0.5, 0.5, 0.0, 0.0, 0.5]
SEVERITIES = ["idle", "ok", "warn", "warn", "ok"]


def health(service, config=CONFIG):
    return run_health(service, health_settings(config))


async def evaluate(lab, step, rate, *, env="sums"):
    counts = [TaskResult(round(2 * rate) - task % 2 if rate else 0, 2) for task in range(20)]
    avg = sum(count.rate for count in counts) / 20
    event = EvalEvent(
        run="r", env=env, revision="live", policy_version=f"{step}-a-d", policy_step=step, items=20, k=2,
        temperature=1.0, avg=avg, error=standard_error(counts), pass_at_k=avg, tasks=list(range(20)),
        task_successes=[count.succeeded for count in counts], task_judged=[2] * 20,
        started_ns=step + 1, ended_ns=step + 2,
    )  # fmt: skip
    await lab.bus.publish(subjects.event("eval", "r", "live", env), encode(event), msg_id=f"{step}{env}")


def told(lab, count, env="sums"):
    async def condition():
        return len(await results(lab, env)) >= count

    return condition


async def results(lab, env="sums"):
    events = await lab.events("alert", AlertEvent, env)
    return [result for event in events for result in event.results if result.check == "held_out"]


async def test_a_fall_is_an_alert_until_an_evaluation_finds_it_over(lab):
    async with lab.running(health, "health") as service:
        for n, rate in enumerate(RATES):
            await evaluate(lab, 10 * n, rate)
            await lab.until(told(lab, n + 1))
            newest = (await read_health(lab.bus, CONFIG, "sums")).results
            assert [(result.check, result.severity) for result in newest] == [("held_out", SEVERITIES[n])]
        figures = service.vitals.metrics
    found = await results(lab)
    assert [result.severity for result in found] == SEVERITIES
    assert found[2].reason == (
        "the held-out rate of sums fell from 0.25 to 0.00 (difference -0.25 +- 0.06 on 20 tasks) between step 0 and 20"
    )
    assert found[2].value == 0.25 > found[2].threshold > 0
    assert [result.windows for result in found] == [0, 0, 1, 2, 0]
    assert await results(lab, "other") == []
    assert figures["health/sums/alerts"] == 2
    assert not any(event.standing.halted for event in await lab.events("alert", AlertEvent))


@pytest.mark.parametrize("seed", range(4))
async def test_kills_at_any_moment_change_nothing_and_nothing_is_told_twice(lab, groups, seed):
    rng = random.Random(seed)
    for n, rate in enumerate(RATES):
        await evaluate(lab, 10 * n, rate)
    for _ in range(40):
        async with lab.running(health, "health") as service:
            for _ in range(rng.randint(0, 60)):
                await anyio.lowlevel.checkpoint()
            if rng.random() < 0.8:
                service.kill()
    async with lab.running(health, "health"):
        await lab.until(told(lab, len(RATES)))
        await evaluate(lab, 100, 0.0)  # compared with the first, which an earlier life checked
        await lab.until(told(lab, len(RATES) + 1))
    assert [result.severity for result in await results(lab)] == [*SEVERITIES, "warn"]


async def test_later_evaluations_are_compared_with_those_before_the_windows_that_were_judged(lab, groups):
    """What a restart reads again begins behind the last window, and the first evaluation lies before it."""
    async with lab.running(health, "health"):
        await evaluate(lab, 0, 0.5)
        for n in range(32):
            group = lab.group(n, samples=8)
            seq = await lab.store(group)
            score = msgspec.structs.replace(groups.score(), group=group.id, seq=seq, policy_step=0)
            event = ScoreEvent(run="r", env="sums", revision="live", ensemble="e", raters={}, groups=[score])
            await lab.bus.publish(subjects.event("score", "r", "live", "sums"), encode(event), msg_id=f"s{n}")

        async def judged():
            return len(await lab.events("alert", AlertEvent)) >= 3

        await lab.until(judged)
    async with lab.running(health, "health"):
        await evaluate(lab, 10, 0.0)
        await lab.until(told(lab, 2))
    assert [result.severity for result in await results(lab)] == ["idle", "warn"]


async def test_an_evaluation_of_another_name_is_judged_with_the_first_environment(lab):
    config = msgspec.structs.replace(CONFIG, evaluation={"exam": EnvironmentConfig(kind="x")})
    async with lab.running(lambda service: health(service, config), "health"):
        await evaluate(lab, 0, 0.5, env="exam")
        await evaluate(lab, 10, 0.0, env="exam")
        await lab.until(told(lab, 2))
    assert "the held-out rate of exam fell" in (await results(lab))[-1].reason
    assert await results(lab, "other") == []


async def test_the_check_can_be_switched_off(lab):
    config = msgspec.structs.replace(CONFIG, health=HealthConfig(window=16, off=["held_out"]))
    async with lab.running(lambda service: health(service, config), "health") as service:
        await evaluate(lab, 0, 0.5)
        await evaluate(lab, 10, 0.0)
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
        assert service.vitals.status_text is None
    assert await lab.events("alert", AlertEvent) == []
