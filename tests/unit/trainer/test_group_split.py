"""The shares of ranks: every group once, whole, balanced by tokens, the same everywhere."""

from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.trainer.group_split import share_of, split_groups
from lachesis.schemas.ledger import Batch, GroupRef


def _batch(tokens):
    groups = [
        GroupRef(
            group=f"{at:032x}", seq=at + 1, env="sums", sequences=2, tokens=count, policy_step=0, advantages=[1.0, -1.0]
        )
        for at, count in enumerate(tokens)
    ]
    return Batch(number=0, groups=groups, sequences=2 * len(groups), tokens=sum(tokens))


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=40), st.integers(1, 9))
def test_every_group_has_one_rank_and_no_two_differ_by_more_than_the_largest_group(tokens, ranks):
    batch = _batch(tokens)
    shares = split_groups(batch.groups, ranks)
    assert sorted(group.seq for share in shares for group in share) == [group.seq for group in batch.groups]
    for share in shares:
        assert [group.seq for group in share] == sorted(group.seq for group in share)
    sums = [sum(group.tokens for group in share) for share in shares]
    assert max(sums) - min(sums) <= max(tokens)
    assert shares == split_groups(batch.groups, ranks)


def test_shares_are_balanced_by_tokens_not_by_groups():
    shares = split_groups(_batch([90, 10, 20, 30, 30]).groups, 2)
    assert [[group.tokens for group in share] for share in shares] == [[90], [10, 20, 30, 30]]


def test_a_share_counts_what_is_in_it_and_a_lone_rank_has_all():
    batch = _batch([5, 7, 11])
    assert share_of(batch, 0, 1) is batch
    shares = [share_of(batch, rank, 4) for rank in range(4)]
    assert [share.tokens for share in shares] == [11, 7, 5, 0]
    assert [share.sequences for share in shares] == [2, 2, 2, 0]
    assert {share.number for share in shares} == {0}
