"""Spans of messages: their times, ids and parents, and the attributes of the conventions for messaging."""

import pytest

from lachesis.pipeline.telemetry.messages import (
    consume_spans,
    delivery_attributes,
    process_id,
    publish_span,
    rebuild_trace,
    stage_spans,
)
from lachesis.pipeline.telemetry.spans import RolloutEnd, batch_trace, root_id, span_id
from lachesis.schemas.annotations import Stamp
from lachesis.schemas.errors import DataError
from lachesis.schemas.ids import new_group_id

STAMP = Stamp("scorer", 1_000, 5_000_000, 7_000_000, 2)
SERVER = ("nats.example", 4222)


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


@pytest.mark.parametrize("waited_ns", [-5_000, 0, 999, 1_000])
def test_where_there_was_no_wait_there_is_no_span_of_one(waited_ns: int) -> None:
    stamp = Stamp("scorer", 5_000_000 - waited_ns, 5_000_000, 7_000_000)
    (worked,) = stage_spans(new_group_id(), stamp, "s")
    assert worked.attributes["rl.queue.wait_s"] == max(0, waited_ns) / 1e9
    waited, _ = stage_spans(new_group_id(), Stamp("scorer", 4_998_999, 5_000_000, 7_000_000), "s")
    assert (waited.start_ns, waited.end_ns) == (4_998_999, 4_999_000)


def test_names_and_places_of_messages_do_not_grow_with_runs_and_environments() -> None:
    names = {
        span.name
        for run in ("one", "two")
        for env in ("words", "sums")
        for span in stage_spans(new_group_id(), STAMP, f"rl.rollout.{run}.{env}")
    }
    assert names == {"queue.wait rl.rollout.{run}.{env}", "process rl.rollout.{run}.{env}"}


def test_the_same_work_has_the_same_ids_and_another_attempt_has_others() -> None:
    group = new_group_id()
    first = [span.id for span in stage_spans(group, STAMP, "s")]
    assert first == [span.id for span in stage_spans(group, STAMP, "s")]
    again = [span.id for span in stage_spans(group, Stamp("scorer", 1, 2, 3, 3), "s")]
    assert not set(first) & set(again)
    assert process_id(group, "scorer", 2) == first[1]
    assert process_id(new_group_id(), "scorer", 2) != first[1]


def test_a_publish_belongs_to_the_work_before_it() -> None:
    group = new_group_id()
    parent = process_id(group, "scorer", 1)
    span = publish_span(
        "scorer", group, parent, "rl.score.r.live.words", (1, 2), server=SERVER, message="EVENTS:9", size=300
    )
    assert (span.name, span.parent, span.kind) == ("publish rl.score.{run}.{revision}.{env}", parent, "client")
    assert span.attributes == {
        "messaging.system": "nats",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": "rl.score.r.live.words",
        "messaging.destination.template": "rl.score.{run}.{revision}.{env}",
        "rl.run": "r",
        "rl.env.name": "words",
        "messaging.message.id": "EVENTS:9",
        "messaging.message.body.size": 300,
        "server.address": "nats.example",
        "server.port": 4222,
    }


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
    (root,) = rebuild_trace(end, [])
    assert (root.id, root.parent, root.error) == (root_id(group), None, None)
    assert root.attributes["rl.outcome.reason"] == "stale"
    assert "rl.train.step" not in root.attributes


def test_work_on_a_message_says_which_one_and_whose_delivery_it_was() -> None:
    group = new_group_id()
    taken = delivery_attributes(9, "scorer=r=live")
    waited, worked = stage_spans(group, STAMP, "rl.rollout.r.words", taken, server=SERVER)
    where = {
        "messaging.system": "nats",
        "messaging.destination.name": "rl.rollout.r.words",
        "messaging.destination.template": "rl.rollout.{run}.{env}",
        "rl.run": "r",
        "rl.env.name": "words",
    }
    assert waited.attributes == where
    assert worked.attributes == {
        **where,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.message.id": "ROLLOUTS:9",
        "messaging.consumer.group.name": "scorer=r=live",
        "server.address": "nats.example",
        "server.port": 4222,
        "rl.group.id": group,
        "rl.delivery.attempt": 2,
        "rl.queue.wait_s": 0.004999,
    }
    assert worked.error is None


def test_work_that_failed_says_how() -> None:
    _, worked = stage_spans(new_group_id(), STAMP, "rl.rollout.r.words", error=DataError("too large"))
    assert (worked.error, worked.attributes["error.type"]) == ("too large", "DataError")


def test_a_step_consumes_what_the_ledger_gave_it() -> None:
    group, trace = new_group_id(), batch_trace("r", "main", 4)
    waited, consumed = consume_spans(
        "trainer", group, trace, 5, (1, 3_000, 9_000), subject="rl.ledger.r.main", server=SERVER
    )
    assert waited.name == "queue.wait rl.ledger.{run}.{trainer}"
    assert (waited.start_ns, waited.end_ns, consumed.start_ns, consumed.end_ns) == (1, 2_000, 3_000, 9_000)
    assert (consumed.parent, consumed.kind) == (root_id(group), "consumer")
    assert (consumed.links[0].trace, consumed.links[0].span) == (trace, span_id(trace, "train.step"))
    assert consumed.attributes == {
        "messaging.system": "nats",
        "messaging.destination.name": "rl.ledger.r.main",
        "messaging.destination.template": "rl.ledger.{run}.{trainer}",
        "rl.run": "r",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "server.address": "nats.example",
        "server.port": 4222,
        "rl.group.id": group,
        "rl.train.step": 5,
        "rl.batch.id": 4,
        "rl.train.trace_id": trace,
    }


def test_a_rebuilt_trace_names_what_the_stages_took_under_the_revision_of_the_run() -> None:
    group = new_group_id()
    end = RolloutEnd(
        group=group, run="r", env="words", seq=7, sequences=4, policy_step=0, started_ns=1, ended_ns=2,
        outcome="trained", revision="second",
    )  # fmt: skip
    normalized = Stamp("normalizer", 7_000_000, 8_000_000, 9_000_000)
    processed = {
        span.service: span for span in rebuild_trace(end, [STAMP, normalized]) if span.name.startswith("process")
    }
    scorer, normalizer = processed["scorer"].attributes, processed["normalizer"].attributes
    assert scorer["messaging.message.id"] == "ROLLOUTS:7"
    assert scorer["messaging.consumer.group.name"] == "scorer=r=second"
    assert normalizer["messaging.destination.name"] == "rl.score.r.second.words"
    assert "messaging.message.id" not in normalizer  # the stamp does not tell
