"""A store or a folder of a run that is gone is missed: while the run goes on, and before anything begins again."""

import errno
import shutil
from collections.abc import AsyncIterator
from itertools import cycle
from pathlib import Path

import anyio
import msgspec
import pytest
from stages import run_governor

from lachesis.pipeline.bus.api import StreamUsage
from lachesis.pipeline.bus.config import ConnectionConfig, StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.errors import HistoryLostError, NotFoundError, StartupError, StreamMissingError, leaves
from lachesis.pipeline.ledger.checkpoint_state import CHECKPOINTS
from lachesis.pipeline.retention.recovery_record import RecoveryPlan
from lachesis.pipeline.runtime import lost_streams
from lachesis.pipeline.runtime.service import open_service
from lachesis.pipeline.runtime.store_marks import MARKS_FILE, MarkWriter
from lachesis.schemas import keys, subjects
from lachesis.schemas.annotations import StreamMark
from lachesis.schemas.codec import encode
from lachesis.schemas.ledger import GENESIS, TrainReport
from lachesis.schemas.subjects import BUCKET, CALLS, EVENTS, LEDGER, REPLAY, ROLLOUTS, STREAMS, TEACHER, WEIGHTS
from lachesis.services.cli.recover import describe_plan
from lachesis.services.preflight.server import check_server
from lachesis.services.run import recovery
from lachesis.services.run.deletion import delete_run
from lachesis.services.run.known_runs import register_run
from lachesis.services.run.recovery import recover_run
from lachesis.services.run.store import (
    STORE_FILE,
    keep_record,
    make_streams,
    refuse_foreign_folder,
    refuse_lost_folder,
    refuse_unknown_history,
)
from lachesis.services.supervisor.store_place import StorePlace

RUN = "r"
WAYS_OUT = r"(?s)Put the store back .*--run NAME.*`lachesis runs delete r`"


@pytest.fixture
def config(tmp_path: Path, streams_config: StreamsConfig, fresh_server: EmbeddedServer) -> RunConfig:
    """A run whose server is not its own, in a folder that is there."""
    folder = tmp_path / "runs/r"
    folder.mkdir(parents=True)
    return RunConfig(
        run=RUN,
        folder=str(folder),
        streams=streams_config,
        nats=ConnectionConfig(url=fresh_server.url),
        environments={"words": EnvironmentConfig(kind="gateway")},
    )


