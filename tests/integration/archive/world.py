"""A run's server and history, and the command line in processes of its own."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import numpy as np
from fuzz.examples import group

from lachesis.pipeline.bus.config import ServerConfig, StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.schemas import subjects
from lachesis.schemas.annotations import Commit, GroupReward, GroupScore, RewardEvent, ScoreEvent, Stamp
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.ledger import Batch, GroupRef, LedgerEntry, Outcome
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.rollout import Message, RolloutGroup, Sequences, VersionSpan

__all__ = ["CONFIG", "RUN", "World", "a_group", "a_world"]

RUN = "demo"
STAMPS = [Stamp("scorer", 1, 2, 3)]
CONFIG = """
run = "demo"
[environments.sums]
kind = "gateway"
[environments.words]
kind = "gateway"
[batching]
batch_size = 64
[normalization]
window = 16
[[scoring.raters]]
rater = "length"
params = { longest = 4, ramp = 8 }
"""


def a_group(n: int, *, env: str = "sums", samples: int = 4, tokens: int = 8, step: int = 0) -> RolloutGroup:
    """Return group `n`: each number makes another, with texts, and logprobs that float32 alone holds."""
    total = samples * tokens
    mask = np.tile(np.arange(tokens) > 0, samples)
    logprobs = np.where(mask, -np.random.default_rng(n).random(total), 0).astype(np.float32)
    return group(
        id=f"{n:032x}", run=RUN, env=env, counter=n, item=str(n), policy_versions=[f"{step}-first-ab"],
        task={"answer": str(n), "weight": 1.0, "none": None},
        messages=[[Message(role="user", content=f"what is {n}?"), Message(role="assistant", content="so " * i)]
                  for i in range(samples)],
        sequences=Sequences(
            offsets=as_bytes(range(0, total + 1, tokens), "int32"),
            tokens=as_bytes(np.random.default_rng(n).integers(0, 150_000, total), "int32"),
            loss_mask=pack_mask(mask), logprobs=as_bytes(logprobs, "float32"),
            finish_reasons=["stop"] * samples, version_spans=[VersionSpan(i, 0, 0) for i in range(samples)],
            rewards={"environment": [float(i % 2) for i in range(samples)]},
        ),
    )  # fmt: skip


class World:
    def __init__(self, folder: Path, bus: NatsBus) -> None:
        self.folder, self.bus = folder, bus
        (folder / "run.toml").write_text(CONFIG)

    def start(self, *arguments: object, before: str = "true") -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                "bash",
                "-c",
                f'{before}; exec "$@"',
                "_",
                sys.executable,
                "-m",
                "lachesis",
                *map(str, arguments),
                "--config",
                "run.toml",
            ],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    async def ended(self, process: subprocess.Popen[bytes], timeout_s: float = 180) -> tuple[int, str, str]:
        out, err = await anyio.to_thread.run_sync(lambda: process.communicate(timeout=timeout_s))
        return process.returncode, out.decode(), err.decode()

    async def lachesis(self, *arguments: object, timeout_s: float = 180) -> tuple[int, str, str]:
        return await self.ended(self.start(*arguments), timeout_s)

    async def json(self, *arguments: object, timeout_s: float = 180) -> dict:
        code, out, err = await self.lachesis(*arguments, "--json", timeout_s=timeout_s)
        assert code == 0, err
        return msgspec.json.decode(out)

    async def refusal(self, *arguments: object) -> str:
        code, _, err = await self.lachesis(*arguments)
        assert code == 2, (code, err)
        assert "Traceback" not in err
        return err

    async def store(self, made: RolloutGroup) -> int:
        headers = {PLAN_HEADER: Plan.of(made).pack()}
        subject = subjects.rollout(RUN, made.env)
        return (await self.bus.publish_large(subject, encode(made), msg_id=made.id, headers=headers)).seq

    async def groups(self) -> list[RolloutGroup]:
        """All rollouts of the run, in order."""
        async with self.bus.read(subjects.ROLLOUTS, [subjects.rollout(RUN)], follow=False) as messages:
            return [decode(RolloutGroup, message.data) async for message in messages]

    async def judge(self, stored: dict[int, RolloutGroup]) -> None:
        """Score all of them twice (the first counts), reward all but the last, batch the first and lose the second."""
        scores, rewards = [], []
        for seq, made in stored.items():
            n = made.sequences.n_samples
            about = {"group": made.id, "seq": seq, "item": made.item, "policy_step": 0}
            scores.append(
                GroupScore(**about, scores=[seq + i / 4 for i in range(n)], lengths=[7] * n, stamps=STAMPS,
                           ratings={"length": [0.5] * (n - 1) + [None]},
                           statuses={"length": ["ok"] * (n - 1) + ["timeout"]})
            )  # fmt: skip
            rewards.append(
                GroupReward(**about, verdict="trainable", scores=scores[-1].scores, rewards=[0.5] * n,
                            advantages=[float(i) for i in range(n)], snapshot="s", mean=1.0, std=2.0, range=3.0,
                            n_valid=n)
            )  # fmt: skip
        event = {"run": RUN, "env": "sums", "revision": "live"}
        for turn in range(2):
            changed = [msgspec.structs.replace(one, scores=[s + turn for s in one.scores]) for one in scores]
            made = ScoreEvent(**event, ensemble="e", raters={"length": "1"}, groups=changed)
            await self.bus.publish(subjects.event("score", RUN, "live", "sums"), encode(made), msg_id=f"score {turn}")
        commit = Commit(term="t", index=0, cursors={}, delta=b"", crc32=0)
        reward = RewardEvent(**event, advantage="rloo", commit=commit, groups=rewards[:-1])
        await self.bus.publish(subjects.event("reward", RUN, "live", "sums"), encode(reward), msg_id="reward")
        (first, one), (second, other), *_ = stored.items()
        ref = GroupRef(group=one.id, seq=first, env="sums", sequences=4, tokens=32, policy_step=0, advantages=[9.0] * 4)
        entry = LedgerEntry(
            run=RUN, trainer="main", index=0, previous="0" * 64, watermark=second, resolved=b"", events_cursor=1,
            batch=Batch(number=0, groups=[ref], sequences=4, tokens=32), next_batch=1,
            outcomes=[Outcome(second, other.id, "stale", 4, "too old")],
        )  # fmt: skip
        await self.bus.publish(subjects.ledger(RUN, "main"), encode(entry), msg_id="entry")


@asynccontextmanager
async def a_world(folder: Path, streams: StreamsConfig | None = None) -> AsyncIterator[World]:
    """Yield the world of a run whose server is its own, in `folder`."""
    folder.mkdir(exist_ok=True)  # noqa: ASYNC240
    async with (
        EmbeddedServer(folder / "runs" / RUN / "nats", ServerConfig(max_file_bytes=32 << 30)) as server,
        await connect(server.url, run=RUN, name="tests", token=server.token) as bus,
    ):
        await bus.ensure_streams(streams or StreamsConfig())
        yield World(folder, bus)
