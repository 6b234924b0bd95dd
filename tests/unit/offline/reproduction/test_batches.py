"""A live ledger against the rewards in the streams: equal, changed, missing, promoted, trimmed."""

import msgspec
import pytest

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import NotFoundError
from lachesis.pipeline.offline.reproduction.batches import _LedgerWalk, verify_batches
from lachesis.pipeline.retention.holds import update_record
from lachesis.schemas import subjects
from lachesis.schemas.annotations import Commit, GroupReward, RewardEvent
from lachesis.schemas.codec import encode
from lachesis.schemas.ids import new_group_id

CONFIG = RunConfig(run="r")


def reward(ref, **changes) -> GroupReward:
    made = GroupReward(
        group=ref.group, seq=ref.seq, item="i", policy_step=0, verdict="trainable", scores=[None, None],
        rewards=[None, None], advantages=ref.advantages, snapshot="s", mean=None, std=None, range=None, n_valid=0,
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


async def publish(lab, rewards, promoted=None):
    event = RewardEvent(
        run="r", env="sums", revision="live", advantage="centred", promoted=promoted, groups=rewards,
        commit=Commit(term="t", index=0, cursors={}, delta=b"", crc32=0),
    )  # fmt: skip
    await lab.bus.publish(subjects.event("reward", "r", "live", "sums"), encode(event), msg_id=new_group_id())


async def ledger(lab):
    entries = await lab.extend_ledger([lab.group(1), lab.group(2)], [lab.group(3), lab.group(4)])
    return [ref for entry in entries if entry.batch for ref in entry.batch.groups]


async def verified(lab):
    _, findings = await verify_batches(lab.bus, CONFIG, "main", None, saved={}, progress=lambda *_: None)
    [found] = [finding for finding in findings if finding.check == "batches"]
    return found.verdict, found.text


async def test_the_first_reward_stored_is_the_one_that_was_batched(lab):
    refs = await ledger(lab)
    await publish(lab, [reward(ref) for ref in refs])
    await publish(lab, [reward(ref, advantages=[9.0, 9.0]) for ref in refs])
    verdict, text = await verified(lab)
    assert verdict == "ok"
    assert text.startswith("2 of 2 rebuilt from the streams")


async def test_another_reward_or_none_is_a_failure(lab):
    refs = await ledger(lab)
    await publish(lab, [reward(refs[0], advantages=[1.0, -1.5]), reward(refs[1]), reward(refs[2])])
    verdict, text = await verified(lab)
    assert verdict == "fail"
    assert (
        f"batch 0, group {refs[0].group}: advantages is [1.0, -1.0] in the ledger, [1.0, -1.5] by the streams" in text
    )
    assert f"batch 1, group {refs[3].group}: it has no reward" in text


async def test_a_promoted_revision_counts_from_its_first_rollout_on(lab):
    refs = await ledger(lab)
    await publish(lab, [reward(ref, advantages=[9.0, 9.0]) for ref in refs[:2]], promoted=3)
    await publish(lab, [reward(ref) for ref in refs[:2]])
    await publish(lab, [reward(ref) for ref in refs[2:]], promoted=3)
    assert (await verified(lab))[0] == "ok"


async def test_a_copys_reward_by_the_promoted_revision_is_not_the_firsts(lab):
    refs = await ledger(lab)
    await publish(lab, [reward(ref, seq=9, advantages=[9.0, 9.0]) for ref in refs[:2]], promoted=5)
    await publish(lab, [reward(ref) for ref in refs])
    assert (await verified(lab))[0] == "ok"


@pytest.mark.parametrize("stream", [subjects.EVENTS, subjects.ROLLOUTS])
async def test_what_was_trimmed_is_counted_and_never_taken_for_equal(lab, stream):
    refs = await ledger(lab)
    await publish(
        lab, [reward(ref) for ref in refs[2:]] if stream == subjects.EVENTS else [reward(ref) for ref in refs]
    )
    await update_record(lab.bus, "r", lambda old: old.replace(trimmed={stream: 3}))
    if stream == subjects.ROLLOUTS:
        await lab.bus.trim(stream, [subjects.rollout("r")], before=3)
    verdict, text = await verified(lab)
    assert verdict == "ok"
    assert text.startswith("1 of 2 rebuilt from the streams are equal, 1 cannot be made: what they are made of was tri")


async def test_no_ledger_is_an_error(lab):
    with pytest.raises(NotFoundError, match="no ledger of trainer 'main'"):
        await verified(lab)


async def test_a_batch_that_is_stored_while_the_rewards_are_read_is_left_to_later(lab, monkeypatch):
    refs = await ledger(lab)
    await publish(lab, [reward(ref) for ref in refs])
    read_rewards = _LedgerWalk.read_rewards

    async def and_a_batch_more(check):
        readable = await read_rewards(check)
        await lab.extend_ledger([lab.group(5), lab.group(6)])
        return readable

    monkeypatch.setattr(_LedgerWalk, "read_rewards", and_a_batch_more)
    verdict, text = await verified(lab)
    assert verdict == "ok"
    assert text.startswith("2 of 2 rebuilt from the streams")
