"""`lachesis runs delete` on real servers: shown, confirmed, done; refused while the run goes on; killed half-way."""

import random
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec
import pytest
from integration.archive.world import CONFIG, RUN, World, a_group

from lachesis.pipeline.bus.config import ServerConfig, StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import InfrastructureError, StartupError
from lachesis.pipeline.retention.holds import holding
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import keys, subjects
from lachesis.schemas.subjects import ROLLOUTS
from lachesis.services.run.deletion import MODEL_MARK, delete_folder, measure_folder
from lachesis.services.run.known_runs import known_runs, register_run
from lachesis.services.run.supervisor_lease import DELETION_MARK, RunLease, lock_folder


@pytest.fixture
async def world(tmp_path: Path, anyio_backend: str) -> AsyncIterator[World]:
    """A run on a server that is not its own, which has room for others."""
    folder = tmp_path / "here"
    folder.mkdir()
    async with (
        EmbeddedServer(tmp_path / "server", ServerConfig(max_file_bytes=32 << 30)) as server,
        await connect(server.url, run=RUN, name="tests", token=server.token) as bus,
    ):
        await bus.ensure_streams(StreamsConfig())
        (tmp_path / "token").write_text(server.token)
        made = World(folder, bus)
        address = f'[nats]\nurl = "{server.url}"\ntoken_file = "../token"\n'
        (folder / "run.toml").write_text(f"{CONFIG}{address}")
        yield made


def config_of(world: World) -> RunConfig:
    config = load(run_config_type(), file=world.folder / "run.toml").config
    return msgspec.structs.replace(config, folder=str(world.folder / "runs" / RUN))


def left_in(folder: Path) -> Path:
    """Leave in a folder what a run leaves, and what is not of a run."""
    for name in ("checkpoints/step-00000003", "logs", "tensorboard", "weights", "model", "notes"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_bytes(b"x" * 1000)
    for name in (
        "metrics.jsonl",
        "run.toml",
        "pids.json",
        "notices.json",
        "tracked_alerts.msgpack",
        "web.token",
        "gateway.token",
        "gateway.url",
        "store.json",
        ".lock",
        "thesis.tex",
    ):
        (folder / name).write_text("# The configuration of run demo" if name == "run.toml" else "")
    (folder / "checkpoints/latest").write_text("step-00000003")
    return folder


@pytest.mark.slow
async def test_a_run_that_is_over_goes_whole_wherever_it_is_killed(world: World) -> None:
    bus = world.bus
    for n in range(1, 200):
        await world.store(a_group(n))
    await world.store(a_group(200, samples=8, tokens=90_000))
    await world.judge({n: a_group(n) for n in (1, 2, 3)})
    await world.json("replay", "--revision", "short")
    durable = subjects.durable("scorer", RUN, "live")
    async with bus.consume(ROLLOUTS, durable, [subjects.rollout(RUN)]) as deliveries:
        await anext(aiter(deliveries))
    await bus.put(keys.POLICY, b"x")
    await bus.client.jetstream().add_stream(name="lachesis_other_LEDGER", subjects=["rl.ledger.other.*"])
    folder = left_in(world.folder / "runs" / RUN)
    (folder / "model" / MODEL_MARK).touch()
    for name in ("notes", "thesis.tex"):
        shutil.rmtree(folder / name) if name == "notes" else (folder / name).unlink()

    code, out, err = await world.lachesis("runs", "delete", RUN)  # no service answers
    assert code == 1
    assert "209 messages" in out  # with the chunks of the large one
    assert "up to step-00000003" in err
    assert "not confirmed; nothing was done" in err
    async with holding(bus, RUN, "reader", {ROLLOUTS: 1}, about="a test"):
        assert "(a test): end that first" in await world.refusal("runs", "delete", RUN, "--yes")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_beat, Service(bus, "scorer", RUN))
        assert "its scorer is there" in await world.refusal("runs", "delete", RUN, "--yes")
        tasks.cancel_scope.cancel()
    with lock_folder(folder, "r"):
        assert "another supervisor runs in" in await world.refusal("runs", "delete", RUN, "--yes")
    assert len(await world.groups()) == 200
    assert measure_folder(folder).files == 17

    process = world.start("runs", "delete", RUN, "--yes")
    with anyio.fail_after(60):
        while process.poll() is None and not (folder / DELETION_MARK).exists():  # noqa: ASYNC110
            await anyio.sleep(0.001)
    await anyio.sleep(random.Random(1).random() * 0.02)
    process.send_signal(signal.SIGKILL)
    await world.ended(process)
    if folder.is_dir():  # else the machine was quicker
        assert "finish that with `lachesis runs delete demo`" in await world.refusal("up")
        await world.json("runs", "delete", RUN, "--yes")
    assert await bus.describe_streams() == []
    assert await bus.runs() == ["other"]
    assert not folder.exists()
    assert "there is nothing of a run demo" in await world.refusal("runs", "delete", RUN, "--yes")


