"""The health service live: kills at any moment, what the governor and the batcher make of its alerts, resumption."""

import random

import anyio
import msgspec
import pytest
from stages import run_batcher, run_governor, run_normalizer

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.errors import FencedError, InfrastructureError
from lachesis.pipeline.governor.config import FlowConfig
from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.stage import run_health
from lachesis.schemas import subjects
from lachesis.schemas.alerts import AlertEvent
from lachesis.schemas.annotations import Commit, GroupShaping, GroupSignals, RewardEvent, ScoreEvent
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import LeaseReply, LeaseRequest
from lachesis.schemas.ledger import Batch, GroupRef, LedgerEntry
from lachesis.services.cli.health import request_resume
from lachesis.services.observe.health import read_health
from lachesis.services.stage_settings import health_settings

CONFIG = RunConfig(
    run="r",
    environments={"sums": EnvironmentConfig(kind="x"), "other": EnvironmentConfig(kind="x")},
    health=HealthConfig(window=16, halts=("zero_variance",), off=["ledger"]),  # the lab's ledger has no watermark
    batching=BatchingConfig(batch_size=16, max_staleness=20),
    flow=FlowConfig(lease_s=0.1),
)


def health(service):
    return run_health(service, health_settings(CONFIG))


def batcher(service):
    return run_batcher(service, CONFIG)


def governor(service):
    return run_governor(service, CONFIG)


async def publish(lab, groups, score, n, *, env="sums"):
    """A score and the reward that follows from it."""
    event = ScoreEvent(run="r", env=env, revision="live", ensemble="e", raters={}, groups=[score])
    await lab.bus.publish(subjects.event("score", "r", "live", env), encode(event), msg_id=f"s{n}{env}")
    event = RewardEvent(
        run="r", env=env, revision="live", advantage="grpo",
        commit=Commit(term="t", index=n, cursors={}, delta=b"", crc32=0),
        groups=[groups.reward(score)],
    )  # fmt: skip
    await lab.bus.publish(subjects.event("reward", "r", "live", env), encode(event), msg_id=f"w{n}{env}")


async def train(lab, groups, count, *, env="sums", flat=False):
    """Store `count` groups with their scores and rewards; `flat` ones teach nothing."""
    for n in range(groups.seq, groups.seq + count):
        group = lab.group(n, env=env, samples=8)
        seq = await lab.store(group)
        score = groups.score(scores=[0.5] * 8) if flat else groups.score()
        score = msgspec.structs.replace(score, group=group.id, seq=seq, policy_step=0)
        await publish(lab, groups, score, n, env=env)


async def alerts(lab, env="sums"):
    return await lab.events("alert", AlertEvent, env)


def judged(lab, count, env="sums"):
    async def condition():
        return len(await alerts(lab, env)) >= count

    return condition


def facts(events):
    return [(event.source, event.window, event.groups, event.results, event.standing) for event in events]


