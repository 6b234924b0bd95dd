from hypothesis import given
from hypothesis import strategies as st
from msgspec.msgpack import encode

from lachesis.pipeline.ledger.producer_dedup import ProducerDedup, ResolvedSet
from lachesis.schemas.planning_header import Plan


def plan(counter: int, *, producer: str = "p", epoch: int = 1) -> Plan:
    return Plan(
        group=f"{counter:032x}",
        sequences=1,
        samples=1,
        tokens=1,
        policy_step=0,
        producer=producer,
        epoch=epoch,
        counter=counter,
        started_ns=0,
    )


@given(st.integers(0, 50), st.lists(st.one_of(st.integers(1, 200), st.tuples(st.integers(1, 200))), max_size=60))
def test_resolved_is_the_set_it_stands_for(start: int, steps: list[int | tuple[int]]) -> None:
    kept, model, watermark = ResolvedSet(start), set(range(1, start + 1)), start
    for step in steps:
        if isinstance(step, tuple):
            watermark = max(watermark, step[0])
            kept.mark_up_to(step[0])
            model |= set(range(1, step[0] + 1))
        else:
            kept.mark(step)
            model.add(step)
        kept = ResolvedSet(kept.watermark, kept.pack())
        assert kept.watermark == watermark
        assert {seq for seq in range(1, 260) if seq in kept} == model


@given(st.permutations(range(40)))
def test_counters_are_known_in_any_order_and_the_marks_shrink_to_one_number(order: list[int]) -> None:
    marks = ProducerDedup()
    for i, counter in enumerate(order):
        assert plan(counter) not in marks
        marks.record(plan(counter))
        marks = ProducerDedup(marks.pack())
        assert all((plan(c) in marks) == (c in order[: i + 1]) for c in range(41))
    assert marks.pack()["p@1"].seen == [0, 40]


@given(st.lists(st.one_of(st.integers(0, 60), st.integers((1 << 63) - 40, (1 << 63) - 1)), max_size=80))
def test_a_jump_of_any_length_and_gaps_never_filled_make_no_unseen_counter_seen(counters: list[int]) -> None:
    marks, model = ProducerDedup(), set()
    for counter in counters:
        marks.record(plan(counter))
        model.add(counter)
        marks = ProducerDedup(marks.pack())
    around = {near for counter in {*model, 0} for near in (counter - 1, counter, counter + 1) if near >= 0}
    assert {counter for counter in around if plan(counter) in marks} == model


def test_epochs_and_producers_do_not_mix() -> None:
    marks = ProducerDedup()
    marks.record(plan(0, producer="a@1", epoch=2))
    assert plan(0, producer="a", epoch=2) not in marks
    assert plan(0, producer="a@1", epoch=1) not in marks
    assert plan(0, producer="a@1", epoch=2) in marks


def test_entries_stay_small_with_gaps_that_never_fill_and_producers_without_end() -> None:
    marks = ProducerDedup()
    for counter in range(1, 3001):  # 0 was never stored
        marks.record(plan(counter))
    assert plan(3000) in marks
    assert plan(0) not in marks
    assert marks.pack()["p@1"].seen == [1, 3001]
    for i in range(1000):
        marks.record(plan(0, producer=f"q{i}"))
        marks.record(plan(3001 + i))
    packed = marks.pack()
    assert len(packed) == 256
    assert plan(3500) in marks
    assert plan(0, producer="q999") in marks


def test_when_gaps_become_too_many_the_oldest_are_given_up_but_none_from_an_open_counter_on() -> None:
    marks = ProducerDedup()
    crowded = [marks.record(plan(counter)) for counter in range(1, 2 * 1025, 2)]
    assert crowded == [False] * 1024 + [True]
    marks.close_gaps(plan(0), 100)
    assert [counter for counter in range(120) if plan(counter) not in marks] == list(range(100, 120, 2))
    marks.close_gaps(plan(0), None)
    assert len(marks.pack()["p@1"].seen) <= 1026
    assert plan(2046) not in marks
    assert plan(2047) in marks


def test_a_producer_that_leaves_gaps_without_end_cannot_make_an_entry_too_large() -> None:
    marks = ProducerDedup()
    for counter in range(1, 80_000, 2):
        if marks.record(plan(counter)):
            marks.close_gaps(plan(counter), 0)  # its first rollout stays open for ever
    assert len(encode(marks.pack()["p@1"])) < 1 << 18
