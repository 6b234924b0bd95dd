import pytest

from lachesis.pipeline.errors import LedgerError
from lachesis.pipeline.ledger.chain import Chain, JoinState, LedgerPosition, make_batch
from lachesis.schemas.annotations import Stamp
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.ledger import GENESIS, GroupRef, LedgerEntry, Outcome

STATE = JoinState(5, b"\x01", 3, {})


def ref(seq: int, sequences: int = 4) -> GroupRef:
    return GroupRef(
        group=f"{seq:032x}", seq=seq, env="e", sequences=sequences, tokens=10, policy_step=0, advantages=[1.0]
    )


def extend(chain: Chain, *, batched: tuple[int, ...] = (), dropped: tuple[int, ...] = ()) -> LedgerEntry:
    return chain.extend(
        STATE,
        batch=make_batch(chain.next_batch, [ref(seq) for seq in batched], 8) if batched else None,
        outcomes=[Outcome(seq, None, "stale", 4) for seq in dropped],
        stamps={"g": [Stamp("s", 1, 2, 3)]},
        written_ns=7,
    )


def test_a_writer_that_starts_again_continues_the_same_chain() -> None:
    one, two = Chain("r", "t", "term1"), None
    entries = []
    for batched, dropped in (((2, 1), ()), ((), (3,)), ((4, 5), (6,)), ((7,), ())):
        entry = extend(one if two is None else two, batched=batched, dropped=dropped)
        entries.append(decode(LedgerEntry, encode(entry)))
        two = Chain("r", "t", "term2", entries[-1])
    position = LedgerPosition()
    for entry in entries:
        position = position.after(entry)
    assert [entry.index for entry in entries] == [0, 1, 2, 3]
    assert entries[0].previous == GENESIS
    assert [entry.batch.number for entry in entries if entry.batch] == [0, 1, 2]
    assert entries[0].batch
    assert [group.seq for group in entries[0].batch.groups] == [1, 2]
    assert [entry.batch.complete for entry in entries if entry.batch] == [True, True, False]
    assert entries[-1].totals == {"batched": 5, "stale": 2, "sequences": 28, "batched_sequences": 20}


def test_who_wrote_it_and_when_is_outside_the_chain_and_everything_else_inside() -> None:
    entry = extend(Chain("r", "t", "a"), batched=(1, 2))
    assert entry.replace(term="b", written_ns=1, stamps={}).digest() == entry.digest()
    for change in ({"watermark": 6}, {"resolved": b""}, {"events_cursor": 4}, {"totals": {}}, {"outcomes": []}):
        changed = entry.replace(**change)
        assert (changed.digest() == entry.digest()) == (changed == entry)
    assert entry.replace(batch=None).digest() != entry.digest()


def test_a_reader_refuses_a_gap_a_repeat_and_another_history() -> None:
    chain = Chain("r", "t", "a")
    first, second, third = (extend(chain, dropped=(seq,)) for seq in (1, 2, 3))
    position = LedgerPosition().after(first)
    with pytest.raises(LedgerError, match="entry 2 where 1 follows"):
        position.after(third)
    with pytest.raises(LedgerError, match="entry 0 where 1 follows"):
        position.after(first)
    other = Chain("r", "t", "a")
    extend(other, dropped=(9,))
    with pytest.raises(LedgerError, match="rolled back or replaced"):
        position.after(extend(other, dropped=(2,)))
    assert position.after(second).after(third).entries == 3