@pytest.fixture
def server_token(fresh_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file by which a command reaches the server; a recovery waits for no service here."""
    monkeypatch.setattr(recovery, "SILENCE_S", 0.1)
    token = tmp_path / "token"
    token.write_text(fresh_server.token)
    token.chmod(0o600)
    return token


def with_token(config: RunConfig, token: Path) -> RunConfig:
    assert config.nats is not None
    connection = ConnectionConfig(url=config.nats.url, token_file=str(token), connect_timeout_s=10.0)
    return msgspec.structs.replace(config, nats=connection)


@pytest.fixture
async def bus(fresh_server: EmbeddedServer) -> AsyncIterator[NatsBus]:
    async with await connect(fresh_server.url, run=RUN, name="tests", token=fresh_server.token) as connected:
        yield connected


@pytest.mark.parametrize("remembers", ["folder", "store"])
@pytest.mark.parametrize("gone", [(BUCKET,), (ROLLOUTS,), (EVENTS, LEDGER), (*STREAMS, BUCKET)], ids="+".join)
async def test_what_is_gone_is_named_and_nothing_is_made_in_its_place(
    bus: NatsBus, config: RunConfig, gone: tuple[str, ...], remembers: str
) -> None:
    await make_streams(bus, config)
    assert not await make_streams(bus, config), "that it is made again changes nothing"
    for kind in gone:
        await bus.delete_stream(kind)
    if remembers == "store":
        (config.path / STORE_FILE).unlink()
    before = {one.name for one in await bus.describe_streams()}
    if remembers == "store" and len(gone) > len(STREAMS):
        assert len(await make_streams(bus, config)) == len(gone), "nobody remembers it: it is new"
        return
    with pytest.raises(HistoryLostError, match=WAYS_OUT):
        await make_streams(bus, config)
    assert {one.name for one in await bus.describe_streams()} == before


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "harm"), list(zip([*STREAMS, BUCKET], cycle(["deleted", "made again"]))))
async def test_a_run_goes_on_without_a_stream_that_is_gone_by_the_command_that_is_named(
    bus: NatsBus, config: RunConfig, server_token: Path, kind: str, harm: str
) -> None:
    config = with_token(config, server_token)
    await make_streams(bus, config)
    rollouts = subjects.rollout(RUN, "words")
    subject_of = {
        ROLLOUTS: rollouts, EVENTS: subjects.event("eval", RUN, "live", "words"),
        LEDGER: subjects.state(RUN, "governor", "live", "0"), TEACHER: subjects.logprobs(RUN, "live", "words"),
        REPLAY: subjects.replay("rescore", RUN, "again", "words"), WEIGHTS: subjects.weights_heads(RUN),
        CALLS: subjects.call(RUN, "words"),
    }  # fmt: skip
    for number in range(3):
        for subject in subject_of.values():
            await bus.publish(subject, b"x", msg_id=f"{subject}.{number}")
    marks = await MarkWriter.open(bus, RUN)
    newest = await bus.get_head(ROLLOUTS, 3)
    await marks.write(StreamMark(3, newest.time_ns), now=True)
    (config.path / MARKS_FILE).write_bytes(msgspec.json.encode(marks.newest))
    await bus.delete_stream(kind)
    if harm == "made again":
        await bus.ensure_streams(config.streams)  # as `nats stream add` does
    with pytest.raises(HistoryLostError, match=f"{subjects.stream_name(RUN, kind)}.*or `lachesis runs recover {RUN}`"):
        await make_streams(bus, config)
    there = {one.name for one in await bus.describe_streams()}
    assert (await recover_run(config, lambda *_: False))[0] is not None
    assert {one.name for one in await bus.describe_streams()} == there, "nobody agreed to any change"
    with pytest.raises(HistoryLostError, match=f"or `lachesis runs recover {RUN}`"):
        await make_streams(bus, config)  # no supervisor agreed
    shown: list[RecoveryPlan] = []
    plan, _ = await recover_run(config, lambda plan, _: not shown.append(plan))
    assert plan is not None
    assert bool(shown[0].makes) == (harm == "deleted")
    assert subjects.stream_name(RUN, kind) in "\n".join(plan.problems)
    assert [(one.stream, one.last) for one in plan.losses if kind != BUCKET] == ([] if kind == BUCKET else [(kind, 3)])
    await make_streams(bus, config)
    assert (await recover_run(config, lambda *_: False))[0] is None
    if kind in subjects.fillers(RUN):
        assert (await bus.publish(subject_of[kind], b"x", msg_id="later")).seq > 3, "a sequence would be used again"


async def test_a_recovery_that_is_confirmed_only_in_part_says_so(
    bus: NatsBus, config: RunConfig, server_token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_token(config, server_token)
    await make_streams(bus, config)
    plans = iter([RecoveryPlan(run=RUN, id=str(number), problems=["lost"]) for number in range(2)])
    answers = iter([True, False])

    async def plan_next(*_: object) -> RecoveryPlan:
        return next(plans)

    async def apply(*_: object) -> Path:
        return Path("done.json")

    monkeypatch.setattr("lachesis.services.run.recovery.make_plan", plan_next)
    monkeypatch.setattr("lachesis.services.run.recovery.apply_plan", apply)
    with pytest.raises(StartupError, match=r"not recovered yet: done\.json keeps .* Repeat `lachesis runs recover"):
        await recover_run(config, lambda *_: next(answers))


@pytest.mark.parametrize("rounds", [4, 5])
async def test_a_recovery_says_if_more_is_wrong_after_its_last_round(
    bus: NatsBus, config: RunConfig, server_token: Path, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    config = with_token(config, server_token)
    await make_streams(bus, config)
    plans = iter(
        [*(RecoveryPlan(run=RUN, id=str(number), problems=[f"lost {number}"]) for number in range(rounds)), None]
    )

    async def plan_next(*_: object) -> RecoveryPlan | None:
        return next(plans)

    async def apply(*_: object) -> Path:
        return Path("done.json")

    monkeypatch.setattr("lachesis.services.run.recovery.make_plan", plan_next)
    monkeypatch.setattr("lachesis.services.run.recovery.apply_plan", apply)
    if rounds == 4:
        assert (await recover_run(config, lambda *_: True))[1] == "done.json"
    else:
        with pytest.raises(
            StartupError, match=r"not recovered yet: done\.json keeps .*now this is wrong: lost 4\. Repeat"
        ):
            await recover_run(config, lambda *_: True)


async def test_a_store_of_which_nothing_is_left_is_not_begun_anew_by_a_recovery(
    bus: NatsBus, config: RunConfig, server_token: Path
) -> None:
    config = with_token(config, server_token)
    await make_streams(bus, config)
    for kind in (*STREAMS, BUCKET):
        await bus.delete_stream(kind)
    with pytest.raises(HistoryLostError, match=r"back \(.*backup\); or begin another run"):
        await make_streams(bus, config)
    with pytest.raises((HistoryLostError, NotFoundError)):
        await recover_run(config, lambda *_: True)
    assert await bus.describe_streams() == []


async def test_a_stream_that_was_made_again_is_another(bus: NatsBus, config: RunConfig) -> None:
    await make_streams(bus, config)
    await bus.delete_stream(EVENTS)
    await bus.ensure_streams(config.streams)  # as `nats stream add` does
    with pytest.raises(HistoryLostError, match=r"other streams are there .*lachesis_r_EVENTS"):
        await make_streams(bus, config)


async def test_another_store_with_all_streams_is_not_the_run_s(
    bus: NatsBus, config: RunConfig, nats_server: EmbeddedServer
) -> None:
    await make_streams(bus, config)
    async with await connect(nats_server.url, run=RUN, name="tests", token=nats_server.token) as other:
        await other.ensure_streams(config.streams)
        try:
            with pytest.raises(HistoryLostError, match="other streams are there"):
                await make_streams(other, config)
        finally:
            for kind in (*STREAMS, BUCKET):
                await other.delete_stream(kind)


async def test_a_store_whose_messages_were_deleted_is_missed(
    bus: NatsBus, config: RunConfig, fresh_server: EmbeddedServer
) -> None:
    await make_streams(bus, config)
    await bus.publish(subjects.ledger(RUN, "main"), b"x", msg_id="1")
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keep_record, bus, config)
            while b'"LEDGER"' not in (config.path / STORE_FILE).read_bytes().partition(b"filled")[2]:  # noqa: ASYNC110
                await anyio.sleep(0.05)
            tasks.cancel_scope.cancel()
    await fresh_server.stop()
    for messages in fresh_server.store.rglob("msgs"):
        shutil.rmtree(messages)
    await fresh_server.start()
    with pytest.raises(HistoryLostError, match=r"all messages of .*lachesis_r_LEDGER are gone"):
        await make_streams(bus, config)


async def test_a_stream_that_is_known_to_have_held_messages_is_not_asked_for_again(
    bus: NatsBus, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await make_streams(bus, config)
    await bus.publish(subjects.ledger(RUN, "main"), b"x", msg_id="1")
    asked: list[str] = []
    usage = bus.usage

    async def counted(kind: str) -> StreamUsage:
        asked.append(kind)
        return await usage(kind)

    monkeypatch.setattr(bus, "usage", counted)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keep_record, bus, config)
            while asked.count("REPLAY") < 3:  # noqa: ASYNC110 - each round asks for it
                await anyio.sleep(0.05)
            tasks.cancel_scope.cancel()
    assert asked.count(LEDGER) == 1


async def test_a_run_that_an_older_build_began_is_taken_over(bus: NatsBus, config: RunConfig) -> None:
    await bus.ensure_streams(config.streams)
    await make_streams(bus, config)
    assert await bus.value(keys.STORE) is not None
    await bus.delete_stream(LEDGER)
    with pytest.raises(HistoryLostError, match="lachesis_r_LEDGER of run r is not there"):
        await make_streams(bus, config)


async def test_the_folder_of_another_run_is_neither_run_in_nor_recovered_nor_deleted(
    bus: NatsBus, config: RunConfig, server_token: Path
) -> None:
    config = with_token(config, server_token)
    await make_streams(bus, config)
    refuse_foreign_folder(config)
    other = msgspec.structs.replace(config, run="s")
    there = sorted(config.path.rglob("*"))
    for use in (make_streams(bus, other), delete_run(other, lambda _: True), recover_run(other, lambda *_: True)):
        with pytest.raises(StartupError, match=rf"folder of run {RUN}, not of s"):
            await use
    with pytest.raises(StartupError, match=rf"folder of run {RUN}, not of s.*Nothing was changed.*--run {RUN}"):
        refuse_foreign_folder(other)
    assert "is the folder of run r" in str(await check_server(other))
    assert sorted(config.path.rglob("*")) == there
    assert await bus.runs() == [RUN]
    await make_streams(bus, config)


async def test_what_the_folder_remembers_is_not_guessed(bus: NatsBus, config: RunConfig) -> None:
    await make_streams(bus, config)
    (config.path / STORE_FILE).write_bytes(b"{")
    with pytest.raises(StartupError, match="delete this file"):
        await make_streams(bus, config)


async def test_a_record_that_cannot_be_opened_now_is_not_to_be_deleted(
    bus: NatsBus, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await make_streams(bus, config)

    def refuse(_: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("lachesis.services.run.store.read_small_file", refuse)
    with pytest.raises(StartupError, match="Too many open files; mend that") as raised:
        await make_streams(bus, config)
    assert "delete" not in str(raised.value)


async def test_the_governor_names_a_stream_that_is_deleted_and_ends(
    bus: NatsBus, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_streams, "_PERIOD_S", 0.05)
    monkeypatch.setattr(lost_streams, "_BELIEVE_S", 0.5)
    await make_streams(bus, config)
    ended: list[BaseException] = []
    async with open_service(bus, "governor", RUN) as service:

        async def govern() -> None:
            try:
                await run_governor(service, config)
            except* (HistoryLostError, StreamMissingError) as errors:
                ended.extend(leaves(errors))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(govern)
                while service.vitals.state != "ok":  # noqa: ASYNC110
                    await anyio.sleep(0.02)
                await bus.delete_stream(EVENTS)
            assert "lachesis_r_EVENTS" in str(ended)
            with pytest.raises(
                HistoryLostError, match="lachesis_r_EVENTS of run r is not there any more: deleted under"
            ):
                await run_governor(service, config)  # its next life


def test_a_folder_that_is_gone_is_missed_and_can_be_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    config = RunConfig(run=RUN, folder=str(tmp_path / "r"))
    refuse_lost_folder(config)  # there never was one
    register_run(config, None)
    refuse_lost_folder(config)  # it ended before it stored anything
    register_run(config, None, stored=True)
    register_run(config, None)
    with pytest.raises(HistoryLostError, match=WAYS_OUT):
        refuse_lost_folder(config)
    refuse_lost_folder(msgspec.structs.replace(config, nats=ConnectionConfig(url="nats://127.0.0.1:1")))


@pytest.mark.parametrize("what", ["", "store", "store/jetstream", "a stream", "a file"])
async def test_what_is_deleted_under_a_running_server_is_noticed(
    tmp_path: Path, streams_config: StreamsConfig, what: str
) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / ".lock").touch()
    async with (
        EmbeddedServer(folder / "store") as server,
        await connect(server.url, run=RUN, name="tests", token=server.token) as bus,
    ):
        await bus.ensure_streams(streams_config)
        await bus.publish(subjects.rollout(RUN, "words"), b"x", msg_id="1")
        stream = next((folder / "store").rglob(f"streams/{subjects.stream_name(RUN, ROLLOUTS)}"))
        path = {"a stream": stream, "a file": stream / "msgs" / "1.blk"}.get(what, folder / what)
        place = StorePlace(folder, server.store)
        for _ in range(5):
            assert place.missed(server.pid) == []
        path.unlink() if path.is_file() else shutil.rmtree(path)
        looks = [place.missed(server.pid) for _ in range(4)]
        assert looks[:2] == [[], []], "the server itself replaces files"
        assert path in looks[-1]


async def test_history_of_which_a_new_folder_knows_nothing_is_said_and_taken_over_by_one_command(
    bus: NatsBus, config: RunConfig, server_token: Path
) -> None:
    """Whether such a store is older than the run was cannot be known."""
    config = with_token(config, server_token)
    await make_streams(bus, config)
    await refuse_unknown_history(bus, config)
    (config.path / STORE_FILE).unlink()
    await refuse_unknown_history(bus, config)  # streams without a message in the ledger are no history
    report = TrainReport(
        run=RUN, trainer="main", lineage="a", term="t", step=3, ledger_index=-1, chain=GENESIS, next_batch=3,
        policy_version="3-a-b", checkpoint="/elsewhere/checkpoints/step-00000003",
    )  # fmt: skip
    reports = subjects.state(RUN, "trainer", "live", "main")
    await bus.publish(reports, encode(report), msg_id="report")
    with pytest.raises(HistoryLostError, match=f"knows nothing.*Nothing was changed.*`lachesis runs recover {RUN}`"):
        await refuse_unknown_history(bus, config)
    await make_streams(bus, config)  # as `lachesis init` does
    with pytest.raises(HistoryLostError, match="knows nothing"):
        await refuse_unknown_history(bus, config)
    shown: list[RecoveryPlan] = []
    plan, _ = await recover_run(config, lambda plan, _: not shown.append(plan))
    assert plan is not None
    assert plan.checkpoint is None, "the checkpoints may be on the trainer's machine"
    assert "/elsewhere/checkpoints/step-00000003, of step 3" in "\n".join(describe_plan(plan, begun=False))
    assert await bus.last(LEDGER, reports) is not None
    await refuse_unknown_history(bus, config)
    (config.path / CHECKPOINTS).mkdir()  # as a trainer makes it
    with pytest.raises(StartupError, match=r"trained 3 steps.*/elsewhere/checkpoints/step-.*--from-first-model"):
        await recover_run(config, lambda *_: True)
    assert await bus.last(LEDGER, reports) is not None
    plan, done = await recover_run(config, lambda plan, _: not shown.append(plan), from_first_model=True)
    assert plan is not None
    assert plan.checkpoint is not None
    assert (plan.checkpoint.from_step, plan.checkpoint.step) == (3, 0)
    assert done is not None
    await refuse_unknown_history(bus, config)
    assert await bus.last(LEDGER, reports) is None
    assert await recover_run(config, lambda *_: False) == (None, None)
