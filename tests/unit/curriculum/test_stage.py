"""The curriculum stage: the same weights after any restart, snapshots for the environments, hostile feedback."""

import random
from pathlib import Path

import anyio
import msgspec
import pytest
from stages import run_curriculum

from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.errors import InfrastructureError, LedgerError, StreamFullError
from lachesis.schemas import keys, subjects
from lachesis.schemas.annotations import Commit, CurriculumEvent, DeadLetter, GroupReward, RewardEvent
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import CurriculumSnapshot
from lachesis.schemas.ledger import GENESIS, LedgerEntry

SUMS = f"{Path(__file__).parents[2] / 'examples' / 'sums.py'}:Sums"
CONFIG = RunConfig(run="r", environments={"sums": EnvironmentConfig(kind=SUMS, params={"largest": 2})})  # 9 tasks


def curriculum(service):
    return run_curriculum(service, CONFIG)


def item_at(index):
    """Return the name that the example gives its task of this index."""
    return "none" if index is None or index >= 9 else f"{index // 3}+{index % 3}"


def a_reward(n, **changes):
    rng = random.Random(n)
    success, index = rng.randint(0, 4) / 4, rng.randrange(9)
    fields = {
        "group": f"{n:032x}", "seq": n + 1, "item": item_at(changes.get("index", index)), "policy_step": 0,
        "verdict": "trainable", "scores": [0.0] * 4, "rewards": [0.0] * 4, "advantages": [0.0] * 4, "snapshot": "s",
        "mean": 0.0, "std": 0.0, "range": 0.0, "n_valid": 4, "success": success, "index": index,
        "tokens": rng.randint(4, 4000),
    }  # fmt: skip
    return GroupReward(**fields | changes)


async def publish(lab, rewards, msg_id):
    event = RewardEvent(
        run="r", env="sums", revision="live", advantage="grpo", groups=rewards,
        commit=Commit(term="t", index=0, cursors={}, delta=b"", crc32=0),
    )  # fmt: skip
    await lab.bus.publish(subjects.event("reward", "r", "live", "sums"), encode(event), msg_id=msg_id)


async def form_batches(lab, number):
    """Let the ledger say that `number` batches were formed."""
    subject = subjects.ledger("r", "main")
    last = await lab.bus.last(subjects.LEDGER, subject)
    fields = {"run": "r", "trainer": "main", "index": 0, "watermark": 0, "resolved": b"", "events_cursor": 1}
    entry = LedgerEntry(**fields, previous=GENESIS, next_batch=number)
    await lab.bus.commit(subject, encode(entry), expected=last.seq if last else 0, msg_id=f"batches-{number}")


async def snapshot(lab):
    entry = await lab.bus.value(keys.curriculum("live", "sums"))
    return None if entry is None else decode(CurriculumSnapshot, entry.value)


def published(lab, observed):
    async def condition():
        found = await snapshot(lab)
        return found is not None and found.observed == observed

    return condition


async def observed(lab):
    return [group for event in await lab.events("curriculum", CurriculumEvent) for group in event.observed]


async def test_there_is_a_snapshot_before_any_feedback_and_a_new_one_after(lab):
    async with lab.running(curriculum, "curriculum"):
        await lab.until(published(lab, 0))
        before = (await snapshot(lab)).values()
        for n in range(20):
            await publish(lab, [a_reward(n, index=0, success=0.5), a_reward(n + 100, index=1, success=1.0)], f"{n}")
        await lab.until(published(lab, 40))
    after = (await snapshot(lab)).values()
    assert len(before) == len(after) == 9
    assert after[0] > after[1]  # what is half solved teaches more than what is always solved


