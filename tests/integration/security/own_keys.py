"""What each service's own key can do to its run at the worst: the run goes on, or one command brings it back.

    make own-keys [ARGS="IDENTITY..."]     # one to five minutes for each identity

A whole run with a key for each service trains. With one identity's key after the other, this stores messages on all
that it may write: of another version, unreadable, empty, huge, repeated, out of turn, with watermarks and marks beyond
the streams' ends, and for the batcher a batch that is trained already. Then the run has to take further steps; or `up`
ends, says why and names the one command, which is given, and then `up` has to take further steps. In the end each
command that shows the run is called, with all of these messages there, and the ledger is audited: no rollout is lost,
has two outcomes or is in two batches.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
from integration.audit import audit
from integration.harness import CONFIG, RUN, SUMS, Run
from integration.security.secured import Secured, auth_init

from lachesis.pipeline.access import OBSERVER, OPERATOR, Access, Scope
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.errors import NotFoundError
from lachesis.pipeline.extension import access_of
from lachesis.pipeline.ledger.chain import PREVIOUS_HEADER, LedgerPosition
from lachesis.pipeline.ledger.reader import follow_ledger, newest_entry
from lachesis.schemas import subjects
from lachesis.schemas.codec import SCHEMA_VERSION, encode
from lachesis.schemas.ledger import Outcome
from lachesis.schemas.subjects import BUCKET, STREAMS

IDENTITIES = (
    "scorer", "teacher", "evaluator", "environment-sums", "gateway", "inference", "health", "normalizer", "curriculum",
    "batcher", "trainer", "governor",
)  # fmt: skip
SHOWING = (
    ["status"], ["status", "--json"], ["doctor"], ["gc"], ["rollouts"], ["rollouts", "--json"], ["top", "--once"],
    ["runs", "show", RUN], ["runs", "logs", RUN], ["dead", "list"], ["dead", "list", "--json"], ["health"],
    ["health", "--json"], ["shadow", "list"], ["tail", "rl.>", "--since-start", "--no-follow", "--full"],
    ["verify", "--groups", "2"],
)  # fmt: skip
"""Commands that show a run to people."""
OF_GROUP = (["trace"], ["rollouts"])
"""Commands that show one rollout."""
STEPS = 100_000
FURTHER = 8
"""Steps that the run has to take after each attack."""
FAR = {"near": 1000, "far": (1 << 20) - 1, "impossible": 10**12}
_MARKED = ("index", "covers", "watermark", "events_cursor", "step", "ledger_index", "next_batch", "count", "window")

Message = tuple[str, str, bytes, dict[str, str]]
"""What is tried, subject, data and headers."""


def places(access: Access) -> Iterator[str]:
    """Yield a subject for each that the identity may store on: of streams, and of the bucket."""
    for place in access.writes:
        yield place.replace(".*.*", ".sums.*").replace("*", "sums").replace(">", "sums.x")
    for key in access.sets:
        yield subjects.value_subject(RUN, key.replace("*", "sums").replace(">", "x"))


async def last_message(bus: NatsBus, subject: str) -> Any:
    """Return the newest message on a subject, None if there is none."""
    for stream in (*STREAMS, BUCKET):
        try:
            if (found := await bus.last(stream, subject)) is not None:
                return found
        except NotFoundError:
            continue
    return None


async def worst(bus: NatsBus, subject: str) -> list[Message]:
    """Return what to store on a subject."""
    last = await last_message(bus, subject)
    found: list[Message] = [
        ("another version", subject, msgspec.msgpack.encode({"v": SCHEMA_VERSION + 1}), {}),
        ("unreadable", subject, b"\xc1\xff", {}),
        ("empty", subject, b"", {}),
        ("nested", subject, b"\x91" * 5000, {}),
        ("huge", subject, b"\xc6" + (1 << 20).to_bytes(4, "big") + b"x" * (1 << 20), {}),
    ]
    if last is None:
        return found
    own = {name: value for name, value in last.headers.items() if not name.startswith("Nats-")}
    found.append(("repeated", subject, last.data, own))
    try:
        value = msgspec.msgpack.decode(last.data)
    except msgspec.DecodeError:
        return found
    for what, by in FAR.items() if isinstance(value, dict) else ():
        changed = {key: one + by if key in _MARKED and isinstance(one, int) else one for key, one in value.items()}
        for key in ("cursors", "ends", "read", "trimmed"):
            if isinstance(changed.get(key), dict):
                changed[key] = {name: shifted(at, by) for name, at in changed[key].items()}
        if changed != value:
            found.append((f"{what} numbers", subject, msgspec.msgpack.encode(changed), own))
    return found


def shifted(at: Any, by: int) -> Any:
    """Return a position of a stream, a number or a mark, moved on."""
    if isinstance(at, int):
        return at + by
    if isinstance(at, dict) and isinstance(at.get("seq"), int):
        return {**at, "seq": at["seq"] + by}
    return [at[0] + by, *at[1:]] if isinstance(at, list) and at and isinstance(at[0], int) else at


async def forged_entries(bus: NatsBus) -> list[Message]:
    """Return entries that follow in the ledger's chain and that the batcher did not write."""
    entries = [entry async for entry in follow_ledger(bus, RUN, "main", LedgerPosition(), follow=False)]
    newest, seq, _ = await newest_entry(bus, RUN, "main")
    assert newest is not None
    subject, head = subjects.ledger(RUN, "main"), {PREVIOUS_HEADER: str(seq)}
    quiet = newest.replace(index=newest.index + 1, previous=newest.digest(), batch=None, outcomes=[], written_ns=2)
    end = (await bus.usage("ROLLOUTS")).last
    trained = next(entry.batch for entry in entries if entry.batch is not None)
    again = msgspec.structs.replace(trained, number=newest.next_batch)
    return [
        ("a batch again", subject, encode(quiet.replace(batch=again, next_batch=newest.next_batch + 1)), head),
        ("far outcome", subject, encode(quiet.replace(outcomes=[Outcome(end + 10**9, "g", "dead", 1)])), head),
    ]


