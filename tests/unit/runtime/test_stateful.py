"""The stateful runtime: what a commit holds after any death, what becomes of bad messages, and of two writers."""

import hashlib

import anyio
import msgspec
import pytest

from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.errors import FencedError, InfrastructureError, LedgerError
from lachesis.pipeline.runtime import commitlog
from lachesis.pipeline.runtime.inputs import InputSource
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.runtime.stateful import StatefulStage, run_stateful
from lachesis.schemas import subjects
from lachesis.schemas.annotations import Commit, CurriculumEvent, DeadLetter
from lachesis.schemas.codec import SCHEMA_VERSION, encode
from lachesis.schemas.control import StateSnapshot
from lachesis.schemas.errors import DataError, VersionError

INPUT = subjects.event("score", "r", subjects.LIVE, "sums")


class Listing(StatefulStage[CurriculumEvent]):
    """A stage whose state is the list of the words it has read, and whose outputs are the words."""

    name = "listing"
    kind = "curriculum"
    burst = 256

    def __init__(self, service):
        super().__init__(service, "sums", CurriculumEvent, (subjects.EVENTS,))
        self.words = []
        self.new = []

    async def restore(self, restored):
        self.words = list(msgspec.msgpack.decode(restored.state)) if restored.state is not None else []
        for delta in restored.deltas:
            self.words += msgspec.msgpack.decode(delta)

    def sources(self):
        return [InputSource(subjects.EVENTS, [INPUT], self.cursors[subjects.EVENTS])]

    async def feed(self, message):
        word = message.data.decode()
        if word == "newer":
            raise VersionError("written by a newer build", SCHEMA_VERSION + 1)
        self.cursors = {subjects.EVENTS: message.seq + 1}
        if word == "bad":
            raise DataError("no word")
        self.new.append(word)

    async def advance(self):
        if len(self.new) >= self.burst:
            await self.commit()

    async def commit(self):
        self.words, new, self.new = self.words + self.new, self.new, []
        await self.write(
            CurriculumEvent(
                run="r", env="sums", revision=subjects.LIVE, strategy="s", snapshot_id="i", observed=new,
                commit=self.next_commit(msgspec.msgpack.encode(new)),
            )
        )  # fmt: skip

    def state(self):
        return msgspec.msgpack.encode(self.words)


class OneByOne(Listing):
    burst = 1


async def say(lab, *words):
    for n, word in enumerate(words):
        await lab.bus.publish(INPUT, word.encode(), msg_id=f"{n}-{word}")


async def written(lab):
    return [word for event in await lab.events("curriculum", CurriculumEvent) for word in event.observed]


def listing(service):
    return run_stateful([OneByOne(service)])


