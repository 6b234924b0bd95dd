"""A producer flat out: takes leases and publishes groups of 8 x 1024 tokens, until it has published its number.

python -m gpu.parts.pipeline_publisher FOLDER NUMBER GROUPS TOKENS
"""

import sys
import time
from pathlib import Path

import anyio
import numpy as np
from gpu.parts.pipeline import ENV, RUN, SAMPLES, group_bytes

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import read_endpoint
from lachesis.pipeline.environment.leases import ProducerLeases
from lachesis.pipeline.runtime.service import open_service
from lachesis.schemas import subjects
from lachesis.schemas.codec import encode
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.rollout import Message, RolloutGroup, Sequences, VersionSpan

TASKS = 16
"""Groups under way at once."""
_WORDS = [
    "the",
    "trainer",
    "takes",
    "what",
    "the",
    "policy",
    "wrote",
    "and",
    "learns",
    "a",
    "little",
    "of",
    "it",
    "every",
    "step",
]


class _Groups:
    """Makes groups of random tokens and text, each with an id, an epoch and a counter of its own."""

    def __init__(self, number: int, tokens: int) -> None:
        draw = np.random.default_rng(number)
        total = SAMPLES * tokens
        self._name, self._epoch, self._made = f"publisher-{number}", time.time_ns(), 0
        self._draw = draw
        sampled = np.tile(np.arange(tokens) >= tokens // 8, SAMPLES)
        self._columns = {
            "offsets": as_bytes(np.arange(SAMPLES + 1) * tokens, "int32"),
            "loss_mask": pack_mask(sampled),
            "logprobs": as_bytes(np.where(sampled, -draw.exponential(0.5, total), 0.0), "float32"),
        }
        self._tokens = draw.integers(0, 150_000, total).astype(np.int32)
        self._messages = [
            [
                Message(role="user", content="What?"),
                Message(role="assistant", content=" ".join(draw.choice(_WORDS[: 4 + sample], tokens * 2 // 3))),
            ]
            for sample in range(SAMPLES)  # of different words, or their scores would have no variance
        ]

    def make(self, lease: str) -> RolloutGroup:
        self._made += 1
        return RolloutGroup(
            id=new_group_id(),
            run=RUN,
            env=ENV,
            item=str(self._made),
            producer=self._name,
            epoch=self._epoch,
            counter=self._made,
            policy_versions=["0-a-b"],
            sequences=Sequences(
                tokens=as_bytes(np.roll(self._tokens, self._made), "int32"),
                finish_reasons=["stop"] * SAMPLES,
                version_spans=[VersionSpan(sample, 0, 0) for sample in range(SAMPLES)],
                **self._columns,
            ),
            tokenizer_hash="t",
            started_ns=time.time_ns(),
            messages=self._messages,
            lease=lease,
        )


async def _publish(bus: Bus, number: int, groups: int, tokens: int) -> None:
    async with open_service(bus, "environment-words", RUN, replica=f"publisher-{number}") as service:
        leases = ProducerLeases(service, f"publisher-{number}", ENV)
        made = _Groups(number, tokens)
        left = iter(range(groups))

        async def work() -> None:
            for _ in left:
                lease = await leases.acquire(SAMPLES, group_bytes(tokens))
                if lease is None:
                    return
                group = made.make(lease)
                headers = {PLAN_HEADER: Plan.of(group).pack()}
                await bus.publish_large(subjects.rollout(RUN, ENV), encode(group), msg_id=group.id, headers=headers)
                leases.settled(lease)

        async with anyio.create_task_group() as around:
            around.start_soon(leases.renew)
            async with anyio.create_task_group() as tasks:
                for _ in range(TASKS):
                    tasks.start_soon(work)
            around.cancel_scope.cancel()


async def main(folder: Path, number: int, groups: int, tokens: int) -> None:
    endpoint = read_endpoint(folder / "nats")
    async with await connect(endpoint.url, run=RUN, name=f"publisher-{number}", token=endpoint.token) as bus:
        await _publish(bus, number, groups, tokens)


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), *map(int, sys.argv[2:]))
