"""The normalizer stage after an outage: a backlog larger than a message, and repeats within one message."""

import anyio
import pytest
from stages import run_normalizer

from lachesis.pipeline.bus.memory.memory_bus import MAX_MESSAGE_BYTES
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.normalizer.stage import RewardWriter
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.annotations import GroupScore, RewardEvent, ScoreEvent
from lachesis.schemas.codec import encode
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.services.stage_settings import normalizer_settings

SUBJECT = subjects.event("score", "r", subjects.LIVE, "sums")


def config(**settings):
    normalization = NormalizationConfig(**settings)
    return RunConfig(run="r", environments={"sums": EnvironmentConfig(kind="k")}, normalization=normalization)


def score(n, seq, scores):
    return GroupScore(
        group=f"{n:032x}", seq=seq, item="i", policy_step=0, scores=scores, ratings={}, lengths=[1] * len(scores)
    )


async def publish_scores(bus, name, groups):
    event = ScoreEvent(run="r", env="sums", revision=subjects.LIVE, ensemble="e", raters={}, groups=groups)
    await bus.publish(SUBJECT, encode(event), msg_id=name)


async def rewarded(lab):
    return [group for event in await lab.events("reward", RewardEvent) for group in event.groups]


async def backlog(lab, groups, samples):
    """Members, and scores of all but the first, which holds up every window behind it."""
    plan = Plan.of(lab.group(0))
    for n in range(groups):
        header = plan.pack().replace(plan.group, f"{n:032x}")
        await lab.bus.publish(subjects.rollout("r", "sums"), b"", msg_id=f"m{n}", headers={PLAN_HEADER: header})
    column = [i / samples for i in range(samples)]
    for n in range(1, groups, 64):
        some = range(n, min(n + 64, groups))
        await publish_scores(lab.bus, f"s{n}", [score(i, i + 1, column) for i in some])
    return column


@pytest.mark.slow
async def test_a_backlog_larger_than_a_message_is_committed_in_parts(lab):
    samples, groups = 1024, 400
    assert samples * groups * 27 > MAX_MESSAGE_BYTES
    column = await backlog(lab, groups, samples)
    await publish_scores(lab.bus, "late", [score(0, 1, column)])
    service = Service(lab.bus, "normalizer", "r")
    writer = RewardWriter(service, normalizer_settings(config(window=4)), "sums")
    await writer.open()
    for stream in (subjects.ROLLOUTS, subjects.EVENTS):  # all at once, as after an outage
        async with lab.bus.read(stream, [], follow=False) as messages:
            async for message in messages:
                await writer.feed(message)
    await writer.commit()
    found = await rewarded(lab)
    assert [group.seq for group in found] == list(range(1, groups + 1))
    assert writer.normalizer.watermark == groups + 1
    again = RewardWriter(service, normalizer_settings(config(window=4)), "sums")
    await again.open()
    assert again.normalizer.state() == writer.normalizer.state()
    assert again.cursors == writer.cursors


@pytest.mark.parametrize("second", [[0.0, 1.0], [0.5]])
async def test_of_two_scores_in_one_message_the_first_counts_whole(lab, second):
    async with lab.running(lambda service: run_normalizer(service, config()), "normalizer"):
        await lab.store(lab.group(1))
        await publish_scores(lab.bus, "s", [score(1, 1, [1.0, 0.0]), score(1, 1, second)])

        async def done():
            return bool(await rewarded(lab))

        await lab.until(done)
    (group,) = await rewarded(lab)
    assert (group.scores, group.rewards) == ([1.0, 0.0], [1.0, 0.0])
    with anyio.fail_after(10):  # and the next life can read it
        async with lab.running(lambda service: run_normalizer(service, config()), "normalizer") as service:
            while service.vitals.state == "starting":
                await lab.bus.changed(until=lab.bus.now() + 0.02)
