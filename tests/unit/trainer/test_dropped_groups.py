"""A group that the trainer cannot use costs itself alone: on record, reproducible, to the same bits after a kill."""

import re

import anyio
import msgspec
import numpy as np
import pytest
import torch
from stages import run_trainer
from unit.trainer.test_stage import dead, dying_at_checkpoint, recording, reports, weights_after

import lachesis
from lachesis.pipeline.config.run import RunConfig, TrainingConfig
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy
from lachesis.pipeline.offline.reproduction.batches import verify_batches
from lachesis.pipeline.offline.reproduction.weights import RetrainStart, retrain
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.trainer import unreported_steps
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.schemas import keys
from lachesis.schemas.codec import decode
from lachesis.schemas.columns import Column, as_bytes
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.errors import DataError
from lachesis.schemas.ledger import GroupDrops
from lachesis.schemas.rollout import Attachment
from lachesis.schemas.subjects import ROLLOUTS

STEPS = 4
TOKENS = 5
WITHIN = 60
"""Ids that `lab.group` uses lie below."""


@pytest.fixture(autouse=True)
def _as_before():
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    policy = build_tiny_policy(0, width=16, layers=1, heads=2, max_length=32)
    save_policy(policy, folder)
    return folder, policy.tokenizer_hash, policy.model.config.vocab_size


@pytest.fixture
def config(tmp_path, model):
    return RunConfig(
        run="r",
        folder=str(tmp_path),
        model=str(model[0]),
        training=TrainingConfig(steps=STEPS, checkpoint_every=2, learner=LearnerConfig(learning_rate=1e-2)),
    )


def _with(group, **columns):
    return group.replace(sequences=msgspec.structs.replace(group.sequences, **columns))


def _floats(group, value):
    return as_bytes(np.full(group.sequences.n_tokens, value, np.float32), "float32")


def _per_token(name):
    return lambda group, _: _with(group, columns={name: Column(dtype="float32", data=_floats(group, -1.0))})


def _foreign_token(group, vocabulary):
    ids = np.full(group.sequences.n_tokens, 7, np.int32)
    ids[TOKENS + 2] = vocabulary
    return _with(group, tokens=as_bytes(ids, "int32"))


FAULTS = {
    "distill": (_per_token("distill_logprobs"), "distill_logprobs: .* text tokens alone"),
    "routing": (_per_token("routed_experts"), "routed_experts: .* text tokens alone"),
    "attachment": (lambda g, _: g.replace(attachments=[Attachment(mime="image/png", data=b"x")]), "attachments"),
    "turns": (lambda g, _: _with(g, turn_rewards=[[1.0], [0.0]]), "rewards of turns, but its batch has no"),
    "token": (_foreign_token, r"token id \d+ in sequence 1 is none of the \d+"),
    "tokenizer": (lambda g, _: g.replace(tokenizer_hash="another"), "tokenizer 'another'"),
    "logprobs": (lambda g, _: _with(g, logprobs=None), "no logprobs"),
    "mask": (
        lambda g, _: _with(g, loss_mask=bytes(len(g.sequences.loss_mask)), logprobs=_floats(g, 0.0)),
        "no sample has both",
    ),
    "gradient": (lambda g, _: _with(g, token_advantages=_floats(g, 1e37)), "by itself is not finite"),
}


def good(lab, model, number):
    return lab.group(100 * number, tokens=TOKENS, tokenizer_hash=model[1])


def bad(lab, model, number, fault):
    group = lab.group(100 * number + 1, tokens=TOKENS, tokenizer_hash=model[1])
    return FAULTS[fault][0](group, model[2])


def pairs(lab, model):
    return [[lab.group(100 * n + i, tokens=TOKENS, tokenizer_hash=model[1]) for i in range(2)] for n in range(STEPS)]


async def fill(lab, model, fault):
    """Store batches of two groups, of which the second of the second batch has a fault."""
    whole = [
        [good(lab, model, n), lab.group(100 * n + 1, tokens=TOKENS, tokenizer_hash=model[1])] for n in range(STEPS)
    ]
    whole[1][1] = bad(lab, model, 1, fault)
    entries = await lab.extend_ledger(*whole)
    return entries[3].batch.groups[1].seq


