"""An offline trainer's batches, without a bus: the same from the same groups, each group with one outcome."""

import math
import random

import msgspec
import pytest

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.batcher.whitening import whiten
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.offline_start import OfflineStart
from lachesis.pipeline.offline.trainer.batch_former import (
    OfflineBatchFormer,
    OfflineGroup,
    batch_digest,
    manifest_digest,
    without_logprobs,
)
from lachesis.schemas.annotations import GroupReward
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.ledger import GENESIS
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.planning_header import Plan

CONFIG = BatchingConfig(batch_size=8)
BEGIN = OfflineStart()


def past_group(n, *, samples=2, step=0, verdict="trainable", env="sums", lengths=(), group=None) -> OfflineGroup:
    plan = Plan(
        group=group or f"{n:032x}", sequences=samples, samples=samples, tokens=4 * samples, policy_step=step,
        producer="p", epoch=1, counter=n, started_ns=1,
    )  # fmt: skip
    reward = GroupReward(
        group=plan.group, seq=n, item="i", policy_step=step, verdict=verdict,
        scores=[float(i) for i in range(samples)], rewards=[0.0] * samples,
        advantages=[(-1.0) ** i * n for i in range(samples)], snapshot="s", mean=0.0, std=1.0, range=1.0,
        n_valid=samples, lengths=list(lengths),
    )  # fmt: skip
    return OfflineGroup(n, env, plan, reward)


def form(groups, *, config=CONFIG, past=BEGIN, trainer="again"):
    former = OfflineBatchFormer("r", trainer, config, past, std_floor=1e-3)
    entries = [entry for group in groups for entry in former.add(group)]
    return former, [*entries, *former.finish()]


def outcomes(entries):
    found = {ref.seq: "batched" for entry in entries if entry.batch for ref in entry.batch.groups}
    for entry in entries:
        for outcome in entry.outcomes:
            assert outcome.seq not in found
            found[outcome.seq] = outcome.kind
    return found


def test_each_group_has_one_outcome_and_the_chain_holds():
    draw = random.Random(1)
    verdicts = ["trainable", "trainable", "zero_variance", "unscorable"]
    groups = [past_group(n, samples=draw.choice([1, 2, 3]), verdict=draw.choice(verdicts)) for n in range(1, 900)]
    former, entries = form(groups)
    position = LedgerPosition()
    for entry in entries:
        position = position.after(entry)
    assert (position.digest, position.entries) == (former.chain, len(entries))
    found = outcomes(entries)
    assert found == {
        group.seq: "batched" if group.reward.verdict == "trainable" else group.reward.verdict for group in groups
    }
    batches = [entry.batch for entry in entries if entry.batch]
    assert [batch.number for batch in batches] == list(range(former.batches))
    assert [batch.sequences for batch in batches[:-1]] == [8] * (len(batches) - 1)
    assert 0 < batches[-1].sequences <= 8
    assert former.groups == list(found.values()).count("batched")
    assert entries[-1].watermark == 899


def test_the_same_groups_give_the_same_digests_and_another_reward_gives_others():
    groups = [past_group(n) for n in range(1, 40)]
    (one, first), (other, second) = form(groups), form(groups)
    assert [entry.digest() for entry in first] == [entry.digest() for entry in second]
    assert (one.chain, one.manifest) == (other.chain, other.manifest)
    renamed, _ = form(groups, trainer="else")
    assert (renamed.manifest, renamed.chain != one.chain) == (one.manifest, True)
    manifest = GENESIS
    for entry in first:
        manifest = manifest_digest(manifest, entry.batch) if entry.batch else manifest
    assert manifest == one.manifest
    nudged = groups[20].reward.advantages[0]
    groups[20] = groups[20]._replace(
        reward=msgspec.structs.replace(groups[20].reward, advantages=[math.nextafter(nudged, 99), 0.0])
    )
    changed, third = form(groups)
    assert changed.manifest != one.manifest
    differ = [a.digest() != b.digest() for a, b in zip(first, third, strict=True)]
    assert differ == sorted(differ), "all that follows the change, and nothing before it"
    assert batch_digest(first[0].batch) == batch_digest(third[0].batch)


