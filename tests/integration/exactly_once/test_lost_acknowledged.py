"""A store loses the newest unread messages: their writers miss them, and one command leads back."""

import os
import signal
from pathlib import Path

import pytest
from integration.damage import cut_last_message
from integration.servers import RUN

from lachesis.pipeline.bus.config import ServerConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.errors import HistoryLostError
from lachesis.pipeline.ledger.rollbacks import refuse_rolled_back
from lachesis.pipeline.retention.recovery import apply_plan
from lachesis.pipeline.retention.recovery_plan import make_plan
from lachesis.pipeline.runtime import stream_marks
from lachesis.pipeline.runtime.lost_streams import find_streams
from lachesis.pipeline.runtime.store_marks import EndWatch, find_lost_acknowledged
from lachesis.schemas import keys, subjects
from lachesis.schemas.subjects import BUCKET, STREAMS
from lachesis.services.cli.recover import describe_plan
from lachesis.services.stage_settings import ledger_settings, recovery_settings

from .conftest import SUMS

SUBJECTS = {
    "ROLLOUTS": subjects.rollout(RUN, "sums"),
    "EVENTS": subjects.event("eval", RUN, "live", "sums"),
    "REPLAY": subjects.replay("rescore", RUN, "again", "sums"),
    "TEACHER": subjects.logprobs(RUN, "live", "sums"),
    "WEIGHTS": subjects.weights_heads(RUN),
    "LEDGER": subjects.state(RUN, "governor", "live", "0"),
    "CALLS": subjects.call(RUN, "sums"),
}
EVERY_STORE = (*STREAMS, BUCKET)

pytestmark = pytest.mark.usefixtures("anyio_backend")


async def store(bus: NatsBus, stream: str, name: str) -> None:
    if stream == BUCKET:
        await bus.put(keys.resume("sums"), name.encode())
    else:
        await bus.publish(SUBJECTS[stream], name.encode(), msg_id=f"{stream}-{name}")


async def kill_and_cut(server: EmbeddedServer, stream: str) -> None:
    """Kill the server, cut its stream's newest message off, and start it again: no marks tell of that message."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    await server.wait()
    cut_last_message(server.store, stream)
    await server.start_again()


def config_of(folder: Path) -> RunConfig:
    environments = {"sums": EnvironmentConfig(kind=f"{SUMS}:Sums", samples=2)}
    return RunConfig(run=RUN, folder=str(folder), environments=environments)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.mark.slow
async def test_a_newest_message_that_nobody_read_is_missed_and_recovered_from(
    tmp_path, folder, streams_config, monkeypatch
):
    monkeypatch.setattr(stream_marks, "BELIEVE_LOSS_S", 0.5)
    config = config_of(folder)
    async with EmbeddedServer(tmp_path / "store", ServerConfig(max_file_bytes=4 << 30)) as server:
        options = {"run": RUN, "token": server.token}
        async with (
            await connect(server.url, name="tests", **options) as bus,
            await connect(server.url, name=f"{RUN}.environment-sums", **options) as writer,
        ):
            writer.keep_acknowledged(folder)
            await bus.ensure_streams(streams_config)
            for stream in EVERY_STORE:
                await store(writer, stream, "first")
            watch = EndWatch(bus, RUN, folder)
            await watch.read_acknowledged()
            await watch.update(await find_streams(bus), None)
            for stream in EVERY_STORE:
                await store(writer, stream, f"read by nobody, {stream}")
                end = writer.acknowledged[stream]
                await kill_and_cut(server, stream)
                assert (await bus.usage(stream)).last < end
                with pytest.raises(
                    HistoryLostError, match=rf"environment-sums,.* {end} of {stream},.* message is gone"
                ):
                    await watch.update(await find_streams(bus), None)
                with pytest.raises(HistoryLostError, match=f"stream {stream} stored a new message at sequence"):
                    await store(writer, stream, f"newer, {stream}")
                with pytest.raises(
                    HistoryLostError, match=rf"of {stream}, but another message is stored there now.*recover"
                ):
                    await refuse_rolled_back(bus, ledger_settings(config))
                plan = await make_plan(bus, recovery_settings(config), f"cut-{stream}")
                assert plan is not None
                assert [(loss.stream, loss.last) for loss in plan.losses] == [(stream, end)]
                assert f"  {stream}, sequences {end} to {end} (1): " in "\n".join(describe_plan(plan, begun=False))
                await apply_plan(bus, recovery_settings(config), plan)
                await refuse_rolled_back(bus, ledger_settings(config))
                watch = EndWatch(bus, RUN, folder)
                await watch.read_acknowledged()
                await watch.update(await find_streams(bus), None)


async def test_what_was_deleted_or_trimmed_is_missed_by_no_writer(tmp_path, folder, streams_config):
    async with (
        EmbeddedServer(tmp_path / "store", ServerConfig(max_file_bytes=4 << 30)) as server,
        await connect(server.url, run=RUN, name=f"{RUN}.supervisor", token=server.token) as bus,
    ):
        bus.keep_acknowledged(folder)
        await bus.ensure_streams(streams_config)
        for stream in EVERY_STORE:
            for name in ("first", "second"):
                await store(bus, stream, name)
        for stream, subject in SUBJECTS.items():
            await bus.delete_all(stream, [subject])
        await bus.delete(keys.resume("sums"))
        assert await find_lost_acknowledged(bus, RUN, folder) == []
        await bus.delete_stream("REPLAY")
        await bus.ensure_streams(streams_config)
        await store(bus, "REPLAY", "of another stream")
        assert await find_lost_acknowledged(bus, RUN, folder) == []
