"""The audit of a ledger: what a sound one passes, what each fault is called, and that a look costs what is new."""

import logging

import anyio
import msgspec
import pytest

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.health import stage as stage_module
from lachesis.pipeline.health.ledger_reader import LedgerReader
from lachesis.pipeline.health.stage import run_health
from lachesis.pipeline.ledger.audit import LedgerAudit, LedgerRules
from lachesis.pipeline.ledger.chain import PREVIOUS_HEADER, Chain, JoinState, make_batch
from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.retention.holds import update_record
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.alerts import AlertEvent
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.ledger import GroupRef, LedgerEntry, Outcome
from lachesis.schemas.subjects import LEDGER
from lachesis.services.stage_settings import health_settings

RUN = "r"
LINE = subjects.ledger(RUN, "main")


def ref(seq, *, step=0, newest_step=None, advantages=(0.5, -0.5), env="words", ids=None):
    return GroupRef(
        group=ids[seq] if ids else f"{seq:032x}",
        seq=seq,
        env=env,
        sequences=2,
        tokens=8,
        policy_step=step,
        advantages=list(advantages),
        newest_step=newest_step,
    )


def make_entries(count, run=RUN, **settings):
    """Return a sound ledger: entry i settles rollouts 2i + 1 (a batch) and 2i + 2 (stale)."""
    chain, entries = Chain(run, "main", "t"), []
    for i in range(count):
        state = JoinState(watermark=2 * i + 2, resolved=b"", events_cursor=1, producers={})
        batch = make_batch(chain.next_batch, [ref(2 * i + 1, **{"step": i, **settings})], 2)
        outcomes = [Outcome(seq=2 * i + 2, group=None, kind="stale")]
        entries.append(chain.extend(state, batch=batch, outcomes=outcomes, stamps={}, written_ns=i))
    return entries


def audited(entries, rules=None, **options):
    """Return what is wrong with entries that lie at sequences 1, 2, ... and name each other."""
    audit = LedgerAudit(LINE, rules, **options)
    return [problem for seq, entry in enumerate(entries, 1) for problem in audit.verify_entry(seq, entry, seq - 1)]


def kinds(problems):
    return [problem.kind for problem in problems]


def test_a_sound_ledger_has_no_problems():
    audit = LedgerAudit(LINE, LedgerRules(0, {"words"}))
    for seq, entry in enumerate(make_entries(5), 1):
        assert audit.verify_entry(seq, entry, seq - 1) == []
    assert audit.count(5) == []
    assert (audit.position.entries, audit.next_seq) == (5, 6)


def test_an_entry_left_out_is_named_once():
    entries = make_entries(6)
    audit = LedgerAudit(LINE)
    problems = [
        problem
        for seq, entry in enumerate(entries, 1)
        if seq != 4
        for problem in audit.verify_entry(seq, entry, seq - 1)
    ]
    (problem,) = problems
    assert problem.kind == "unreadable"
    assert problem.breaks
    assert problem.text == f"{LINE}: entry 3 is gone: entry 4 at sequence 5 follows; the last of them was at sequence 4"
    assert kinds(audit.count(6)) == ["unreadable"]
    assert audit.count(6) == []  # is reported once
    assert kinds(audit.count(7)) == ["unreadable"]


def test_the_newest_one_left_out_is_known_by_the_count():
    entries = make_entries(3)
    audit = LedgerAudit(LINE)
    for seq, entry in enumerate(entries[:2], 1):
        assert audit.verify_entry(seq, entry, seq - 1) == []
    (problem,) = audit.count(3)
    assert problem.text == f"{LINE}: the server counts 3 messages and cannot read 1 of them"


def test_entries_deleted_on_purpose_are_not_missed():
    entries = make_entries(4)
    for gone_below, expected in ((3, []), (2, ["unreadable"])):
        audit = LedgerAudit(LINE, gone_below=gone_below)
        found = [problem for seq in (3, 4) for problem in audit.verify_entry(seq, entries[seq - 1], seq - 1)]
        assert kinds(found) == expected


def test_a_second_history_is_told_however_long_it_gets():
    entries = [*make_entries(3), *make_entries(5, step=1)]
    problems = audited(entries)
    assert kinds(problems) == ["chain"] * 4
    assert "entry 0 at sequence 4 comes after entry 2: another writer has begun a second history" in problems[0].text


def test_another_entry_in_the_middle_breaks_the_chain():
    entries = make_entries(4)
    entries[1] = entries[1].replace(events_cursor=7)
    (problem,) = audited(entries)
    assert (problem.kind, problem.breaks) == ("chain", True)
    assert "entry 2 at sequence 3 follows" in problem.text


