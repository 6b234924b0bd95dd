"""The commands against a real server, in processes of their own, on a path with a space and without a terminal."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from lachesis.pipeline.bus.config import ServerConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.runtime.service_metrics import ServiceMetrics
from lachesis.schemas import keys, subjects
from lachesis.schemas.annotations import DeadLetter, GroupScore, ScoreEvent
from lachesis.schemas.codec import Event, encode
from lachesis.schemas.control import Heartbeat, PolicyRecord
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.ledger import Batch, GroupRef, LedgerEntry, StepTimes, TrainReport
from lachesis.schemas.planning_header import PLAN_HEADER, Plan

SCORE = subjects.event("score", "demo", "live", "words")


class Run:
    """A run named demo with its server, in a folder of its own."""

    def __init__(self, folder: Path, server: EmbeddedServer, bus: NatsBus) -> None:
        self.folder, self.server, self.bus = folder, server, bus

    async def lachesis(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "lachesis", *arguments, "--run", "demo"]
        with anyio.fail_after(120):
            return await anyio.run_process(command, cwd=self.folder, check=False)

    async def json(self, *arguments: str) -> Any:
        done = await self.lachesis(*arguments, "--json")
        assert done.returncode == 0, done.stderr + done.stdout
        return json.loads(done.stdout)

    async def publish(self, subject: str, event: Event | bytes, msg_id: str) -> int:
        data = event if isinstance(event, bytes) else encode(event)
        return (await self.bus.publish(subject, data, msg_id=msg_id)).seq


@pytest.fixture
async def run(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Run]:
    store = tmp_path / "runs" / "demo" / "nats"
    folder = tmp_path / "with a space"
    folder.mkdir()
    (folder / "runs").symlink_to(tmp_path / "runs")
    async with (
        EmbeddedServer(store, ServerConfig(max_file_bytes=32 << 30)) as server,
        await connect(server.url, run="demo", name="tests", token=server.token) as bus,
    ):
        yield Run(folder, server, bus)


def score(item: str) -> ScoreEvent:
    group = GroupScore(group=new_group_id(), seq=1, item=item, policy_step=0, scores=[1.0], ratings={}, lengths=[1])
    return ScoreEvent(run="demo", env="words", revision="live", ensemble="e", raters={}, groups=[group])


@pytest.mark.slow
async def test_init_makes_the_streams_once_and_doctor_agrees(run: Run) -> None:
    before = await run.lachesis("doctor", "--json")
    assert before.returncode == 1
    missing = next(row for row in json.loads(before.stdout) if row["check"] == "streams")
    assert (missing["level"], missing["mend"]) == ("FAIL", "lachesis init")

    done = await run.lachesis("init")
    assert done.returncode == 0
    assert b"created lachesis_demo_ROLLOUTS" in done.stdout
    again = await run.lachesis("init")
    assert again.stdout.startswith(b"nothing to do")

    findings = await run.json("doctor")
    by_check = {row["check"]: row for row in findings}
    assert by_check["streams"]["level"] == by_check["clock"]["level"] == by_check["server"]["level"] == "OK"
    assert [row for row in findings if row["level"] == "FAIL"] == []
    assert run.server.token not in str(findings)

    changed = await run.lachesis("doctor", "--set", f"streams.events_bytes={64 << 20}")
    assert changed.returncode == 1
    assert f"max_bytes is {1 << 29}, should be {64 << 20}".encode() in changed.stdout
    migrated = await run.lachesis("init", "--set", f"streams.events_bytes={64 << 20}")
    assert b"changed lachesis_demo_EVENTS: max_bytes" in migrated.stdout


@pytest.mark.slow
async def test_a_secret_left_open_and_a_nearly_full_stream_are_found(run: Run) -> None:
    small = ("--set", f"streams.events_bytes={1 << 20}")
    await run.lachesis("init", *small)
    await run.publish(SCORE, b"x" * 900_000, "1")
    (run.server.store / "endpoint.json").chmod(0o644)
    done = await run.lachesis("doctor", *small)
    assert done.returncode == 1
    assert b"chmod 600" in done.stdout
    assert b"86 % of 1.0 MiB taken" in done.stdout


@pytest.mark.slow
async def test_status_shows_what_is_known_and_none_of_what_is_not(run: Run) -> None:
    empty = await run.json("status")
    assert (empty["streams"], empty["ledger"], empty["policy"], empty["trainer"]) == ([], None, None, None)
    assert {row["state"] for row in empty["services"]} == {"silent"}

    await run.lachesis("init")
    totals = {"batched": 2, "stale": 1, "sequences": 12, "batched_sequences": 8}
    entry = ledger_entry(next_batch=4, totals=totals)
    await run.publish(subjects.ledger("demo", "main"), entry, "l")
    await run.publish(subjects.state("demo", "trainer", "live", "main"), train_report(step=9, next_batch=4), "t")
    record = PolicyRecord(run="demo", version="9-a-b", weights="w", tokenizer_hash="h", written_ns=1)
    await run.bus.put(keys.POLICY, encode(record))
    vitals = ServiceMetrics()
    vitals.state, vitals.handled, vitals.lag = "ok", 12, 5
    vitals.wait.record(0.25)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(beat, run.bus, vitals)
        status = await run.json("status")
        text = (await run.lachesis("status")).stdout.decode()
        tasks.cancel_scope.cancel()

    assert status["ledger"]["outcomes"] == {"batched": 2, "stale": 1}
    assert status["trainer"]["step"] == status["policy"]["step"] == 9
    scorer = next(row for row in status["services"] if row["service"] == "scorer")
    assert (scorer["state"], scorer["handled"], scorer["lag"]) == ("ok", 12, 5)
    assert scorer["wait"]["p50"] == pytest.approx(0.25, rel=0.011)
    assert scorer["process"] == {"p50": None, "p95": None, "p99": None}
    assert {row["name"] for row in status["streams"]} >= {
        subjects.stream_name("demo", kind) for kind in subjects.STREAMS
    }
    assert "2 batched, 1 stale" in text
    assert "250 ms / 250 ms / 250 ms" in text
    assert "\x1b" not in text


@pytest.mark.slow
async def test_status_answers_beside_a_server_that_stands_still_with_what_the_folder_tells(run: Run) -> None:
    await run.lachesis("init")
    figures = {"train/step": 7.0, "reward/mean": 0.5, "eval/words/avg@4": 0.25, "eval/words/step": 5.0}
    (run.folder / "runs" / "demo" / "metrics.jsonl").write_text(f"{json.dumps(figures)}\n")
    os.kill(run.server.pid, signal.SIGSTOP)
    try:
        status = await run.json("status")
        text = (await run.lachesis("status")).stdout.decode()
    finally:
        os.kill(run.server.pid, signal.SIGCONT)
    assert (status["step"], status["reward"], status["evaluations"][0]["rate"]) == (7, 0.5, 0.25)
    assert {row["state"] for row in status["services"]} == {"unknown"}
    assert text.startswith("run demo at step 7\n")
    assert f"problem  the run's server (pid {run.server.pid}, {run.server.url}) does not answer" in text
    assert "reward   0.5 in the newest step\nheld out words 0.25 (step 5)\n" in text
    assert not [line for line in text.splitlines() if line.startswith(("policy", "ledger"))]  # not known


@pytest.mark.slow
async def test_a_run_that_took_all_its_steps_is_finished_and_nothing_of_it_is_silent(run: Run) -> None:
    await run.lachesis("init")
    report = train_report(step=9, next_batch=9)
    await run.publish(subjects.state("demo", "trainer", "live", "main"), report, "t")
    vitals = ServiceMetrics()
    vitals.state = "ok"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(beat, run.bus, vitals)
        some = await run.json("status", "--set", "training.steps=9")
        text = (await run.lachesis("status", "--set", "training.steps=9")).stdout.decode()
        going = (await run.lachesis("status", "--set", "training.steps=10")).stdout.decode()
        tasks.cancel_scope.cancel()
    assert some["finished"]
    assert not some["ended"]
    assert {row["state"] for row in some["services"]} == {"ok", "finished"}
    assert text.startswith("run demo finished at step 9; its services are about to end")
    assert "silent" not in text
    assert going.startswith("run demo at step 9 of 10, on nats-server")
    assert "silent, so dead, cut off, or held up by code of its own: " in going
    ended = (await run.lachesis("status", "--set", "training.steps=9")).stdout.decode()
    assert ended.startswith("run demo finished at step 9\n")
    assert " -  " not in ended  # no row of dashes
    rows = [line.split()[0] for line in ended.splitlines()[-3:]]
    assert rows == ["stream", "lachesis_demo_LEDGER", "KV_lachesis_demo"]  # the others are empty


def ledger_entry(**fields: Any) -> LedgerEntry:
    return LedgerEntry(
        run="demo", trainer="main", index=0, previous="0" * 64, watermark=1, resolved=b"", events_cursor=1, **fields
    )  # fmt: skip


def train_report(step: int, next_batch: int, steps: Sequence[StepTimes] = ()) -> TrainReport:
    return TrainReport(
        run="demo", trainer="main", lineage="a", term="t", step=step, ledger_index=0, chain="0" * 64,
        next_batch=next_batch, policy_version=f"{step}-a-b", checkpoint="c", steps=list(steps),
    )  # fmt: skip


@pytest.mark.slow
async def test_processes_that_share_a_name_are_told_by_status_top_and_doctor(run: Run) -> None:
    await run.lachesis("init")
    told = "2 processes of scorer call themselves replica gpu-1 (pid 1 on gpu-1, pid 2 on gpu-1)"
    async with anyio.create_task_group() as tasks:
        for pid in (1, 2):
            tasks.start_soon(speak, run.bus, pid)
        status = await run.json("status")
        top = await run.json("top", "--window", "2")
        findings = {row["check"]: row for row in await run.json("doctor")}
        tasks.cancel_scope.cancel()
    for shown in (status, top):
        assert [told in notice["what"] for notice in shown["notices"] if notice["source"] == "scorer"] == [True]
    assert (findings["replicas"]["level"], "--replica" in findings["replicas"]["mend"]) == ("WARN", True)
    assert findings["replicas"]["text"].startswith(told)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["top", "tail score"])
async def test_a_server_that_was_frozen_is_named_with_the_way_out(run: Run, command: str) -> None:
    await run.lachesis("init")
    pid = json.loads((run.server.store / "endpoint.json").read_bytes())["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        done = await run.lachesis(*command.split())
    finally:
        os.kill(pid, signal.SIGCONT)
    assert done.returncode == 2
    assert f"the run's server (pid {pid}, {run.server.url}) runs and does not answer".encode() in done.stderr
    assert f"kill -CONT {pid}".encode() in done.stderr


async def speak(bus: NatsBus, pid: int) -> None:
    event = Heartbeat(
        schema_version=1,
        run="demo", service="scorer", instance=f"{pid}-a", pid=pid, time_ns=0, stage=ServiceMetrics().report(),
        replica="gpu-1", host="gpu-1",
    )  # fmt: skip
    while True:
        await bus.broadcast(subjects.heartbeat("demo", "scorer", event.instance), encode(event))
        await anyio.sleep(0.2)


async def beat(bus: NatsBus, vitals: ServiceMetrics) -> None:
    while True:
        event = Heartbeat(
            host="h",
            schema_version=1,
            run="demo",
            service="scorer",
            instance="1-a",
            pid=1,
            time_ns=0,
            stage=vitals.report(),
        )
        await bus.broadcast(subjects.heartbeat("demo", "scorer", "1-a"), encode(event))
        await bus.broadcast(subjects.heartbeat("demo", "scorer", "1-b"), b"\xff no heartbeat")
        await anyio.sleep(0.2)


@pytest.mark.slow
async def test_tail_from_the_start_filtered_and_the_last_ones(run: Run) -> None:
    await run.lachesis("init")
    for number in range(5):
        await run.publish(SCORE, score(str(number)), f"s{number}")
    await run.publish(SCORE, b"\x81garbage", "bad")
    await run.publish(subjects.event("reward", "demo", "live", "words"), b"", "r")

    async def lines(*arguments: str) -> list[Any]:
        done = await run.lachesis("tail", *arguments, "--json", "--no-follow")
        assert done.returncode == 0, done.stderr + done.stdout
        return [json.loads(line) for line in done.stdout.splitlines()]

    everything = await lines("rl.score.>", "--since-start")
    assert [line["seq"] for line in everything] == [1, 2, 3, 4, 5, 6]
    assert everything[-1]["event"]["bytes"] == 8
    assert "ScoreEvent" in everything[-1]["event"]["error"]
    assert [line["event"]["groups"][0]["item"] for line in await lines("score", "--last", "3", "--where", "seq=4")] == [
        "3"
    ]
    assert [line["seq"] for line in await lines("score", "--since-start", "--where", "groups.item=2")] == [3]
    assert [line["subject"] for line in await lines("rl.*.demo.>", "--last", "1")] == ["rl.reward.demo.live.words"]
    assert await lines("score") == []


@pytest.mark.slow
async def test_tail_follows_and_ends_quietly_when_its_reader_has_enough(run: Run) -> None:
    await run.lachesis("init")
    read, write = os.pipe()
    tail = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "lachesis", "tail", "rl.>", "--run", "demo", "--json",
        cwd=run.folder, stdout=write, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    os.close(write)
    await publish_until_readable(run, read)
    assert json.loads(os.read(read, 1 << 20).splitlines()[0])["subject"] == SCORE
    os.close(read)  # nothing more is published: it has to notice by itself
    with anyio.fail_after(60):
        _, errors = await tail.communicate()
    assert (tail.returncode, errors) == (0, b"")


async def publish_until_readable(run: Run, read: int) -> None:
    """Publish until the tail, which begins with the next message, has shown one."""

    async def publish() -> None:
        for number in range(10_000):
            await run.publish(SCORE, score(str(number)), f"f{number}")
            await anyio.sleep(0.1)

    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publish)
            await anyio.wait_readable(read)
            tasks.cancel_scope.cancel()


@pytest.mark.slow
async def test_dead_letters_are_listed_and_shown_with_their_message(run: Run) -> None:
    await run.lachesis("init")
    bad = await run.publish(subjects.rollout("demo", "words"), b"no rollout", "bad")
    letter = DeadLetter(
        leased=True,
        run="demo", env="words", revision="live", stage="scorer", kind="data", stream="ROLLOUTS", seq=bad, group=None,
        reason="SchemaError: bad", place="scorer 1", time_ns=1,
    )  # fmt: skip
    seq = await run.publish(subjects.event("dead", "demo", "live", "words"), letter, "d")
    other = await run.publish(SCORE, score("1"), "s")

    (listed,) = await run.json("dead", "list")
    assert (listed["letter"], listed["reason"]) == (seq, "SchemaError: bad")
    shown = json.loads((await run.lachesis("dead", "show", str(seq))).stdout)
    assert shown["message"]["subject"] == "rl.rollout.demo.words"
    assert shown["message"]["content"]["bytes"] == len(b"no rollout")
    for wrong in (other, 999):
        done = await run.lachesis("dead", "show", str(wrong))
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
async def test_a_supervised_service_drains_when_the_supervisor_is_gone(run: Run) -> None:
    await run.lachesis("init")
    process = await service(run, "--supervised")
    assert process.stdin is not None
    process.stdin.close()
    with anyio.fail_after(60):
        _, log = await process.communicate()
    assert b"draining: the supervisor is gone" in log
    assert b"drained" in log
    assert b"Traceback" not in log


@pytest.mark.slow
async def test_a_service_alone_does_not_mind_the_end_of_its_input_and_drains_on_sigterm(run: Run) -> None:
    await run.lachesis("init")
    process = await service(run)
    assert process.stdin is not None
    process.stdin.close()
    with anyio.move_on_after(1.0) as waited:
        await process.wait()
    assert waited.cancelled_caught
    process.send_signal(signal.SIGTERM)
    with anyio.fail_after(60):
        _, log = await process.communicate()
    assert b"draining on SIGTERM" in log
    assert b"Traceback" not in log


async def service(run: Run, *flags: str) -> asyncio.subprocess.Process:
    """Start a governor and wait for its heartbeat."""
    async with run.bus.listen(subjects.heartbeat("demo", "governor")) as beats:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "lachesis", "run", "governor", "--run", "demo", *flags,
            cwd=run.folder, stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        with anyio.fail_after(120):
            await anext(aiter(beats))
    return process


async def end(run: Run) -> None:
    await run.bus.close()
    await run.server.stop()


@pytest.mark.slow
async def test_the_history_of_a_run_that_has_ended_can_still_be_read(run: Run) -> None:
    await run.lachesis("init")
    await run.publish(SCORE, score("last"), "1")
    await end(run)
    tailed = await run.lachesis("tail", "score", "--last", "1", "--no-follow", "--json")
    assert tailed.returncode == 0, tailed.stderr
    assert b'"last"' in tailed.stdout
    assert (await run.json("dead", "list")) == []
    assert not (run.server.store / "endpoint.json").exists()


@pytest.mark.slow
async def test_of_a_run_that_has_ended_everything_says_so_and_ends(run: Run) -> None:
    await run.lachesis("init")
    for number in range(3):
        await run.publish(SCORE, score(str(number)), f"s{number}")
    group = new_group_id()
    plan = Plan(
        group=group, sequences=4, samples=4, tokens=4, policy_step=0, producer="p", epoch=1, counter=0, started_ns=1
    )
    headers = {PLAN_HEADER: plan.pack()}
    seq = (await run.bus.publish(subjects.rollout("demo", "words"), b"x", msg_id="r", headers=headers)).seq
    ref = GroupRef(group=group, seq=seq, env="words", sequences=4, tokens=4, policy_step=0, advantages=[0.0])
    entry = ledger_entry(
        batch=Batch(number=0, groups=[ref], sequences=4, tokens=4), next_batch=1, totals={"batched": 1}
    )
    await run.publish(subjects.ledger("demo", "main"), entry, "l")
    report = train_report(step=1, next_batch=1, steps=[StepTimes(0, 2_000_000_000, 3_000_000_001)])
    await run.publish(subjects.state("demo", "trainer", "live", "main"), report, "t")
    rows = [{"train/step": step, "train/time": step * 2.0, "reward/mean": 0.5, "latency/scorer/wait/rolling_p99": 0.25}
            for step in (1.0, 2.0)]  # fmt: skip
    (run.folder / "runs" / "demo" / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    await end(run)

    for arguments in (["score"], ["score", "--last", "3"]):
        tailed = await run.lachesis("tail", *arguments, "--json")
        assert [json.loads(line)["seq"] for line in tailed.stdout.splitlines()] == [1, 2, 3]
        assert tailed.stderr == b"lachesis: run demo has ended; this is what there is of it\n"
    followed = await run.lachesis("trace", "--follow", "--slow", "1", "--json")
    assert [json.loads(line)["group"] for line in followed.stdout.splitlines()] == [group]
    listed = await run.json("rollouts", "--step", "1")
    assert (listed["group"], listed["state"], listed["step"]) == (group, "trained", 1)
    assert group.encode() in (await run.lachesis("rollouts")).stdout
    alerts = await run.lachesis("health", "--follow")
    assert b"run demo has ended" in followed.stderr
    assert (alerts.returncode, alerts.stdout) == (0, b"")
    assert b"run demo has ended" in alerts.stderr

    status = await run.json("status")
    assert status["ended"]
    assert {row["state"] for row in status["services"]} == {"ended"}
    assert (await run.lachesis("status")).stdout.startswith(b"run demo has ended")

    seen = await run.json("top")
    assert (seen["ended"], seen["step"], seen["s_per_step"], seen["outcomes"]) == (True, 2, 2.0, {"batched": 1})
    stages = {row["service"]: row for row in seen["stages"]}
    assert {row["state"] for row in stages.values()} == {"ended"}
    assert stages["scorer"]["wait"]["p99"] == 0.25
    assert b"run demo   ENDED" in (await run.lachesis("top")).stdout

    server = next(row for row in await run.json("doctor") if row["check"] == "server")
    assert (server["level"], server["mend"]) == ("OK", None)


@pytest.mark.slow
async def test_who_follows_a_run_is_told_when_it_ends(run: Run) -> None:
    await run.lachesis("init")
    read, write = os.pipe()
    tail = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "lachesis", "tail", "rl.>", "--run", "demo", "--json",
        cwd=run.folder, stdout=write, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    os.close(write)
    await publish_until_readable(run, read)
    await end(run)
    with anyio.fail_after(60):
        _, errors = await tail.communicate()
    os.close(read)
    assert (tail.returncode, errors) == (0, b"lachesis: run demo has ended\n")


@pytest.mark.slow
async def test_a_wrong_name_of_a_run_is_told_with_the_right_ones(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    await run.lachesis("init")
    await run.publish(subjects.ledger("demo", "main"), ledger_entry(), "l")
    command = [sys.executable, "-m", "lachesis", "status", "--run", "dmo"]
    done = await anyio.run_process(command, cwd=run.folder, check=False)
    assert done.returncode == 2
    assert b"there is no run dmo in" in done.stderr
    assert b"(runs that are known: demo)" in done.stderr
    token = run.folder / "token"
    token.write_text(run.server.token)
    token.chmod(0o600)
    environ = {**os.environ, "LACHESIS_NATS__URL": run.server.url, "LACHESIS_NATS__TOKEN_FILE": str(token)}
    for arguments in (["status"], ["top", "--once"], ["tail", "score"], ["trace", "--follow"]):
        done = await anyio.run_process([*command[:3], *arguments, *command[4:]], env=environ, check=False)
        assert done.returncode == 2
        assert done.stderr == b"lachesis: the server knows no run dmo; it has demo: name one with --run\n"


@pytest.mark.slow
async def test_a_run_without_rollouts_has_none_to_list(run: Run) -> None:
    await run.lachesis("init")
    listed = await run.lachesis("rollouts")
    assert (listed.returncode, listed.stdout) == (0, b"")
    assert listed.stderr == b"no group is stored; if some failed, `lachesis status` says why\n"
    assert (await run.lachesis("rollouts", "--step", "3")).stderr == b"no group that is stored fits\n"
    missing = await run.lachesis("rollouts", "0" * 32)
    assert missing.returncode == 2
    assert b"no rollout of run demo has an id with 000" in missing.stderr
    refused = await run.lachesis("rollouts", "--env", "a b")
    assert (refused.returncode, refused.stderr[:32]) == (2, b"lachesis: environment 'a b': use")