class Campaign:
    """A run that is attacked by one key after the other."""

    def __init__(self, run: Run, server: Secured) -> None:
        self.run = run
        self.server = server
        self.rows: list[tuple[str, str]] = []

    async def attack(self, identity: str, messages: list[Message]) -> None:
        """Store the messages with the identity's key, and bring the run back where it ends."""
        began, step = time.monotonic(), self.run.step()
        async with self.server.client(identity) as client:
            for _, subject, data, headers in messages:
                await client.publish(subject, data, headers=headers or None)
            await client.flush(60)
        ended = await self.goes_on(step)
        what = f"{len(messages)} messages"
        if ended is None:
            self.say(
                identity, f"{what}: trained on, {self.run.step() - step} steps more, {time.monotonic() - began:.0f} s"
            )
            return
        code, reason = ended
        _, said = self.run.called("doctor", timeout_s=600)
        recover, plan = self.run.called("runs", "recover", RUN, "--yes", timeout_s=600)
        named = "lachesis runs recover" in reason, "lachesis runs recover" in said
        self.say(identity, f"{what}: `up` ended with {code}; named by its reason: {named[0]}, by doctor: {named[1]}")
        print(f"    {[line for line in reason.splitlines() if 'recover' in line][-1:] or reason[-600:]}", flush=True)
        print(f"    recover ({recover}): {plan[-900:]}", flush=True)
        assert any(named), reason
        assert recover == 0, plan
        self.run.start()
        step = self.run.step()
        ended = await self.goes_on(step)
        assert ended is None, (identity, ended)
        self.say(identity, f"came back: {self.run.step() - step} steps more, {time.monotonic() - began:.0f} s")

    def show(self, export: Path) -> None:
        """Call each command that shows the run, while the messages are there."""
        _, listed = self.run.called("rollouts", "--json", "--limit", "1", timeout_s=600)
        rollout = json.loads(next(line for line in listed.splitlines() if line.startswith("{")))["group"]
        for command in (*SHOWING, *([*one, rollout] for one in OF_GROUP), ["export", str(export)]):
            code, said = self.run.called(*command, timeout_s=600)
            assert code in {0, 1}, (command, code, said)
            assert "Traceback" not in said, (command, said)
            self.say("shown by", f"{' '.join(command)}: {code}")

    def say(self, identity: str, what: str) -> None:
        """Print and keep a line of the result."""
        self.rows.append((identity, what))
        print(f"{identity}: {what}", flush=True)

    async def goes_on(self, step: int) -> tuple[int, str] | None:
        """Wait until further steps are taken, and return None; or what `up` ended with, and what it said."""
        assert self.run.process is not None
        with anyio.fail_after(600):
            while self.run.step() < step + FURTHER:
                if self.run.process.poll() is not None:
                    return self.run.process.returncode, self.run.tail()
                await anyio.sleep(0.2)
        return None


async def main(identities: list[str], folder: Path) -> None:
    """Attack a new run with each identity's key, and audit it."""
    (folder / "server").mkdir()
    (folder / "run").mkdir()
    authorized = CONFIG.format(sums=SUMS, steps=STEPS) + '[environments.far]\nkind = "gateway"\n'
    auth_init(folder / "server", "--run", RUN, config=authorized)
    scope = Scope(run=RUN, revision="live", trainer="main", environments=("sums", "far"), foreign=("far",))
    table = access_of(scope)
    async with Secured(folder / "server", RUN, tls=False) as server:
        run = Run(folder / "run", STEPS, server)
        more = '[environments.far]\nkind = "gateway"\n[gateway]\nport = 0\n[services]\nready_s = 600\n'
        run.config.write_text(run.config.read_text() + more)
        run.start()
        campaign = Campaign(run, server)
        with run:
            await run.wait_for_step(2, 600)
            for identity in identities:
                async with await server.bus(OBSERVER) as observer:
                    messages = [one for place in places(table[identity]) for one in await worst(observer, place)]
                await campaign.attack(identity, messages)
                if identity == "batcher":
                    for number in range(2):  # each by itself: of two that follow the same entry, one is out of turn
                        async with await server.bus(OBSERVER) as observer:
                            forged = (await forged_entries(observer))[number]
                        await campaign.attack(identity, [forged])
            campaign.show(folder / "export.jsonl")
        async with await server.bus(OPERATOR) as bus:
            found = await audit(bus, RUN)
        print(f"{found.rollouts} rollouts, {found.batches} batches, {found.entries} entries, {found.violations}")
        assert not found.violations, found.violations


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("identities", nargs="*", default=list(IDENTITIES))
    arguments = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="own-keys-"))
    try:
        anyio.run(main, arguments.identities, place)
    except BaseException:
        print(f"the run's folder stays: {place}", file=sys.stderr)
        raise
    shutil.rmtree(place)