async def test_every_window_is_judged_and_a_fault_stops_the_environment(lab, groups):
    async with lab.running(health, "health") as service:
        await train(lab, groups, 48)
        await train(lab, groups, 16, flat=True)
        await train(lab, groups, 16, env="other")
        await lab.until(judged(lab, 4))
        await lab.until(judged(lab, 1, "other"))
        figures = service.vitals.metrics
    found = await alerts(lab)
    assert [event.window for event in found] == [0, 1, 2, 3]
    assert [event.standing.halted for event in found] == [False, False, False, True]
    (alert,) = [alert for alert in found[3].alerts if alert.check == "zero_variance"]
    # the last reward of a window comes after the score that completes it, and counts in the next
    assert (alert.severity, alert.value, alert.examples[0]) == ("halt", 15 / 16, f"{48:032x}")
    assert found[3].standing.quarantined_from == 49
    assert not (await alerts(lab, "other"))[0].standing.halted
    assert (figures["health/sums/halted"], figures["health/other/halted"]) == (1.0, 0.0)
    assert service.vitals.stopped == {"sums": ["halted", "quarantined"], "other": []}
    (notice,) = service.vitals.report("health").notices
    assert notice.what.startswith("environment sums is halted and quarantined by the health check zero_variance")
    assert notice.why == alert.reason
    assert figures["health/sums/zero_variance"] == 15 / 16


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
async def test_kills_at_any_moment_change_nothing(lab, groups, seed):
    rng = random.Random(seed)
    await train(lab, groups, 90)
    await train(lab, groups, 60, flat=True)
    batches = [[lab.group(1000 + n) for n in range(2)] for _ in range(20)]
    await lab.extend_ledger(*batches)
    async with lab.running(health, "health"):
        await lab.until(judged(lab, 11))
    calm = await alerts(lab)
    assert {event.source for event in calm} == {"groups", "batches"}

    wild_lab = type(lab)(type(lab.bus)())
    async with wild_lab.bus:
        for stream in (subjects.EVENTS, subjects.LEDGER):
            filters = ["rl.score.>", "rl.reward.>"] if stream == subjects.EVENTS else ["rl.ledger.>"]
            async with lab.bus.read(stream, filters, follow=False) as messages:
                async for message in messages:
                    await wild_lab.bus.publish(message.subject, message.data, msg_id=f"{stream}{message.seq}")
        for _ in range(60):
            async with wild_lab.running(health, "health") as service:
                for _ in range(rng.randint(0, 80)):
                    await anyio.lowlevel.checkpoint()
                if rng.random() < 0.8:
                    service.kill()
        async with wild_lab.running(health, "health"):
            await wild_lab.until(judged(wild_lab, 11))
        wild = await alerts(wild_lab)
    for source in ("groups", "batches"):  # each stream is in order, between the two there is none
        assert [(e.window, e.results) for e in wild if e.source == source] == [
            (e.window, e.results) for e in calm if e.source == source
        ]
    assert wild[-1].standing == calm[-1].standing
    assert [event.commit.index for event in wild] == list(range(len(wild)))


async def test_the_second_of_two_writers_ends_the_first(lab, groups):
    with pytest.raises(BaseExceptionGroup) as caught:  # noqa: PT012  # both services have to run
        async with lab.running(health, "health"):
            await train(lab, groups, 16)
            await lab.until(judged(lab, 1))
            async with lab.running(health, "health"):
                await train(lab, groups, 64)
                await lab.until(judged(lab, 5))
    assert caught.value.split(FencedError)[1] is None  # nothing else went wrong


async def outcomes(lab):
    subject = subjects.ledger("r", "main")
    async with lab.bus.read(subjects.LEDGER, [subject], follow=False) as messages:
        entries = [decode(LedgerEntry, message.data) async for message in messages]
    batched = {ref.seq: "batched" for entry in entries if entry.batch for ref in entry.batch.groups}
    return batched | {outcome.seq: outcome.kind for entry in entries for outcome in entry.outcomes}


async def ask(lab, env):
    request = LeaseRequest(op="acquire", producer="p", env=env, sequences=1, bytes=100)
    return decode(LeaseReply, await lab.bus.request(subjects.lease("r", request.env), encode(request), timeout_s=5))


async def answers(lab, env, *, granted):
    """Whether the governor is there, and grants or refuses because of a halt."""
    try:
        reply = await ask(lab, env)
    except InfrastructureError:
        return False
    return reply.granted if granted else "lachesis resume sums" in (reply.reason or "")


