"""What the environment service makes of the curriculum's snapshots."""

import numpy as np

from lachesis.pipeline.config.run import EnvironmentConfig
from lachesis.pipeline.environment.stage import _Producer
from lachesis.pipeline.inference.directory import InferenceDirectory
from lachesis.schemas import keys
from lachesis.schemas.codec import encode
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.control import CurriculumSnapshot


class Pool(list):
    """An environment of two tasks, of which nothing else is used."""

    rollout_timeout_s = 900.0
    turn_timeout_s = 60.0
    resumable = False


def snapshot(name, weights):
    return encode(
        CurriculumSnapshot(
            run="r",
            env="sums",
            revision="live",
            id=name,
            observed=1,
            strategy="s",
            weights=as_bytes(weights, "float32"),
        )
    )


async def test_a_snapshot_that_cannot_be_drawn_by_is_passed_over(lab):
    bad = [b"\xc1", snapshot("nan", [np.nan, 1.0]), snapshot("none", [0.0, 0.0]), snapshot("short", [1.0])]

    async def follow(service):
        settings = EnvironmentConfig(kind="k")
        producer = service.producer = _Producer(
            service,
            "sums",
            Pool([0, 1]),
            settings,
            InferenceDirectory(1.0),
            producer="p",
            holder="p",
            held_out=np.empty(0, np.int64),
            seed=0,
        )
        async with service.until_drained():
            await producer.follow_curriculum()

    async with lab.running(follow, "environment") as service:
        for name, value in [
            ("first", snapshot("first", [1.0, 0.0])),
            *enumerate(bad),
            ("last", snapshot("last", [0, 1])),
        ]:
            await lab.bus.put(keys.curriculum("live", "sums"), value)
            if isinstance(name, int):
                await lab.bus.changed(until=lab.bus.now() + 0.02)
                assert service.producer.sampler.snapshot_id == "first"
            else:

                async def drawn_by(name=name):
                    return service.producer.sampler.snapshot_id == name

                await lab.until(drawn_by)
