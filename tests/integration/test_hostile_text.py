"""A run in which every text that others wrote holds escape sequences: no command passes one on, and none ends early."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import anyio
import msgspec
import pytest
from fuzz.examples import EXAMPLES, GROUP, group
from integration.test_cli import Run, run
from unit.ledger.test_audit import make_entries

from lachesis.pipeline.ledger.chain import PREVIOUS_HEADER
from lachesis.schemas import keys, subjects
from lachesis.schemas.alerts import ResumeRequest
from lachesis.schemas.catalog import CHANNELS
from lachesis.schemas.codec import Event, decode, encode
from lachesis.schemas.control import Heartbeat, PolicyRecord
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ledger import TrainReport
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.services.cli.commands import app

pytestmark = pytest.mark.hostile

__all__ = ["run"]  # the fixture

TEXT = "\x1b[2J\x1b]0;owned\x07\x9b31m\x7f\u202e\u2028\x08[/bold]\r\nFORGED line"
TOKEN = "\x1b[2J\x1b]0;owned\x07\x9b31m\x7f\u202e\x0b\x0c[bold]"
KINDS: Sequence[subjects.Kind] = ("reward", "curriculum", "alert", "eval", "dead")
KEPT = {"run", "env", "revision", "v", "trainer", "service"}
"""Fields by which a command finds what it is to show."""

COMMANDS: Sequence[Sequence[str]] = (
    ("status",), ("status", "--json"), ("top", "--once", "--window", "2"), ("top", "--json", "--window", "2"),
    ("doctor",), ("doctor", "--json"), ("health",), ("health", "--json"),
    ("trace", GROUP), ("trace", GROUP, "--json"), ("trace", TOKEN),
    ("rollouts",), ("rollouts", "--json"), ("rollouts", GROUP), ("rollouts", GROUP, "--json"), ("rollouts", TOKEN),
    ("rollouts", "--text", TOKEN, "--item", TOKEN), ("rollouts", "--score", TOKEN),
    *(("tail", "rl.>", "--since-start", "--no-follow", *more) for more in ((), ("--json",), ("--full",))),
    *(("tail", kind, "--since-start", "--no-follow") for kind in ("rollout", "dead")),
    ("tail", "rl.>", "--since-start", "--no-follow", "--where", f"env={TOKEN}"),
    ("dead", "list"), ("dead", "list", "--json"), ("dead", "show", "LETTER"), ("dead", "requeue", "--all", "--dry-run"),
    ("compare", "live", "again"), ("compare", "live", TOKEN), ("reproduce", "--batches-only"), ("verify",),
    ("export", "out.jsonl"), ("export", f"{TOKEN}.jsonl"), ("import", "hostile.jsonl", "--skip-bad", "--unleased"),
    ("gc",), ("gc", "--json"), ("gc", "--whole-run"), ("gc", "--revision", TOKEN),
    ("shadow", "list"), ("shadow", "list", "--json"), ("shadow", "stop", "again"),
    ("promote", "again", "--wait", "1"), ("resume", "--wait", "1"), ("config", "show"), ("env", "list"), ("init",),
    ("replay", TOKEN), ("train", TOKEN), ("schema",), ("run", TOKEN), ("dev", TOKEN), ("up", "--config", TOKEN),
    ("demo", TOKEN), ("auth", TOKEN), ("runs", "delete"), ("runs", "delete", TOKEN, "--yes", "--json"),
    ("runs", "list"), ("runs", "list", "--json"), ("runs", "show"), ("runs", "show", "--json"), ("runs", "stop"),
    ("runs", "results", "demo"), ("runs", "results", "demo", "--json"), ("runs", "logs"), ("runs", "logs", "-p", TOKEN),
    ("web", "--host", TOKEN),
    ("runs", "start", TOKEN), ("runs", "show", TOKEN), ("mcp", "--policy", TOKEN), ("mcp", "--http", TOKEN),
    ("serve", TOKEN), ("serve", "demo"), ("serve", "demo", "--checkpoint", TOKEN),
    ("eval", TOKEN), ("eval", "best"), ("eval", "--server", TOKEN), ("eval", "x", "--env", TOKEN),
    ("plan", "--model", TOKEN), ("plan", "--device", TOKEN),
)  # fmt: skip


def hostile(event: Event) -> Event:
    """Return the event with the text in every string in which it may stand."""
    kind = type(event)
    whole = msgspec.msgpack.decode(encode(event))

    def decodes() -> bool:
        try:
            decode(kind, msgspec.msgpack.encode(whole))
        except SchemaError:
            return False
        return True

    for holder, key in list(_texts(whole)):
        before, holder[key] = holder[key], TEXT
        if not decodes():
            holder[key] = before
    return decode(kind, msgspec.msgpack.encode(whole))


def _texts(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(item, str) and key not in KEPT and item != GROUP:
            yield value, key
        else:
            yield from _texts(item)


async def fill(run: Run) -> None:
    """Store every event there is, hostile, on the run's subjects and on some that only a stranger would choose."""
    bus = run.bus
    for at, entry in enumerate(make_entries(3, run="demo")):
        headers = {PREVIOUS_HEADER: str(at)}
        await bus.publish(subjects.ledger("demo", "main"), encode(entry), msg_id=f"entry {at}", headers=headers)
    made = hostile(group(id=GROUP, run="demo", env="words"))
    await bus.publish(
        subjects.rollout("demo", "words"), encode(made), msg_id=GROUP, headers={PLAN_HEADER: Plan.of(made).pack()}
    )
    number = 0
    for channel in CHANNELS:
        if channel.stream is None:
            continue
        for kind in channel.events:
            for example in (one for one in EXAMPLES if isinstance(one, kind)):
                fields = {"run": "demo", "env": "words", "revision": "live"}
                ours = msgspec.structs.replace(
                    example, **{name: value for name, value in fields.items() if name in kind.__struct_fields__}
                )
                for subject in _subjects(channel.pattern):
                    number += 1
                    await run.bus.client.publish(subject, encode(hostile(ours)), headers={"Nats-Msg-Id": f"m{number}"})
    for example in EXAMPLES:
        if isinstance(example, PolicyRecord | ResumeRequest):
            key = keys.POLICY if isinstance(example, PolicyRecord) else keys.resume("words")
            await bus.put(key, encode(hostile(example)))
    (run.folder / "hostile.jsonl").write_text(json.dumps({"group": TEXT, TEXT: TEXT}) + "\n" + TEXT)
    folder = run.folder / "runs" / "demo"
    (folder / "metrics.jsonl").write_text(json.dumps({TEXT: 1.0, "train/step": 1.0}) + "\n" + TEXT + "\n")
    (folder / "pids.json").write_text(json.dumps({TEXT: 1}))
    await bus.client.flush()


