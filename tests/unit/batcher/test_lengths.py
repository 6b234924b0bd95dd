"""Lengths of what is trained and of what is dropped as stale, by environment, and in the figures."""

from lachesis.pipeline.batcher.join import PendingRollout
from lachesis.pipeline.batcher.lengths import RecentLengths, stale_lengths
from lachesis.schemas.ledger import GroupRef, Outcome
from lachesis.schemas.planning_header import Plan


def member(seq, kind, *, env="e", tokens=40, sequences=4, plan=True):
    made = Plan(group=f"{seq:032x}", sequences=sequences, samples=sequences, tokens=tokens, policy_step=0, producer="p",
                epoch=1, counter=seq, started_ns=1)  # fmt: skip
    outcome = Outcome(seq, made.group, kind, sequences) if kind else None
    return PendingRollout(seq, env, made if plan else None, 1, outcome=outcome)


def ref(tokens, sequences):
    return GroupRef(group="0" * 32, seq=1, env="e", sequences=sequences, tokens=tokens, policy_step=0, advantages=[])


def test_only_stale_groups_count_each_with_its_mean():
    settled = [
        member(1, "stale"), member(2, "stale", tokens=90), member(3, "zero_variance"), member(4, "stale", env="f"),
        member(5, "dead", plan=False), member(6, None),
    ]  # fmt: skip
    assert stale_lengths(settled) == {"e": [10, 22], "f": [10]}


def test_figures_are_means_and_what_there_is_none_of_is_left_out():
    recent = RecentLengths()
    assert recent.figures() == {}
    recent.record_entry([ref(40, 4), ref(20, 1)], {})
    assert recent.figures() == {
        "batching/tokens_per_sequence/batched": 15.0,
        "batching/tokens_per_sequence/generated": 15.0,
    }
    recent.record_entry([], {"e": [100], "f": [50, 60]})
    assert recent.figures()["batching/tokens_per_sequence/stale"] == 70.0
    assert recent.figures()["batching/tokens_per_sequence/generated"] == 48.0
    recent.record_entry([ref(8, 1)] * 2000, {})
    assert recent.figures()["batching/tokens_per_sequence/batched"] == 8.0