class Dying:
    """Kills the service before, or right after, its `at`th commit."""

    def __init__(self, service, at, *, after):
        self.service, self.left, self.after = service, at, after
        self.commit_of = service.bus.commit
        service.bus.commit = self.commit

    async def commit(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0 and not self.after:
            self.service.kill()
        seq = await self.commit_of(*args, **kwargs)
        if self.left == 0:
            self.service.kill()
            raise type(self).Killed
        return seq


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("every", [1, 2, 3, 5])
async def test_killed_at_any_commit_or_snapshot_nothing_is_lost_and_nothing_repeated(lab, monkeypatch, every, after):
    monkeypatch.setattr(commitlog, "SNAPSHOT_EVERY", 3)
    Dying.Killed = lab.Killed
    words = [f"word{n}" for n in range(12)]
    await say(lab, *words)

    async def done():
        return len(await written(lab)) == len(words)

    for _ in range(40):
        if await done():
            break
        async with lab.running(listing, "listing", drain=False) as service:
            Dying(service, every, after=after)

            async def dead_or_done(service=service):
                return service.bus.dead or await done()

            await lab.until(dead_or_done)
            service.kill()
        if every == 1 and not after:
            break  # it never gets a commit out: nothing may be there
    assert await written(lab) == ([] if every == 1 and not after else words)
    again = Listing(Service(lab.bus, "listing", "r"))
    await again.open()
    assert again.words == await written(lab)


async def test_a_bad_message_becomes_a_dead_letter_and_its_neighbours_do_not(lab):
    await say(lab, "one", "bad", "two")
    async with lab.running(listing, "listing") as service:

        async def both():
            return await written(lab) == ["one", "two"]

        await lab.until(both)
    [letter] = await lab.events("dead", DeadLetter)
    assert (letter.seq, letter.stage, "no word" in letter.reason) == (2, "listing", True)
    assert service.vitals.dead == 1


async def test_a_message_of_a_newer_build_ends_the_service_and_is_read_again(lab):
    await say(lab, "one", "newer", "two")
    stage = OneByOne(Service(lab.bus, "listing", "r"))
    await stage.open()

    async def beat():
        while True:  # nothing says when it is listened to
            said = msgspec.msgpack.encode({"v": 1, "schema_version": SCHEMA_VERSION + 1})
            await lab.bus.broadcast(subjects.heartbeat("r", "scorer", "i"), said)
            await anyio.sleep(0.01)

    async with background() as tasks:
        tasks.start_soon(beat)
        with pytest.raises(VersionError, match="written by scorer: written by a newer build"):
            await stage.follow()
    assert await written(lab) == ["one"]
    again = OneByOne(Service(lab.bus, "listing", "r"))
    await again.open()
    assert again.cursors == {subjects.EVENTS: 2}
    assert await lab.events("dead", DeadLetter) == []


async def test_a_commit_that_cannot_be_stored_is_not_taken_for_a_bad_message(lab, monkeypatch):
    await say(lab, "one")
    stage = OneByOne(Service(lab.bus, "listing", "r"))
    await stage.open()

    async def too_large(*_, **__):
        raise DataError("too large for a message")

    monkeypatch.setattr(stage.service.bus, "commit", too_large)
    with pytest.raises(DataError, match="too large"):
        await stage.follow()
    assert await lab.events("dead", DeadLetter) == []


async def test_of_two_writers_the_earlier_is_refused(lab):
    earlier, later = (OneByOne(Service(lab.bus, "listing", "r")) for _ in range(2))
    await earlier.open()
    await later.open()
    await say(lab, "one")
    [message] = await read_all(lab)
    await later.process_burst([message])
    with pytest.raises(FencedError):
        await earlier.process_burst([message])
    assert await written(lab) == ["one"]


async def read_all(lab):
    async with lab.bus.read(subjects.EVENTS, [INPUT], follow=False) as messages:
        return [message async for message in messages]


async def test_a_drain_while_the_broker_is_away_leaves_the_burst_to_the_next_start(lab, monkeypatch):
    await say(lab, "one")
    real, asked = lab.bus.commit, []

    async def away(*args, **kwargs):
        asked.append(args)
        raise InfrastructureError("the broker is away")

    monkeypatch.setattr(lab.bus, "commit", away)
    async with lab.running(listing, "listing"):

        async def tried():
            return bool(asked)

        await lab.until(tried)
    assert await written(lab) == []
    monkeypatch.setattr(lab.bus, "commit", real)
    async with lab.running(listing, "listing"):

        async def done():
            return await written(lab) == ["one"]

        await lab.until(done)


async def snapshot_with(lab, state, **changes):
    """Store a snapshot as the listing stage would, with that state."""
    whole = {"state": state, "sha256": hashlib.sha256(state).digest()} | changes
    event = StateSnapshot(stage="listing", index=0, covers=0, cursors={}, **whole)
    await lab.bus.publish(subjects.state("r", "listing", subjects.LIVE, "sums"), encode(event), msg_id="snapshot")


@pytest.mark.parametrize(
    ("state", "changes", "words"),
    [
        (b"\xc1 no msgpack", {}, "cannot be read"),
        (msgspec.msgpack.encode(7), {}, "cannot be read: TypeError"),
        (msgspec.msgpack.encode(["other"]), {"sha256": b"x" * 32}, "not the state that was stored"),
    ],
    ids=["no msgpack", "of another shape", "changed"],
)
async def test_a_state_that_cannot_be_used_is_an_error_with_a_way_out(lab, state, changes, words):
    await snapshot_with(lab, state, **changes)
    await say(lab, "a")
    with pytest.raises(LedgerError, match=words) as raised:
        await OneByOne(Service(lab.bus, "listing", "r")).open()
    assert "set `revision` to a new name" in str(raised.value)
    assert "rl.state.r.listing" in str(raised.value) or "listing of sums" in str(raised.value)


async def test_a_change_of_state_that_is_not_what_was_stored_is_refused(lab):
    commit = Commit(term="t", index=0, cursors={}, delta=msgspec.msgpack.encode(["b"]), crc32=1)
    event = CurriculumEvent(
        run="r", env="sums", revision=subjects.LIVE, strategy="s", snapshot_id="i", observed=[], commit=commit
    )
    subject = subjects.event("curriculum", "r", subjects.LIVE, "sums")
    await lab.bus.publish(subject, encode(event), msg_id="commit")
    with pytest.raises(LedgerError, match="commit 0 at sequence 1 is not what was stored"):
        await OneByOne(Service(lab.bus, "listing", "r")).open()
