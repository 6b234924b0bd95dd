"""A real run rebuilt from its streams, while it goes on and after; its past scored again, trained on, and rebuilt."""

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from integration.copies import copy_streams
from integration.harness import RUN, Run
from integration.servers import Supervised

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.bus.config import ServerConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.ledger.checkpoint_state import CHECKPOINTS, known_checkpoints
from lachesis.schemas import subjects
from lachesis.schemas.annotations import RewardEvent
from lachesis.schemas.codec import decode, encode
from lachesis.services.run.connect import NATS_FOLDER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 1000
"""More than it comes to: it is stopped once it was looked at."""
WHOLE = {"chain": "ok", "reports": "ok", "batches": "ok", "weights": "ok"}


async def lachesis(run: Run, *command: str, code: int = 0) -> dict[str, Any]:
    process = run.spawn(*command, "--json", log=subprocess.PIPE)
    out, err = await anyio.to_thread.run_sync(lambda: process.communicate(timeout=400))
    assert process.returncode == code, (out + err).decode()
    found: dict[str, Any] = json.loads(out[out.index(b"{") :])
    return found


async def verdicts(run: Run, *command: str, code: int = 0) -> dict[str, str]:
    found = await lachesis(run, "reproduce", *command, code=code)
    return {finding["check"]: finding["verdict"] for finding in found["findings"]}


def altering_rewards() -> Any:
    """Return what moves one advantage of a batched group by its last bit."""
    done = False

    def alter(message: StoredMessage) -> bytes:
        nonlocal done
        if done or not message.subject.startswith(f"rl.reward.{RUN}."):
            return message.data
        event = decode(RewardEvent, message.data)
        for at, reward in enumerate(event.groups):
            if reward.verdict == "trainable" and reward.advantages[0]:
                done = True
                values = [math.nextafter(reward.advantages[0], 9), *reward.advantages[1:]]
                changed = msgspec.structs.replace(reward, advantages=values)
                return encode(event.replace(groups=[*event.groups[:at], changed, *event.groups[at + 1 :]]))
        return message.data

    return alter


async def test_a_run_and_its_past_come_out_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with Run(folder, STEPS, Supervised(folder)) as run:
        run.start()
        await run.wait_for_step(6)
        assert await verdicts(run, "--to", "4") == WHOLE, "while it goes on"
        assert run.process is not None
        run.process.terminate()
        await run.wait(200)
        kept = sorted(state.step for _, state in known_checkpoints(folder / CHECKPOINTS))
        assert await verdicts(run) == WHOLE
        assert await verdicts(run, "--from", str(kept[0])) == WHOLE
        live = await lachesis(run, "reproduce", "--batches-only")
        assert live["batches"] >= kept[-1]

        await lachesis(run, "replay", "--revision", "mean", "--set", "scoring.aggregation=mean")
        trained = await lachesis(run, "train", "--revision", "mean")
        assert trained["finished"]
        assert await verdicts(run, "--trainer", "mean") == {**WHOLE, "order": "ok"}
        other = await lachesis(run, "train", "--revision", "mean", "--name", "second", "--from", str(kept[-1]))
        assert other["manifest"] == trained["manifest"]
        assert await lachesis(run, "reproduce", "--batches-only") == live, "the live ledger is as it was"

        copied = folder.with_name("copied")
        async with (
            EmbeddedServer(folder / NATS_FOLDER) as source,
            EmbeddedServer(copied / NATS_FOLDER, ServerConfig(max_file_bytes=32 << 30)) as target,
            await connect(source.url, run=RUN, name="tests", token=source.token) as theirs,
            await connect(target.url, run=RUN, name="tests", token=target.token) as ours,
        ):
            await ours.ensure_streams(RunConfig().streams)
            assert await copy_streams(theirs, ours, altering_rewards()) == 1
            assert (await ours.usage(subjects.LEDGER)).last == (await theirs.usage(subjects.LEDGER)).last
        run.folder = copied
        found = await verdicts(run, "--batches-only", code=1)
        assert found == {"chain": "ok", "reports": "ok", "batches": "fail"}
