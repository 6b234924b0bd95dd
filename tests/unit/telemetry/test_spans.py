"""The trace model: names, parents, links, ids that do not depend on who computes them."""

from lachesis.pipeline.telemetry.spans import (
    RolloutEnd,
    batch_span,
    batch_trace,
    consume_spans,
    process_id,
    publish_span,
    rebuilt,
    root_id,
    span_id,
    stage_spans,
    step_span,
)
from lachesis.schemas.annotations import Stamp
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.plan import traceparent

STAMP = Stamp("scorer", 1_000, 5_000_000, 7_000_000, 2)


def test_the_root_is_the_span_that_traceparent_names() -> None:
    group = new_group_id()
    assert traceparent(group, sampled=True) == f"00-{group}-{root_id(group)}-01"


def test_a_stage_waits_then_works_with_a_gap_between() -> None:
    group = new_group_id()
    waited, worked = stage_spans(group, STAMP, "rl.rollout.r.words")
    assert (waited.start_ns, waited.end_ns) == (1_000, 4_999_000)
    assert (worked.start_ns, worked.end_ns) == (5_000_000, 7_000_000)
    assert waited.parent == worked.parent == root_id(group)
    assert (waited.kind, worked.kind) == ("internal", "consumer")
    assert worked.attributes["rl.delivery.attempt"] == 2
    assert worked.attributes["rl.queue.wait_s"] == 0.004999


def test_clocks_that_disagree_make_no_span_that_ends_before_it_begins() -> None:
    for span in stage_spans(new_group_id(), Stamp("scorer", 9_000_000, 5_000_000, 4_000_000), "s"):
        assert span.start_ns <= span.end_ns


def test_the_same_work_has_the_same_ids_and_another_attempt_has_others() -> None:
    group = new_group_id()
    first = [span.id for span in stage_spans(group, STAMP, "s")]
    assert first == [span.id for span in stage_spans(group, STAMP, "s")]
    again = [span.id for span in stage_spans(group, Stamp("scorer", 1, 2, 3, 3), "s")]
    assert not set(first) & set(again)
    assert process_id(group, "scorer", 2) == first[1]
    assert process_id(new_group_id(), "scorer", 2) != first[1]


def test_a_batch_and_its_groups_link_to_each_other() -> None:
    groups = [new_group_id(), new_group_id()]
    trace = batch_trace("r", "main", 4)
    assembled = batch_span("batcher", trace, groups, (1, 2), {})
    assert [(link.trace, link.span) for link in assembled.links] == [(group, group[16:]) for group in groups]
    assert assembled.attributes["rl.group.ids"] == groups
    step = step_span("trainer", trace, "train.step", (3, 9), {"rl.train.step": 5})
    inner = step_span("trainer", trace, "optimizer.step", (7, 9), {}, parent="train.step")
    assert (step.parent, inner.parent) == (assembled.id, step.id)
    waited, consumed = consume_spans("trainer", groups[0], trace, 5, (1, 3_000, 9_000))
    assert (waited.start_ns, waited.end_ns, consumed.start_ns, consumed.end_ns) == (1, 2_000, 3_000, 9_000)
    assert consumed.parent == root_id(groups[0])
    assert (consumed.links[0].trace, consumed.links[0].span) == (trace, step.id)
    assert consumed.attributes["rl.train.trace_id"] == trace


def test_a_publish_belongs_to_the_work_before_it() -> None:
    group = new_group_id()
    parent = process_id(group, "scorer", 1)
    span = publish_span("scorer", group, parent, "rl.score.r.live.words", (1, 2), message="EVENTS:9", size=300)
    assert (span.parent, span.kind) == (parent, "client")
    assert span.attributes["messaging.message.id"] == "EVENTS:9"


def test_a_trace_without_stamps_is_its_root_alone() -> None:
    group = new_group_id()
    end = RolloutEnd(
        group=group,
        run="r",
        env="words",
        seq=1,
        sequences=4,
        policy_step=0,
        started_ns=1,
        ended_ns=2,
        outcome="dropped",
        reason="stale",
    )
    (root,) = rebuilt(end, [])
    assert (root.id, root.parent, root.error) == (root_id(group), None, None)
    assert root.attributes["rl.outcome.reason"] == "stale"
    assert "rl.train.step" not in root.attributes


def test_ids_have_the_lengths_of_the_protocol() -> None:
    assert len(span_id("a", "b")) == 16
    assert len(batch_trace("r", "t", 0)) == 32
