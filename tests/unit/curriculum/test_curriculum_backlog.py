"""The curriculum stage after an outage: a backlog of rewards larger than a message."""

import pytest

from lachesis.pipeline.bus.memory.memory_bus import MAX_MESSAGE_BYTES
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.curriculum.logic.strategy import ItemPool
from lachesis.pipeline.curriculum.stage import CurriculumWriter
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.annotations import Commit, CurriculumEvent, GroupReward, RewardEvent
from lachesis.schemas.codec import encode
from lachesis.services.stage_settings import curriculum_settings

MESSAGES, GROUPS = 10, 2000


def reward(n):
    return GroupReward(
        group=f"{n:032x}", seq=n + 1, item="i", policy_step=0, verdict="trainable", scores=[1.0, 0.0],
        rewards=[1.0, 0.0], advantages=[1.0, -1.0], snapshot="s", mean=0.5, std=0.5, range=1.0, n_valid=2,
        index=n % 8, success=0.5, skill="a skill with a rather long name",
    )  # fmt: skip


@pytest.mark.slow
async def test_a_backlog_larger_than_a_message_is_committed_in_parts(lab):
    for m in range(MESSAGES):
        event = RewardEvent(
            run="r", env="sums", revision=subjects.LIVE, advantage="grpo",
            commit=Commit(term="t", index=m, cursors={}, delta=b"", crc32=0),
            groups=[reward(m * GROUPS + n) for n in range(GROUPS)],
        )  # fmt: skip
        await lab.bus.publish(subjects.event("reward", "r", subjects.LIVE, "sums"), encode(event), msg_id=str(m))
    config = RunConfig(run="r")
    service = Service(lab.bus, "curriculum", "r")
    writer = CurriculumWriter(service, curriculum_settings(config), "sums", ItemPool(8))
    await writer.open()
    async with lab.bus.read(subjects.EVENTS, [], follow=False) as messages:
        burst = [message async for message in messages]
    await writer.process_burst(burst)
    commits = await lab.events("curriculum", CurriculumEvent)
    sizes = [len(encode(event)) for event in commits]
    assert len(sizes) > 1
    assert max(sizes) < MAX_MESSAGE_BYTES / 2
    assert [group for event in commits for group in event.observed] == [f"{n:032x}" for n in range(MESSAGES * GROUPS)]
    assert commits[-1].commit.cursors == {subjects.EVENTS: burst[-1].seq + 1}
    again = CurriculumWriter(service, curriculum_settings(config), "sums", ItemPool(8))
    await again.open()
    assert again.learner.state() == writer.learner.state()
    assert again.cursors == writer.cursors
