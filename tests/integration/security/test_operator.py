"""What people do with a run's history, with the operator's key and no more than it allows."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import anyio
import pytest
from fuzz.examples import group
from integration.security.conftest import RUN
from integration.security.secured import Secured

from lachesis.pipeline.access import OPERATOR
from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.schemas import subjects
from lachesis.schemas.codec import encode
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.subjects import ROLLOUTS

JUNK = {
    "batcher": subjects.ledger("one", "main"),
    "trainer": subjects.state("one", "trainer", "live", "main"),
    "normalizer": subjects.event("reward", "one", "live", "words"),
    "health": subjects.event("alert", "one", "live", "words"),
    "governor": subjects.state("one", "governor", "live", "0"),
}


@pytest.fixture
async def secured(make_secured: Callable[[], AbstractAsyncContextManager[Secured]]) -> AsyncIterator[Secured]:
    """A server of its own, for the operator deletes the run."""
    async with make_secured() as server:
        yield server


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_it_may_export_import_and_delete(secured: Secured, streams_config: StreamsConfig, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)

    async def lachesis(*arguments: str) -> dict:
        command = [sys.executable, "-m", "lachesis", *arguments, "--json", "--config", "run.toml", *secured.arguments]
        done = await anyio.to_thread.run_sync(
            lambda: subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    async with await secured.bus(OPERATOR) as bus:
        for n in range(1, 4):
            made = group(id=f"{n:032x}", run="one", env="words", counter=n)
            headers = {PLAN_HEADER: Plan.of(made).pack()}
            await bus.publish(subjects.rollout("one", "words"), encode(made), msg_id=made.id, headers=headers)
        assert (await lachesis("export", "out.jsonl"))["groups"] == 3
        for identity, subject in JUNK.items():  # as a stage's key can; what the operator reads of it is passed over
            async with secured.client(identity) as client:
                for text in (b"\xc1junk", b"", b"\x91" * 5000):
                    await client.request(subject, text, timeout=30)
        assert (await lachesis("gc"))["streams"]["ROLLOUTS"]["messages"] == 3
        assert (await lachesis("status"))["ledger"] is None
        assert (await lachesis("runs", "delete", "--yes"))["streams"]
        assert await bus.describe_streams() == []
        for _ in range(2):
            assert (await lachesis("import", "out.jsonl", "--unleased"))["stored"] == 3
            assert (await lachesis("runs", "delete", "--yes"))["streams"]["ROLLOUTS"]["messages"] == 3
        assert await bus.describe_streams() == []
        await bus.ensure_streams(streams_config)
        durable = subjects.durable("scorer", "one", "live")
        async with await secured.bus("scorer") as scorer, scorer.consume(ROLLOUTS, durable, []):
            pass
        body = b'{"stream_name": "lachesis_one_EVENTS", "config": {"name": "health=3", "durable_name": "health=3"}}'
        async with await secured.bus("health") as health:
            await health.client.request("$JS.API.CONSUMER.CREATE.lachesis_one_EVENTS.health=3", body, timeout=30)
        assert "health=3" in (await lachesis("gc", "--consumers"))["readers"]["EVENTS"]
        assert "health=3" in (await lachesis("gc", "--consumers", "--yes"))["readers"]["EVENTS"]
        assert (await lachesis("gc", "--consumers"))["readers"]["EVENTS"] == []
        assert durable in await bus.consumer_names(ROLLOUTS)