@pytest.mark.parametrize("fault", FAULTS)
async def test_the_rest_of_the_batch_is_trained_and_the_group_is_on_record(lab, model, config, fault):
    seq = await fill(lab, model, fault)
    trained = []
    with recording(trained):
        await run_trainer(Service(lab.bus, "trainer", "r"), config)
    first, second = await reports(lab)
    assert (first.step, first.voids, second.step, second.drops) == (2, [], STEPS, [])
    (drops,) = first.drops
    assert (drops.batch, drops.seqs) == (1, [seq])
    assert re.search(FAULTS[fault][1], drops.reason)
    assert len(drops.reason) <= 200
    assert [set(ids) for ids in trained][1] == {f"{100:032x}"}
    assert all(len(set(ids)) == 2 for ids in (trained[0], *trained[2:]))


async def test_a_payload_that_is_gone_costs_its_group_alone(lab, model, config):
    seq = await fill(lab, model, "token")
    entry_groups = (await lab.extend_ledger([good(lab, model, 9)]))[-1].batch.groups
    del lab.bus._logs[ROLLOUTS]._messages[seq]
    await run_trainer(Service(lab.bus, "trainer", "r"), config)
    drops = (await reports(lab))[0].drops
    assert [(drop.batch, drop.seqs) for drop in drops] == [(1, [seq])]
    assert "is gone from ROLLOUTS" in drops[0].reason
    assert entry_groups


async def test_the_weights_are_those_of_a_batch_without_the_group(lab, model, config, tmp_path):
    """Its advantages stay, and the loss is normalized over what is trained."""
    await fill(lab, model, "distill")
    await run_trainer(Service(lab.bus, "trainer", "r"), config)
    async with type(lab.bus)() as bus:
        other = type(lab)(bus)
        batches = pairs(other, model)
        del batches[1][1]
        await other.extend_ledger(*batches)
        elsewhere = msgspec.structs.replace(config, folder=str(tmp_path / "other"))
        await run_trainer(Service(other.bus, "trainer", "r"), elsewhere)
        assert not any(report.drops for report in await reports(other))
    assert weights_after(config) == weights_after(elsewhere)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["token", "gradient"])
async def test_a_kill_between_the_drop_and_its_report_changes_nothing(lab, model, config, tmp_path, fault):
    seq = await fill(lab, model, fault)
    calm = msgspec.structs.replace(config, folder=str(tmp_path / "calm"))
    with dying_at_checkpoint(lab, 2, before=True):
        await _live_until_killed(lab, calm)  # dropped, trained, and nothing of it durable
    assert not await reports(lab)
    with dying_at_checkpoint(lab, 2):
        await _live_until_killed(lab, calm)  # in the checkpoint, not reported
    assert not await reports(lab)
    await run_trainer(Service(lab.bus, "trainer", "r"), calm)
    found = await reports(lab)
    assert [[(drop.batch, drop.seqs) for drop in report.drops] for report in found] == [[(1, [seq])], []]
    async with type(lab.bus)() as bus:
        other = type(lab)(bus)
        await fill(other, model, fault)
        await run_trainer(Service(other.bus, "trainer", "r"), config)
    assert weights_after(calm) == weights_after(config)


async def _live_until_killed(lab, config):
    async with lab.running(lambda service: run_trainer(service, config), "trainer") as service:
        lab.alive = service
        await lab.until(lambda: dead(service))


@pytest.mark.parametrize("fault", ["columns", "gradient"])
async def test_reproduction_drops_what_was_dropped(lab, model, config, fault):
    await fill(lab, model, "routing" if fault == "columns" else fault)
    await run_trainer(Service(lab.bus, "trainer", "r"), config)
    facts, _ = await verify_batches(lab.bus, config, "main", None, saved={}, progress=lambda *_: None)
    options = {"end": None, "tolerance": 0.05, "sampled": False, "progress": lambda *_: None}
    (finding,) = await retrain(lab.bus, config, RetrainStart(config.model, None), facts, **options)
    assert finding.verdict == "ok", finding.text
    # the record is what counts: with the other group of the batch on it, other weights come out
    for report in facts.reports:
        for drop in report.drops:
            drop.seqs[:] = [facts.reports[0].ledger_index]
    (finding,) = await retrain(lab.bus, config, RetrainStart(config.model, None), facts, **options)
    assert finding.verdict == "fail", finding.text