def test_a_header_that_names_another_place_is_told():
    entries = make_entries(3)
    audit = LedgerAudit(LINE)
    assert audit.verify_entry(1, entries[0], 0) == []
    (problem,) = audit.verify_entry(2, entries[1], 7)
    assert "says that the entry before it is at sequence 7; it is at 1" in problem.text


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"watermark": 3}, "watermark", "entry 2 has watermark 3, after 4: it went back"),
        ({"next_batch": 9, "batch": None}, "chain", "entry 2 has batch 9 where 2 follows"),
        ({"outcomes": [Outcome(seq=3, group=None, kind="dead")]}, "outcomes", "a second outcome: sequences 3 of"),
        ({"outcomes": [Outcome(seq=6, group=None, kind="dead")] * 2}, "outcomes", "a second outcome: sequences 6 of"),
        ({"outcomes": [Outcome(seq=5, group=None, kind="dead")]}, "outcomes", "a second outcome: sequences 5 of"),
        ({"watermark": 5}, "outcomes", "settles rollouts and calls them open: sequences 6 of"),
    ],
)
def test_what_contradicts_the_entry_before_is_told(changes, kind, text):
    entries = make_entries(3)
    entries[2] = entries[2].replace(**changes)
    problems = audited(entries)
    assert (kind, True) in [(problem.kind, problem.breaks) for problem in problems]
    assert any(text in problem.text for problem in problems)


def test_bits_above_the_watermark_count_as_settled():
    chain = Chain(RUN, "main", "t")
    first = chain.extend(
        JoinState(0, b"\x02", 1, {}), batch=None, outcomes=[Outcome(2, None, "dead")], stamps={}, written_ns=0
    )
    again = chain.extend(
        JoinState(2, b"", 1, {}), batch=None, outcomes=[Outcome(2, None, "dead")], stamps={}, written_ns=0
    )
    assert kinds(audited([first, again])) == ["outcomes"]


def test_staleness_and_sums_are_judged_by_the_runs_settings_and_break_nothing():
    entries = make_entries(4, step=0, advantages=(1.0, -0.5))
    problems = audited(entries, LedgerRules(2, {"words"}, since_ns=2))
    assert kinds(problems) == ["advantages", "staleness", "advantages"]  # of entries 2 and 3
    assert not any(problem.breaks for problem in problems)
    assert "holds a group 3 steps old, where 2 are allowed" in problems[1].text
    assert "add up to 0.5" in problems[0].text
    assert audited(entries, LedgerRules(3, {"other"})) == []
    spanning = make_entries(4, step=0, newest_step=1)
    assert kinds(audited(spanning, LedgerRules(2))) == ["staleness"]
    assert audited(spanning, LedgerRules(2, staleness_of="newest")) == []
    assert kinds(audited(spanning, LedgerRules(1, staleness_of="newest"))) == ["staleness"]


@pytest.mark.parametrize(
    ("estimator", "expected"), [("grpo", {"words"}), ("maxrl", {"words"}), ("opo", set()), ("gdpo", set())]
)
def test_only_estimators_that_centre_promise_a_sum_of_zero(estimator, expected):
    config = RunConfig(
        run=RUN,
        environments={"words": EnvironmentConfig(kind="x")},
        advantage=AdvantageConfig(estimator=estimator),
        batching=BatchingConfig(max_staleness=7),
    )
    assert health_settings(config).rules == LedgerRules(7, expected, staleness_of="newest")


# -- reading it


async def store(bus, entries):
    for entry in entries:
        at = (await bus.usage(LEDGER)).last
        await bus.publish(LINE, encode(entry), msg_id=f"{at}", headers={PREVIOUS_HEADER: str(at)})


class Counting(MemoryBus):
    """A bus that says how many messages its readers handed out; `lost` sets what the connection lost so far."""

    handed_out = 0
    lost = 0

    @property
    def reconnects(self):
        return self.lost

    def read(self, *args, **kwargs):
        self.handed_out += sum(1 for _ in self._log(args[0]).matching(kwargs.get("start", 1), args[1]))
        return super().read(*args, **kwargs)


async def test_a_look_reads_what_is_new_and_all_of_it_after_the_server_was_away():
    async with Counting() as bus:
        reader, entries = LedgerReader(bus, RUN, "main"), make_entries(8)
        assert await reader.verify_new_entries() == []
        await store(bus, entries[:5])
        assert await reader.verify_new_entries() == []
        assert bus.handed_out == 5
        assert await reader.verify_new_entries() == []
        await store(bus, entries[5:])
        bus.damage(LEDGER, 2)
        assert await reader.verify_new_entries() == []  # it was sound when it was read
        assert bus.handed_out == 8
        bus.lost = 1
        (gap, count) = await reader.verify_new_entries()
        assert "entry 1 is gone: entry 2 at sequence 3 follows" in gap.text
        assert "counts 8 messages and cannot read 1" in count.text
        assert await reader.verify_new_entries() == []
        bus.damage(LEDGER, 8)
        bus.lost = 2
        assert "cannot read 2 of them" in (await reader.verify_new_entries())[-1].text