async def test_a_quarantine_keeps_groups_from_the_trainer_until_resumed(lab, groups):
    """Over restarts of the batcher and of the health service, in either order."""
    await train(lab, groups, 20, flat=True)
    async with lab.running(health, "health"):
        await lab.until(judged(lab, 1))
    for _ in range(2):  # a start learns of it from the log alone
        async with lab.running(batcher, "batcher"):
            await train(lab, groups, 4)
            await train(lab, groups, 4, env="other")

            async def all_settled():
                found = await outcomes(lab)
                return len(found) >= groups.seq - 2

            await lab.until(all_settled)
    found = await outcomes(lab)
    assert {found[seq] for seq in range(1, 21)} == {"quarantined"}  # all of the window, and those after
    assert {kind for seq, kind in found.items() if seq > 20} == {"quarantined", "batched"}
    others = [seq for seq, kind in found.items() if kind == "batched"]
    assert others, "the other environment goes on"

    async with lab.running(health, "health"), lab.running(batcher, "batcher"):
        assert await request_resume(lab.bus, CONFIG, "sums", wait_s=10)
        after = groups.seq
        await train(lab, groups, 4)

        async def trained_again():
            found = await outcomes(lab)
            return sum(kind == "batched" for seq, kind in found.items() if seq > after) >= 2

        await lab.until(trained_again)
    found = await read_health(lab.bus, CONFIG, "sums")
    assert (found.stopped, found.is_healthy, found.groups) == (False, False, 0)  # it goes on, and was not checked since


async def test_a_batcher_that_starts_after_the_resumption_trains_nothing_of_the_quarantine(lab, groups):
    await train(lab, groups, 16, flat=True)
    async with lab.running(health, "health"):
        await lab.until(judged(lab, 1))
        await train(lab, groups, 8)  # nothing is wrong with these but when they were made
        assert await request_resume(lab.bus, CONFIG, "sums", wait_s=10)
        await train(lab, groups, 4)
    async with lab.running(batcher, "batcher"):

        async def all_settled():
            return len(await outcomes(lab)) == 28

        await lab.until(all_settled)
    found = await outcomes(lab)
    assert found == dict.fromkeys(range(1, 25), "quarantined") | dict.fromkeys(range(25, 29), "batched")


async def is_said(service, text):
    return any(text in said for said in service.vitals.problems.values())


async def test_a_halt_stops_leases_over_restarts_until_resumed(lab, groups):
    assert (await read_health(lab.bus, CONFIG, "sums")).is_healthy is False  # nothing was checked: that is not healthy
    async with lab.running(governor, "governor"):
        await lab.until(lambda: answers(lab, "sums", granted=True))
        async with lab.running(health, "health"):
            await train(lab, groups, 16, flat=True)
            await lab.until(lambda: answers(lab, "sums", granted=False))
        assert (await ask(lab, "other")).granted
    async with lab.running(governor, "governor"):  # another life
        await lab.until(lambda: answers(lab, "sums", granted=False))
        await lab.until(lambda: answers(lab, "other", granted=True))
        async with lab.running(health, "health") as service:  # it says so at once, though it judges nothing
            await lab.until(lambda: is_said(service, "environment sums is halted"))
            (notice,) = service.vitals.report("health").notices
            assert notice.stops
            assert "zero_variance" in notice.what
            assert "lachesis resume sums" in notice.mend
        assert not await request_resume(lab.bus, CONFIG, "sums", wait_s=0.05)  # no service is there to answer
        assert await answers(lab, "sums", granted=False)
        async with lab.running(health, "health"):
            await lab.until(lambda: answers(lab, "sums", granted=True))
    assert not (await read_health(lab.bus, CONFIG, "sums")).standing.halted


