"""The staleness that the batcher and the trainer report is counted as the bound counts it."""

import msgspec
import pytest
from stages import run_batcher

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.trainer.metrics import batch_figures
from lachesis.schemas import subjects
from lachesis.schemas.annotations import Commit, GroupReward, RewardEvent
from lachesis.schemas.codec import encode
from lachesis.schemas.ledger import GroupRef

CONFIG = RunConfig(
    run="r",
    environments={"sums": EnvironmentConfig(kind="x", samples=2)},
    batching=BatchingConfig(batch_size=2, max_staleness=2),
)


async def store(lab, n, versions):
    rollout = lab.group(n, policy_versions=versions)
    seq = await lab.store(rollout)
    reward = GroupReward(
        group=rollout.id, seq=seq, item=rollout.item, policy_step=0, verdict="trainable", scores=[1.0, 0.0],
        rewards=[1.0, 0.0], advantages=[1.0, -1.0], snapshot="s", mean=0.5, std=0.5, range=1.0, n_valid=2,
    )  # fmt: skip
    event = RewardEvent(
        run="r", env="sums", revision="live", advantage="grpo",
        commit=Commit(term="t", index=n, cursors={}, delta=b"", crc32=0), groups=[reward],
    )  # fmt: skip
    await lab.bus.publish(subjects.event("reward", "r", "live", "sums"), encode(event), msg_id=f"w{n}")


@pytest.mark.parametrize(("staleness_of", "staleness"), [("newest", 0), ("oldest", 1)])
async def test_the_figures_are_counted_from_the_policy_that_the_bound_counts_from(lab, staleness_of, staleness):
    batching = msgspec.structs.replace(CONFIG.batching, staleness_of=staleness_of)
    config = msgspec.structs.replace(CONFIG, batching=batching)

    def batched(count):
        async def condition():
            return service.vitals.metrics.get("batching/batches") == count and service.vitals.emitted == count

        return condition

    async with lab.running(lambda service: run_batcher(service, config), "batcher") as service:
        await store(lab, 1, ["0-first-abc"])
        await lab.until(batched(1))
        await store(lab, 2, ["0-first-abc", "1-first-abc"])
        await lab.until(batched(2))
    assert service.vitals.metrics["staleness/max"] == service.vitals.metrics["staleness/mean"] == staleness
    ref = GroupRef(
        group="0" * 32, seq=2, env="sums", sequences=2, tokens=8, policy_step=0, newest_step=1, advantages=[1.0, -1.0]
    )
    figures = batch_figures([ref], {}, 1, step_of=batching.step_of)
    assert figures["staleness/max"] == figures["staleness/mean"] == staleness
