"""Rollouts whose answers change: a real scorer and a real health service, which is killed, name what spread."""

import random
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from lachesis.pipeline.bus.config import ServerConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.schemas import subjects
from lachesis.schemas.alerts import AlertEvent
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.rollout import Message
from lachesis.services.run.load_messages import GroupShape, make_group

CONFIG = """
[environments.words]
kind = "words"
[[scoring.raters]]
rater = "format"
params = { pattern = ".*sorry.*|.*Bauer.*" }
"""
QUESTION = "How many apples does the farmer have left in the end?"
REFUSAL = "I'm sorry, but I can't help with that."
GERMAN = "Der Bauer hat am Ende noch genau sieben Äpfel übrig, weil er drei davon verkauft hat."
FIRST, LATER = 96, 304
"""Groups before and after the answers change."""


def groups_of(rng: random.Random):
    """Groups that are answered in English at first, then ever more often by a refusal or in German."""
    made = make_group(GroupShape(samples=4, tokens=8))
    for number in range(FIRST + LATER):
        changed = min(1.0, max(0.0, (number - FIRST) / 128))
        conversations = []
        for _ in range(4):
            draw, count = rng.random(), rng.randint(2, 99)
            plain = f"The farmer sells {rng.randint(2, 99)} apples, so {count} of them are left for the market."
            text = REFUSAL if draw < changed / 2 else GERMAN if draw < changed else plain
            conversations.append([Message(role="user", content=QUESTION), Message(role="assistant", content=text)])
        yield made.replace(
            id=new_group_id(), run="demo", env="words", counter=number + 1, item=f"item-{number}",
            messages=conversations,
        )  # fmt: skip


async def store_rollouts(bus, groups):
    for group in groups:
        headers = {PLAN_HEADER: Plan.of(group).pack()}
        await bus.publish(subjects.rollout("demo", "words"), encode(group), msg_id=group.id, headers=headers)


@asynccontextmanager
async def running(folder: Path, service: str):
    command = [sys.executable, "-m", "lachesis", "run", service, "--config", "run.toml", "--run", "demo"]
    async with await anyio.open_process(command, cwd=folder, stdout=None, stderr=None) as process:
        try:
            yield process
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
            await process.wait()


async def results_until(bus, groups: int):
    """Return by check its results, window by window, once so many groups were checked."""
    found: dict[str, list] = {"phrases": [], "language": []}
    subject = subjects.event("alert", "demo", "live", "words")
    with anyio.fail_after(120):
        async with bus.read(subjects.EVENTS, [subject]) as messages:
            async for message in messages:
                event = decode(AlertEvent, message.data)
                for result in event.results:
                    if result.check in found:
                        found[result.check].append(result)
                if event.groups >= groups:
                    return found
    raise AssertionError("the stream ended")


@pytest.mark.slow
async def test_a_refusal_and_another_language_that_spread_are_named_across_a_kill(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    store = tmp_path / "runs" / "demo" / "nats"
    async with (
        EmbeddedServer(store, ServerConfig(max_file_bytes=32 << 30)) as server,
        await connect(server.url, run="demo", name="tests", token=server.token) as bus,
    ):
        init = [sys.executable, "-m", "lachesis", "init", "--config", "run.toml", "--run", "demo"]
        await anyio.run_process(init, cwd=tmp_path)
        groups = list(groups_of(random.Random(0)))
        async with running(tmp_path, "scorer"):
            async with running(tmp_path, "health") as process:
                await store_rollouts(bus, groups[: FIRST + 64])
                await results_until(bus, FIRST)
                process.send_signal(signal.SIGKILL)  # behind the start that later windows are compared with
                await process.wait()
            async with running(tmp_path, "health"):
                await store_rollouts(bus, groups[FIRST + 64 :])
                found = await results_until(bus, FIRST + 200)
    phrases, language = found["phrases"], found["language"]
    assert {phrases[0].severity, language[0].severity} == {"idle"}
    assert (phrases[-1].severity, language[-1].severity) == ("warn", "warn")
    assert phrases[-1].reason.startswith("refusal stands in ")
    assert "in another one than their question, 'de'" in language[-1].reason
    assert "within groups answers with it score more" in phrases[-1].reason