def two_rewards(n):
    return [a_reward(i, policy_step=i // 8) for i in (2 * n, 2 * n + 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "strategy"), [(0, "irt"), (1, "irt"), (2, "irt"), *((n, "gain_per_token") for n in (3, 4))]
)
async def test_restarts_at_any_moment_give_the_same_weights_bit_for_bit(lab, seed, strategy):
    config = msgspec.structs.replace(CONFIG, curriculum=CurriculumConfig(strategy=strategy))

    def curriculum(service):
        return run_curriculum(service, config)

    await form_batches(lab, 40)
    for n in range(150):
        await publish(lab, two_rewards(n), f"{n}")
    async with lab.running(curriculum, "curriculum"):
        await lab.until(published(lab, 300))
    calm = await snapshot(lab)

    wild_lab = type(lab)(type(lab.bus)())
    rng = random.Random(seed)
    await form_batches(wild_lab, 40)
    for n in range(150):
        await publish(wild_lab, two_rewards(n), f"{n}")
        if n % 15 == 14:  # by now a hundred commits and more: a restart reads snapshot and deltas
            async with wild_lab.running(curriculum, "curriculum") as service:
                await anyio.sleep(rng.random() * 0.03)
                service.kill()
    async with wild_lab.running(curriculum, "curriculum"):
        await wild_lab.until(published(wild_lab, 300))
    assert (await snapshot(wild_lab)).weights == calm.weights
    assert (await snapshot(wild_lab)).id == calm.id
    assert await observed(wild_lab) == [f"{n:032x}" for n in range(300)]


@pytest.mark.slow
async def test_many_small_commits_and_a_restart_from_a_snapshot(lab):
    async def learned(count):
        return len(await observed(lab)) == count

    async with lab.running(curriculum, "curriculum"):
        for n in range(140):
            await publish(lab, [a_reward(n)], f"{n}")
            await lab.until(lambda n=n: learned(n + 1))
        await lab.until(published(lab, 140))
    calm = await snapshot(lab)
    stored = await lab.bus.last(subjects.LEDGER, subjects.state("r", "curriculum", "live", "sums"))
    assert stored is not None
    lab.bus._entries.clear()
    async with lab.running(curriculum, "curriculum"):
        await lab.until(published(lab, 140))
    assert (await snapshot(lab)).weights == calm.weights


@pytest.mark.parametrize("changes", [{"index": None}, {"index": 9}, {"index": 2**40}, {"success": 7.0}])
async def test_feedback_that_names_no_task_or_no_share_is_left_out(lab, changes):
    await publish(lab, [a_reward(0), a_reward(1, **changes), a_reward(2)], "a")
    async with lab.running(curriculum, "curriculum") as service:
        await lab.until(published(lab, 2))
        left_out = service.vitals.metrics.get("curriculum/sums/without_task")
        assert left_out == (1 if "index" in changes else None)
        assert ("sums: 1 groups are of no task of its pool" in lab.said(service)) == (left_out == 1)
    assert await observed(lab) == [f"{0:032x}", f"{2:032x}"]
    async with lab.running(curriculum, "curriculum"):  # nor does it stand in the way of a restart
        await lab.until(published(lab, 2))


async def test_a_policy_step_that_was_never_trained_makes_nothing_else_too_old(lab):
    await form_batches(lab, 3)
    await publish(lab, [a_reward(0, policy_step=2), a_reward(1, policy_step=2**40), a_reward(2, policy_step=4)], "a")
    async with lab.running(curriculum, "curriculum") as service:
        await lab.until(published(lab, 1))
        assert "which cannot be: 3 batches" in lab.said(service)
        await form_batches(lab, 4)  # from now on step 4 is possible
        await publish(lab, [a_reward(3, policy_step=4), a_reward(4, policy_step=3)], "b")
        await lab.until(published(lab, 3))
    assert await observed(lab) == [f"{n:032x}" for n in (0, 3, 4)]
    async with lab.running(curriculum, "curriculum") as service:
        await lab.until(lambda: _true(service.vitals.metrics.get("curriculum/sums/observed") == 3))
        assert service.vitals.metrics["curriculum/sums/too_old"] == 0


@pytest.mark.parametrize("changes", [{"index": -1}, {"success": float("nan")}, None])
async def test_a_malformed_reward_is_a_dead_letter(lab, changes):
    if changes is None:
        await lab.bus.publish(subjects.event("reward", "r", "live", "sums"), b"\xc1", msg_id="x")
    else:
        await publish(lab, [a_reward(1, **changes)], "x")
    await publish(lab, [a_reward(0)], "a")
    async with lab.running(curriculum, "curriculum"):
        await lab.until(published(lab, 1))
    (letter,) = await lab.events("dead", DeadLetter)
    assert (letter.stream, letter.seq, letter.stage) == (subjects.EVENTS, 1, "curriculum")


async def test_an_unscorable_group_teaches_nothing_but_is_observed_once(lab):
    await publish(lab, [a_reward(0, success=None), a_reward(0, success=None)], "a")
    await publish(lab, [a_reward(0, success=None)], "b")
    async with lab.running(curriculum, "curriculum") as service:
        await lab.until(lambda: _true(service.vitals.handled == 3))
        await lab.until(published(lab, 0))


async def _true(value):
    return value


async def test_an_outage_is_waited_for_and_a_drain_during_it_is_no_crash(lab, monkeypatch):
    down = True
    commit, put = lab.bus.commit, lab.bus.put

    async def sometimes(call, error, *args, **kwargs):
        if down:
            raise error
        return await call(*args, **kwargs)

    monkeypatch.setattr(lab.bus, "commit", lambda *a, **k: sometimes(commit, StreamFullError("full"), *a, **k))
    monkeypatch.setattr(lab.bus, "put", lambda *a, **k: sometimes(put, InfrastructureError("down"), *a, **k))
    await publish(lab, [a_reward(0)], "a")
    async with lab.running(curriculum, "curriculum") as service:
        await lab.until(lambda: _true(service.vitals.retried >= 4))
        assert await snapshot(lab) is None
    down = False
    async with lab.running(curriculum, "curriculum"):
        await lab.until(published(lab, 1))


async def test_a_ledger_that_cannot_be_read_is_no_fault_of_the_rewards(lab):
    await lab.bus.publish(subjects.ledger("r", "main"), b"garbage", msg_id="g")
    await publish(lab, [a_reward(1, policy_step=3)], "1")
    with pytest.RaisesGroup(
        pytest.RaisesExc(LedgerError, match="none of its messages, up to sequence 1, is an entry"),
        flatten_subgroups=True,
    ):
        async with lab.running(curriculum, "curriculum"):
            await lab.until(published(lab, 1))
    assert await lab.events("dead", DeadLetter) == []