def _subjects(pattern: str) -> list[str]:
    """Return the run's subject of a channel, and one with hostile last tokens."""
    head = pattern.split(".")
    stars = [at for at, part in enumerate(head) if part == "*"]
    names = ["demo", *(["live"] if len(stars) > 2 else []), "main" if head[1] == "ledger" else "words"]
    ours, theirs = list(head), list(head)
    for at, name in zip(stars, (names + ["words"] * 4)[: len(stars)], strict=True):
        ours[at] = name
        theirs[at] = name if name in {"demo", "live"} else TOKEN
    return [".".join(ours), ".".join(theirs)]


async def beat(run: Run) -> None:
    """Broadcast hostile heartbeats for ever."""
    example = next(one for one in EXAMPLES if isinstance(one, Heartbeat))
    beats = [hostile(msgspec.structs.replace(example, run="demo", service=name)) for name in ("scorer", "trainer")]
    while True:
        for number, one in enumerate([*beats, *(msgspec.structs.replace(one, service=TOKEN) for one in beats)]):
            said = msgspec.structs.replace(one, instance=f"{TOKEN}{number}")
            await run.bus.client.publish(subjects.heartbeat("demo", said.service, said.instance), encode(said))
        await anyio.sleep(0.2)


def wrong(arguments: Sequence[str], done: subprocess.CompletedProcess[bytes]) -> Iterator[str]:
    """Yield what is wrong with what a command printed."""
    if b"Traceback" in done.stderr:
        yield f"{arguments}: {done.stderr.decode()}"
    for line in (done.stdout + b"\n" + done.stderr).decode().split("\n"):
        if not line.replace("\t", "").isprintable() or line.startswith("FORGED"):
            yield f"{arguments}: {line!r}"
    if "--json" in arguments and done.returncode == 0:
        for document in [done.stdout] if arguments[0] != "tail" else done.stdout.splitlines():
            json.loads(document)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_no_command_passes_on_an_escape_sequence_or_a_forged_line(run: Run) -> None:
    named = {command.name or command.callback.__name__ for command in app.registered_commands if not command.hidden}
    named |= {group.name or group.typer_instance.info.name for group in app.registered_groups}
    assert named <= {arguments[0] for arguments in COMMANDS}, "a new command: let it print here too"
    await run.lachesis("init")
    await fill(run)
    letter = (await run.json("dead", "list"))[0]["letter"]
    shown = {}
    limit = anyio.CapacityLimiter(3)

    async def call(arguments: Sequence[str]) -> None:
        async with limit:
            done = await run.lachesis(*(str(letter) if part == "LETTER" else part for part in arguments))
        shown[tuple(arguments)] = done

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(beat, run)
        async with anyio.create_task_group() as calls:
            for arguments in COMMANDS:
                calls.start_soon(call, arguments)
        tasks.cancel_scope.cancel()
    problems = [problem for arguments, done in shown.items() for problem in wrong(arguments, done)]
    assert not problems, "\n\n".join(problems)
    told = b"".join(done.stdout for done in shown.values())
    assert told.count(b"owned") > 100, "it was shown, and not left out"


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_junk_on_the_subjects_of_single_writers_ends_no_reader(run: Run) -> None:
    await run.lachesis("init")
    entries = make_entries(3, run="demo")
    for at, entry in enumerate(entries):
        headers = {PREVIOUS_HEADER: str(at)}
        await run.bus.publish(subjects.ledger("demo", "main"), encode(entry), msg_id=str(at), headers=headers)
    report = next(one for one in EXAMPLES if isinstance(one, TrainReport))
    reports = subjects.state("demo", "trainer", "live", "main")
    await run.bus.publish(reports, encode(msgspec.structs.replace(report, run="demo")), msg_id="report")
    record = PolicyRecord(run="demo", version="3-a-b", weights="w", tokenizer_hash="h", written_ns=1)
    await run.bus.put(keys.POLICY, encode(record))
    before = await run.json("status")
    gone = await run.json("gc")
    junk = [subjects.ledger("demo", "main"), reports]
    junk += [
        subjects.event(kind, "demo", "live", "words") for kind in ("reward", "curriculum", "alert", "eval", "dead")
    ]
    junk += [subjects.state("demo", stage, "live", "words") for stage in ("normalizer", "curriculum", "health")]
    for number in range(100):
        for subject in junk:
            await run.bus.publish(subject, b"\xc1junk", msg_id=f"{subject} {number}")
    done = await run.lachesis("status", "--json")
    status = json.loads(done.stdout)
    assert status["ledger"] is not None
    assert status["ledger"] == before["ledger"] | {"age_s": status["ledger"]["age_s"]}
    assert status["trainer"] == before["trainer"] | {"age_s": status["trainer"]["age_s"]}
    assert b"100 messages were, up to sequence" in done.stderr
    assert b"not written by its only writer and skipped" in done.stderr
    collected = await run.lachesis("gc", "--json")
    assert collected.returncode == 0, collected.stderr
    assert json.loads(collected.stdout)["streams"].keys() == gone["streams"].keys()
    for arguments in (("status",), ("gc",), ("top", "--json", "--window", "2"), ("dead", "list"), ("health",)):
        done = await run.lachesis(*arguments)
        assert b"SchemaError" not in done.stderr
        assert done.returncode in {0, 1}, (arguments, done.stderr)
    await run.bus.put(keys.POLICY, b"\xc1")
    damaged = await run.json("status")
    assert damaged["policy"] is None
    assert damaged["ledger"] is not None
    assert any("PolicyRecord" in problem or "policy" in problem for problem in damaged["problems"])