async def test_a_request_is_applied_once(lab, groups):
    await request_resume(lab.bus, CONFIG, "sums", wait_s=0.01)
    for _ in range(3):
        async with lab.running(health, "health"):
            await train(lab, groups, 16)
            await lab.until(judged(lab, 1 + groups.seq // 16))
    assert [event.source for event in await alerts(lab)].count("resume") == 1


@pytest.mark.slow
async def test_a_warning_is_a_problem_until_the_check_finds_it_over(lab, groups):
    """Here of a bonus that no sample earns, until one does."""

    def scored(had):
        markers = {"####": [had] * 8}
        return groups.score(
            shaping=GroupShaping(bonus=[0.0] * 8, succeeded=[False] * 8, ceiling=0.9, markers=markers, length=[0.0] * 8)
        )

    async with lab.running(health, "health") as service:
        for had, windows in ((False, 8), (True, 9)):
            for n in range(groups.seq, groups.seq + (128 if not had else 16)):
                await publish(lab, groups, scored(had), n)

            async def judged(least=windows):
                return len(await alerts(lab)) >= least

            await lab.until(judged)
            problems = service.vitals.report().problems
            assert len(problems) == (0 if had else 1)
            if problems:
                assert problems[0].startswith(
                    "environment sums: unpaid_bonuses: no sample of the last 128 groups has ####"
                )


async def test_what_cannot_be_read_is_passed_over(lab, groups):
    for kind in ("score", "reward", "dead"):
        await lab.bus.publish(subjects.event(kind, "r", "live", "sums"), b"\xc1garbage", msg_id=kind)
    async with lab.running(health, "health"):
        await train(lab, groups, 16)
        await lab.until(judged(lab, 1))


async def test_the_normalizer_quarantines_a_faulty_group_before_anything_reads_it(lab, groups):
    async def normalizer(service):
        await run_normalizer(service, CONFIG)

    async with lab.running(normalizer, "normalizer"):
        for n, zeros in enumerate([0, 400]):
            group = lab.group(n, samples=8)
            score = groups.score(lengths=[50] * 8, group=group.id)
            signals = msgspec.structs.replace(score.signals, zeros=zeros)
            score = msgspec.structs.replace(score, seq=await lab.store(group), signals=signals)
            event = ScoreEvent(run="r", env="sums", revision="live", ensemble="e", raters={}, groups=[score])
            await lab.bus.publish(subjects.event("score", "r", "live", "sums"), encode(event), msg_id=f"s{n}")

        async def both():
            return sum(len(event.groups) for event in await lab.events("reward", RewardEvent)) == 2

        await lab.until(both)
    first, second = [item for event in await lab.events("reward", RewardEvent) for item in event.groups]
    assert first.verdict == "trainable"
    assert (second.verdict, second.advantages) == ("quarantined", [None] * 8)
    assert second.reason.startswith("logprobs: 0")
    assert isinstance(score.signals, GroupSignals)


async def test_long_groups_that_are_dropped_as_stale_are_told_by_environment(lab, groups):
    subject, seq = subjects.ledger("r", "main"), 0
    async with lab.running(health, "health"):
        for n in range(8):
            refs = [
                GroupRef(group=f"{k:032x}", seq=100 * n + k + 1, env=env, sequences=4, tokens=400, policy_step=n,
                         advantages=[])
                for k, env in enumerate(["sums", "other"] * 8)
            ]  # fmt: skip
            entry = LedgerEntry(
                run="r", trainer="main", index=n, previous="0" * 64, watermark=0, resolved=b"", events_cursor=1,
                batch=Batch(number=n, groups=refs, sequences=64, tokens=6400), next_batch=n + 1,
                stale={"sums": [500, 600], "other": [90]},
            )  # fmt: skip
            seq = await lab.bus.commit(subject, encode(entry), expected=seq, msg_id=str(n))
        await lab.until(judged(lab, 1))
        await lab.until(judged(lab, 1, "other"))
    found = {}
    for env in ("sums", "other"):
        (event,) = await alerts(lab, env)
        assert event.source == "batches"
        (found[env],) = [one for one in event.results if one.check == "stale_lengths"]
    assert (found["sums"].severity, found["sums"].value) == ("warn", 1.0)
    assert "16 groups were dropped as stale, of 550 tokens a sequence (median), where those trained have 100" in (
        found["sums"].reason
    )
    assert (found["other"].severity, found["other"].value) == ("ok", 0.0)
