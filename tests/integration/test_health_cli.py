"""`lachesis health` and `lachesis resume` against a real server, and the health service as a process that is killed."""

import json
import signal
import sys
from pathlib import Path

import anyio
import pytest
from integration.health_runs import running

from lachesis.pipeline.bus.config import ServerConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.schemas import subjects
from lachesis.schemas.alerts import AlertEvent
from lachesis.schemas.annotations import Commit, GroupReward, GroupScore, RewardEvent, ScoreEvent
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.ids import new_group_id

CONFIG = """
[environments.words]
kind = "words"
[health]
halts = ["zero_variance"]
window = 16
"""


class World:
    """A run named demo, its server and the commands."""

    def __init__(self, folder: Path, bus) -> None:
        self.folder, self.bus = folder, bus
        self.told = 0

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "lachesis", *arguments, "--config", "run.toml", "--run", "demo"]

    async def lachesis(self, *arguments: str):
        with anyio.fail_after(120):
            done = await anyio.run_process(self.command(*arguments), cwd=self.folder, check=False)
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    async def groups(self, count: int, scores: list[float], verdict: str) -> None:
        """Store scores and rewards of `count` groups."""
        for _ in range(count):
            self.told += 1
            same = {"group": new_group_id(), "seq": self.told, "item": f"i{self.told}", "policy_step": 0}
            score = GroupScore(**same, scores=scores, ratings={}, lengths=[5] * len(scores))
            centre = sum(scores) / len(scores)
            reward = GroupReward(
                **same,
                verdict=verdict,
                scores=scores,
                rewards=scores,
                advantages=[value - centre for value in scores],
                snapshot="s",
                mean=centre,
                std=0.0,
                range=0.0,
                n_valid=len(scores),
            )
            names = {"run": "demo", "env": "words", "revision": "live"}
            commit = Commit(term="t", index=self.told, cursors={}, delta=b"", crc32=0)
            for kind, event in (
                ("score", ScoreEvent(**names, ensemble="e", raters={}, groups=[score])),
                ("reward", RewardEvent(**names, advantage="centred", commit=commit, groups=[reward])),
            ):
                subject = subjects.event(kind, "demo", "live", "words")
                await self.bus.publish(subject, encode(event), msg_id=f"{kind}{self.told}")

    async def alerts(self, count: int) -> list[AlertEvent]:
        """Wait for `count` alert events and return them."""
        found: list[AlertEvent] = []
        with anyio.fail_after(120):
            subject = subjects.event("alert", "demo", "live", "words")
            async with self.bus.read(subjects.EVENTS, [subject]) as messages:
                async for message in messages:
                    found.append(decode(AlertEvent, message.data))
                    if len(found) == count:
                        break
        return found


@pytest.fixture
async def world(tmp_path: Path, anyio_backend: str):
    (tmp_path / "run.toml").write_text(CONFIG)
    store = tmp_path / "runs" / "demo" / "nats"
    async with (
        EmbeddedServer(store, ServerConfig(max_file_bytes=32 << 30)) as server,
        await connect(server.url, run="demo", name="tests", token=server.token) as bus,
    ):
        yield World(tmp_path, bus)


@pytest.mark.slow
async def test_a_halt_is_shown_outlives_a_kill_and_is_lifted_by_resume(world: World) -> None:
    assert (await world.lachesis("init"))[0] == 0
    code, said, _ = await world.lachesis("health")
    assert (code, "not checked yet" in said) == (1, True)

    async with running(world.folder, "health") as process:
        await world.groups(24, [0.2, 0.8], "trainable")
        (first,) = await world.alerts(1)
        process.send_signal(signal.SIGKILL)  # in the middle of the second window
    assert (await world.lachesis("health"))[0] == 0
    await world.groups(24, [0.5, 0.5], "zero_variance")
    code, said, _ = await world.lachesis("resume", "--wait", "1")
    assert (code, said) == (0, "nothing is quarantined or halted\n")

    async with running(world.folder, "health"):
        events = await world.alerts(3)
        assert events[0] == first
        assert [(event.window, event.groups, event.standing.halted) for event in events] == [
            (0, 16, False),
            (1, 32, False),  # 8 groups of it were read by the life before
            (2, 48, True),
        ]
        code, said, _ = await world.lachesis("health")
        assert (code, "HALTED by zero_variance" in said, "lachesis resume words" in said) == (1, True, True)
        code, said, _ = await world.lachesis("health", "--json")
        (reported,) = json.loads(said)
        assert (code, reported["env"], reported["standing"]["halted"]) == (1, "words", True)
        result = next(row for row in reported["results"] if row["check"] == "zero_variance")
        assert (result["severity"], len(result["examples"])) == ("halt", 4)

        code, said, error = await world.lachesis("resume", "--wait", "100")
        assert (code, said, error) == (0, "words: resumed; its checks start over\n", "")
        code, said, _ = await world.lachesis("health")
        assert (code, "not checked yet" in said) == (1, True)

    code, said, _ = await world.lachesis("resume", "words", "--wait", "0.2")
    assert (code, "does it once it runs" in said) == (1, True)
    code, _, error = await world.lachesis("resume", "word")
    assert (code != 0, "there is no environment 'word'" in error) == (True, True)
