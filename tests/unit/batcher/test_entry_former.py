from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.batcher.entry_former import MAX_OUTCOMES_PER_ENTRY, EntryFormer
from lachesis.pipeline.batcher.join import Joiner
from lachesis.pipeline.ledger.chain import Chain
from lachesis.schemas.annotations import GroupReward
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.planning_header import Plan

CONFIG = BatchingConfig(batch_size=4, max_staleness=0)


def plan(counter: int, policy_step: int = 0) -> Plan:
    return Plan(
        group=new_group_id(), sequences=2, samples=2, tokens=8, policy_step=policy_step, producer="p", epoch=1,
        counter=counter, started_ns=1,
    )  # fmt: skip


def former(*plans: Plan, rewarded: bool = True) -> EntryFormer:
    joiner = Joiner(CONFIG)
    for seq, one in enumerate(plans, 1):
        joiner.member(seq, "a", one, 0, 0)
        reward = GroupReward(
            group=one.group, seq=seq, item="i", policy_step=0, verdict="trainable", scores=[0.0, 1.0],
            rewards=[0.0, 1.0], advantages=[-1.0, 1.0], snapshot="s", mean=0.5, std=0.5, range=1.0, n_valid=2,
        )  # fmt: skip
        if rewarded:
            joiner.reward(seq, 0, reward)
    return EntryFormer(CONFIG, joiner, Chain("r", "main", "t"))


def test_an_entry_records_its_batch_and_what_it_makes_too_old_is_in_the_next_one() -> None:
    it = former(*(plan(counter) for counter in range(3)))
    groups = it.choose()
    assert groups
    content = it.next_entry_content(groups, 1e-3)
    entry = it.write(content, written_ns=5)
    assert entry.batch
    assert [ref.seq for ref in entry.batch.groups] == [member.seq for member in content.batched] == [1, 2]
    assert (entry.watermark, entry.next_batch, entry.outcomes) == (2, 1, [])
    assert it.choose(incomplete=True) is None, "the third is too old for the next batch"
    later = it.write(it.next_entry_content([], 1e-3), written_ns=6)
    assert [(outcome.seq, outcome.kind) for outcome in later.outcomes] == [(3, "stale")]
    assert (later.batch, later.watermark) == (None, 3)


def test_an_entry_holds_only_so_many_outcomes() -> None:
    it = former(*(plan(counter, policy_step=7) for counter in range(MAX_OUTCOMES_PER_ENTRY + 1)), rewarded=False)
    sizes = [len(it.write(it.next_entry_content([], 1e-3), written_ns=0).outcomes) for _ in range(2)]
    assert sizes == [MAX_OUTCOMES_PER_ENTRY, 1]