def test_stamps_are_in_no_digest():
    plain = [past_group(n) for n in range(1, 10)]
    stamped = [
        group._replace(reward=msgspec.structs.replace(group.reward, stamps=[("scorer", n, n, n, 1)]))
        for n, group in enumerate(plain, 1)
    ]
    assert form(plain)[0].chain == form(stamped)[0].chain


@pytest.mark.parametrize(("start", "most", "steps_left"), [
    (0, None, {0, 3, 9}), (0, 3, {0, 3}), (9, 3, {9}), (3, 3, {0, 3}), (6, 3, {3, 9}), (6, 2, set()),
])  # fmt: skip
def test_staleness_is_the_way_to_the_weights_and_what_was_trained_since(start, most, steps_left):
    """One batch holds all, so nothing has been trained since."""
    groups = [past_group(n, step=step) for n, step in enumerate((0, 3, 9), 1)]
    _, entries = form(groups, config=BatchingConfig(batch_size=64), past=OfflineStart(start, most))
    trained = {ref.policy_step for entry in entries if entry.batch for ref in entry.batch.groups}
    assert trained == steps_left
    stale = [outcome for entry in entries for outcome in entry.outcomes]
    assert {outcome.kind for outcome in stale} <= {"stale"}
    assert len(stale) == 3 - len(steps_left)


def test_every_step_taken_makes_what_is_left_staler():
    groups = [past_group(n) for n in range(1, 41)]
    _, entries = form(groups, past=OfflineStart(0, 2))
    assert sum(entry.batch is not None for entry in entries) == 3
    assert list(outcomes(entries).values()).count("stale") == 40 - 3 * 4


def test_policies_that_the_trainer_never_had_are_no_mistake():
    _, entries = form([past_group(n, step=1000 + n) for n in range(1, 9)])
    assert set(outcomes(entries).values()) == {"batched"}


def test_a_copy_is_trained_once():
    groups = [past_group(1), past_group(2, group=f"{1:032x}"), past_group(3)]
    _, entries = form(groups)
    assert outcomes(entries) == {1: "batched", 2: "duplicate", 3: "batched"}


def test_too_large_a_group_is_left_out():
    _, entries = form([past_group(1, samples=9), past_group(2, samples=8)])
    assert outcomes(entries) == {1: "oversized", 2: "batched"}


def test_advantages_are_whitened_over_the_batch():
    groups = [past_group(n, lengths=[2, 3]) for n in range(1, 5)]
    _, entries = form(groups)
    [batch] = [entry.batch for entry in entries if entry.batch]
    flat = [value for group in groups for value in group.reward.advantages]
    assert [value for ref in batch.groups for value in ref.advantages] == whiten(flat, [2, 3] * 4)


def test_a_mix_is_kept_to():
    """Within what is looked at together, each environment has its share for as long as it has groups."""
    groups = [past_group(n, env="many" if n % 4 else "few") for n in range(1, 257)]
    _, entries = form(groups, config=BatchingConfig(batch_size=8, mix={"few": 1.0, "many": 1.0}))
    first = next(entry.batch for entry in entries if entry.batch)
    assert [ref.env for ref in first.groups].count("few") == 2


async def test_logprobs_that_are_none_or_all_zero_are_missing(lab):
    sampled = lab.group(1)
    assert not without_logprobs(sampled)
    total = sampled.sequences.n_tokens
    bare = msgspec.structs.replace(sampled.sequences, logprobs=as_bytes([0.0] * total, "float32"))
    assert without_logprobs(sampled.replace(sequences=bare))
    assert without_logprobs(sampled.replace(sequences=msgspec.structs.replace(bare, logprobs=None)))
    one = [0.0] * (total - 1) + [-0.5]
    some = msgspec.structs.replace(sampled.sequences, logprobs=as_bytes(one, "float32"))
    assert not without_logprobs(sampled.replace(sequences=some))
    nothing = msgspec.structs.replace(sampled.sequences, loss_mask=pack_mask([False] * total),
                                      logprobs=as_bytes([0.0] * total, "float32"))  # fmt: skip
    assert not without_logprobs(sampled.replace(sequences=nothing)), "nothing of it is trained on"
