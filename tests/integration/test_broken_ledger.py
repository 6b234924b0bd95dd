"""A ledger that breaks while its run goes on: said within seconds, wherever one looks, and in how the run ends."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import anyio
import pytest
from integration.batcher.test_batcher import World
from integration.damage import damage_in_place
from integration.test_up import CONFIG, pids, ready, start
from unit.ledger.test_audit import make_entries

from lachesis.pipeline.bus.config import ServerConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer, read_endpoint
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.ledger.chain import PREVIOUS_HEADER
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import Heartbeat
from lachesis.schemas.subjects import LEDGER

GAP = "entry 2 is gone"
"""A server that ended in order knows all its messages, and leaves out the one that it cannot read."""
WENT_BACK = "it held 6 entries and holds 2 now"
"""One that was killed reads its store again, and takes what lies behind the damage for half written."""


async def write_ledger(bus: NatsBus, folder: Path) -> str:
    """Store twelve rollouts and a ledger of six entries, and return a group that entry 2 alone names."""
    world = World(bus, "up")
    ids = {seq: group.id for seq, group in [await world.rollout() for _ in range(12)]}
    entries = make_entries(6, run="up", ids=ids)
    for entry in entries:
        at = (await bus.usage(LEDGER)).last
        subject = subjects.ledger("up", "main")
        await bus.publish(subject, encode(entry), msg_id=str(at), headers={PREVIOUS_HEADER: str(at)})
    assert entries[2].batch is not None
    return entries[2].batch.groups[0].group


async def lachesis(folder: Path, *arguments: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "lachesis", *arguments, "--config", "run.toml",
        cwd=folder, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await process.communicate()
    return process.returncode, said.decode()


async def until_broken(bus: NatsBus) -> Heartbeat:
    with anyio.fail_after(120):
        async with bus.listen(subjects.heartbeat("up", "health")) as beats:
            async for message in beats:
                beat = decode(Heartbeat, message.data)
                if beat.metrics.get("ledger/broken"):
                    return beat
    raise AssertionError


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("number", "found"), [(signal.SIGTERM, GAP), (signal.SIGKILL, WENT_BACK)])
async def test_a_message_that_the_server_drops_is_told_while_the_run_goes_on_and_by_how_it_ends(
    tmp_path: Path, number: signal.Signals, found: str
) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    store = tmp_path / "runs" / "up" / "nats"
    settings = load(run_config_type(), file=tmp_path / "run.toml").config
    async with (
        EmbeddedServer(store, ServerConfig(max_file_bytes=4 << 30)) as server,
        await connect(server.url, run="up", name="tests", token=server.token) as bus,
    ):
        await bus.ensure_streams(settings.streams)
        named = await write_ledger(bus, tmp_path)
    up = await start(tmp_path)
    try:
        await ready(up)
        endpoint = read_endpoint(store)
        async with await connect(endpoint.url, run="up", name="tests", token=endpoint.token) as bus:
            code, said = await lachesis(tmp_path, "doctor", "--json")
            findings = {finding["check"]: finding for finding in json.loads(said)}
            assert findings["ledger"]["level"] == "OK"
            assert "6 entries follow one another" in findings["ledger"]["text"]
            damage_in_place(store, LEDGER, named.encode())
            os.kill(pids(tmp_path)["nats-server"], number)
            beat = await until_broken(bus)
            assert found in str(beat.stage.notices)
            if found == GAP:  # of what is not there at all a look at the store alone tells nothing
                code, said = await lachesis(tmp_path, "doctor", "--json")
                findings = {finding["check"]: finding for finding in json.loads(said)}
                assert code == 1
                assert findings["ledger"]["level"] == "FAIL"
                assert GAP in findings["ledger"]["text"]
            assert found in (await lachesis(tmp_path, "status", "--json"))[1]
            _, said = await lachesis(tmp_path, "health", "--json")
            assert found in said
        up.send_signal(signal.SIGTERM)
        with anyio.fail_after(120):
            output, _ = await up.communicate()
        text = output.decode()
        assert up.returncode == 2, text
        assert f"WARNING health: the ledger is broken: rl.ledger.up.main: {found}" in text  # as it was found
        assert f"lachesis: the ledger is broken: rl.ledger.up.main: {found}" in text  # as it ended
        assert "Restore the server's store from a backup" in text
        assert "Traceback" not in text
    finally:
        if up.returncode is None:
            up.kill()
            await up.communicate()