async def test_many_drops_make_a_checkpoint_due(lab, model, config, monkeypatch):
    """Else the report that lists them could outgrow a message."""
    monkeypatch.setattr(unreported_steps, "_MAX_DROPS_PER_REPORT", 1)
    await fill(lab, model, "token")
    rare = msgspec.structs.replace(config.training, checkpoint_every=100)
    await run_trainer(Service(lab.bus, "trainer", "r"), msgspec.structs.replace(config, training=rare))
    assert [(report.step, len(report.drops)) for report in await reports(lab)] == [(2, 1), (4, 0)]


async def test_the_policy_record_says_which_token_ids_there_are(lab, model, config):
    await fill(lab, model, "token")
    await run_trainer(Service(lab.bus, "trainer", "r"), config)
    record = decode(PolicyRecord, (await lab.bus.value(keys.POLICY)).value)
    assert record.vocabulary == model[2]


async def test_a_trainer_of_ones_own_gets_the_others_and_commits_the_drop(lab, model):
    seq = await fill(lab, model, "attachment")
    async with lachesis.batches("r", nats=lab.bus) as batches:
        found = []
        with anyio.fail_after(60):
            async for batch in batches:
                found.append(batch)
                if len(found) == 2:
                    break
        assert found[0].dropped == {}
        assert set(found[1].packed.group_ids) == {f"{100:032x}"}
        assert list(found[1].dropped) == [f"{101:032x}"]
        await found[1].commit(policy_version="2-a-b", checkpoint="two")
    (report,) = await reports(lab)
    assert [(drop.batch, drop.seqs) for drop in report.drops] == [(1, [seq])]


async def test_a_sample_that_its_environment_excludes_is_not_trained_and_costs_no_other(lab, model):
    group = lab.group(1, samples=4, tokens=TOKENS, tokenizer_hash=model[1])
    await lab.extend_ledger([_with(group, excluded_samples=[0, 3])])
    with anyio.fail_after(60):
        async for batch in lachesis.batches("r", nats=lab.bus):
            assert batch.dropped == {}
            assert batch.packed.tokens_BT[:, 0].tolist() == [11 + 1 * TOKENS, 11 + 2 * TOKENS]
            assert batch.packed.advantages_BT[:, 1].tolist() == [-1.0, 1.0], "those of the whole group"
            break


async def test_a_bad_first_group_does_not_say_what_the_others_must_be(lab, model):
    strange = lab.group(1, tokens=TOKENS, tokenizer_hash="another")
    await lab.extend_ledger([strange, *(lab.group(n, tokens=TOKENS, tokenizer_hash=model[1]) for n in (2, 3))])
    with anyio.fail_after(60):
        async for batch in lachesis.batches("r", nats=lab.bus):
            assert set(batch.packed.group_ids) == {f"{n:032x}" for n in (2, 3)}
            break


async def test_a_batch_of_which_nothing_can_be_used_says_why_of_the_first(lab, model):
    await lab.extend_ledger([bad(lab, model, n, "distill") for n in range(2)])
    with anyio.fail_after(60):
        async for batch in lachesis.batches("r", nats=lab.bus):
            with pytest.raises(DataError, match="none of the batch's 2 groups can be trained; the first: distill"):
                _ = batch.packed
            break


def test_groups_with_one_fault_share_a_record():
    from lachesis.pipeline.trainer.sequences import TrainableBatch

    found = TrainableBatch([], [], {7: "a", 3: "b" * 900, 5: "a"}).drops(4)
    assert found == [GroupDrops(4, [3], "b" * 200), GroupDrops(4, [5, 7], "a")]