@pytest.mark.slow
async def test_what_is_half_deleted_is_not_run_until_that_is_finished(world: World) -> None:
    await world.store(a_group(1))
    bus, folder = world.bus, world.folder / "runs" / RUN
    lease = RunLease(bus, RUN, folder, lambda: None, deletes=True)
    await lease.acquire()
    async with lease.held():
        await lease.begin_deletion()
    with pytest.raises(StartupError, match="run demo is half deleted: finish that with `lachesis runs delete demo`"):
        await RunLease(bus, RUN, folder, lambda: None).acquire()
    await world.json("runs", "delete", RUN, "--yes")
    assert await bus.describe_streams() == []


@pytest.mark.slow
async def test_a_run_with_a_server_of_its_own_goes_with_its_folder_and_other_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = left_in(tmp_path / "elsewhere" / "runs" / RUN)
    (folder / "run.toml").write_text(f'run = "{RUN}"\nfolder = "."\n')  # by hand
    register_run(RunConfig(run=RUN, folder=str(folder)), None)
    (tmp_path / "here").mkdir()
    world: World
    async with (
        EmbeddedServer(folder / "nats", ServerConfig(max_file_bytes=32 << 30)) as server,
        await connect(server.url, run=RUN, name="tests", token=server.token) as bus,
    ):
        await bus.ensure_streams(StreamsConfig())
        world = World(tmp_path / "here", bus)
        await world.store(a_group(1))
        done = await _delete(tmp_path / "here")
        assert (done.returncode, b"is in use by" in done.stderr) == (2, True)
        endpoint = (folder / "nats" / "endpoint.json").read_bytes()
        await server.stop()
        (folder / "nats" / "endpoint.json").write_bytes(endpoint)  # as a kill leaves it
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_beat, Service(bus, "scorer", RUN))  # it outlived its supervisor
            done = await _delete(tmp_path / "here")
            assert (done.returncode, b"its scorer is there" in done.stderr) == (2, True)
            tasks.cancel_scope.cancel()
    assert [one.folder for one in known_runs()] == [str(folder)]
    done = await _delete(tmp_path / "here")
    assert done.returncode == 0, done.stderr
    assert b"not of the run, and left there: model, notes, run.toml, thesis.tex" in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["model", "notes", "run.toml", "thesis.tex"]
    assert known_runs() == []


def test_the_folder_is_finished_wherever_its_deletion_was_killed(tmp_path: Path) -> None:
    for killed_after in range(20):
        folder = left_in(tmp_path / f"{killed_after}" / "run")
        (folder / DELETION_MARK).touch()
        deleted = 0

        class Killed(BaseException):
            pass

        def unlink(path: Path, *, real=Path.unlink, most: int = killed_after, **options: bool) -> None:
            nonlocal deleted
            if deleted == most:
                raise Killed
            deleted += 1
            real(path, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "unlink", unlink)
            with suppress(Killed):
                delete_folder(folder)
        if (folder / "run.toml").exists() or (folder / ".lock").exists():
            assert (folder / DELETION_MARK).exists()
        delete_folder(folder)
        assert sorted(path.name for path in folder.iterdir()) == ["model", "notes", "thesis.tex"]


async def _delete(folder: Path) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "lachesis", "runs", "delete", RUN, "--yes"]
    return await anyio.run_process(command, cwd=folder, check=False)


async def _beat(service: Service) -> None:
    while True:
        with suppress(InfrastructureError):  # its server is away
            await service.heartbeat()
        await anyio.sleep(0.2)