async def test_a_ledger_that_went_back_or_was_replaced_is_known_by_what_was_verified_before():
    first, second = make_entries(6), make_entries(8, step=0, advantages=(0.25, -0.25))
    for kept, text in ((first[:2], "it held 6 entries and holds 2 now"), (second, "entry 5 was")):
        async with Counting() as bus:
            reader = LedgerReader(bus, RUN, "main")
            await store(bus, first)
            assert await reader.verify_new_entries() == []
            async with Counting() as other:  # the same server, after it was away
                await store(other, kept)
                reader._bus, other.lost = other, 1
                (problem,) = await reader.verify_new_entries()
                assert (problem.kind, problem.breaks) == ("chain", True)
                assert text in problem.text
                assert await reader.verify_new_entries() == []


async def test_what_the_governor_trimmed_is_not_missed():
    async with MemoryBus() as bus:
        await store(bus, make_entries(6))
        reader = LedgerReader(bus, RUN, "main")
        assert await reader.verify_new_entries() == []
        await update_record(bus, RUN, lambda old: old.replace(trimmed={LEDGER: 4}))
        await bus.trim(LEDGER, [LINE], before=4)
        assert await reader.verify_new_entries() == []
        assert await LedgerReader(bus, RUN, "main").verify_new_entries() == []


async def test_what_is_no_entry_is_passed_over_and_counted():
    async with MemoryBus() as bus:
        entries = make_entries(3)
        await store(bus, entries[:1])
        await bus.publish(LINE, b"garbage", msg_id="garbage")
        await bus.publish(LINE, encode(entries[1].replace(run="another")), msg_id="another")
        for seq, entry in ((1, entries[1]), (4, entries[2])):
            await bus.publish(LINE, encode(entry), msg_id=f"e{seq}", headers={PREVIOUS_HEADER: str(seq)})
        assert await LedgerReader(bus, RUN, "main").verify_new_entries() == []


async def test_the_health_service_tells_of_it_everywhere(monkeypatch, caplog):
    monkeypatch.setattr(stage_module, "_LEDGER_S", 0.01)
    config = RunConfig(
        run=RUN, environments={"words": EnvironmentConfig(kind="x"), "sums": EnvironmentConfig(kind="x")}
    )
    async with MemoryBus() as bus, anyio.create_task_group() as tasks:
        service = Service(bus, "health", RUN)
        await store(bus, make_entries(4))
        bus.damage(LEDGER, 3)
        with caplog.at_level(logging.WARNING, logger="lachesis"):
            tasks.start_soon(run_health, service, health_settings(config))
            found = set()
            with anyio.fail_after(30):
                async with bus.read(subjects.EVENTS, [subjects.event("alert", RUN, "live")]) as alerts:
                    while found != {"words", "sums"}:
                        event = decode(AlertEvent, (await anext(aiter(alerts))).data)
                        (alert,) = event.alerts
                        assert (alert.check, alert.severity) == ("ledger", "warn")
                        assert "entry 2 is gone" in alert.reason
                        assert not event.standing.halted
                        found.add(event.env)
        assert "entry 2 is gone" in caplog.text
        assert ["entry 2 is gone" in notice.what + notice.why for notice in service.vitals.report().notices] == [True]
        assert service.vitals.metrics["ledger/broken"] == 1.0
        assert service.vitals.metrics["ledger/verified_entries"] == 4
        tasks.cancel_scope.cancel()


async def test_the_check_can_be_switched_off(monkeypatch):
    monkeypatch.setattr(stage_module, "_LEDGER_S", 0.01)
    config = RunConfig(run=RUN, environments={"words": EnvironmentConfig(kind="x")})
    config = msgspec.structs.replace(config, health=msgspec.structs.replace(config.health, off=["ledger"]))
    async with Counting() as bus, anyio.create_task_group() as tasks:
        await store(bus, make_entries(2))
        service = Service(bus, "health", RUN)
        tasks.start_soon(run_health, service, health_settings(config))
        with anyio.fail_after(30):
            await service.started.wait()
        assert "ledger/broken" not in service.vitals.metrics
        tasks.cancel_scope.cancel()


def test_entries_are_what_they_are_taken_for():
    assert all(decode(LedgerEntry, encode(entry)) == entry for entry in make_entries(2))
