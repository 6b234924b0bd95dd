"""What the trainer exports of a step: the ends of its rollouts, and links to those whose traces are kept."""

import msgspec
import pytest
from unit.spans import Sink

from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.telemetry.config import TelemetryConfig
from lachesis.pipeline.telemetry.tracing import Tracing
from lachesis.pipeline.trainer.feed import LedgerBatch
from lachesis.pipeline.trainer.traces import trace_step
from lachesis.schemas.annotations import Stamp
from lachesis.schemas.errors import DataError

TIMES = 5_000_000, 9_000_000
SCORED, TAUGHT = Stamp("scorer", 1_000, 3_000, 4_000), Stamp("teacher", 1_000, 3_000, 4_000)


@pytest.fixture
def sink():
    return Sink()


async def fed(lab, stamps, *, lost=False):
    """A batch of one group for each list of stamps; `lost`: its payloads cannot be fetched."""
    groups = [lab.group(n) for n in range(1, len(stamps) + 1)]
    _, entry = await lab.extend_ledger(groups)
    entry = msgspec.structs.replace(
        entry, stamps={group.id: found for group, found in zip(groups, stamps, strict=True)}
    )
    payloads = [] if lost else [(ref, group, None) for ref, group in zip(entry.batch.groups, groups, strict=True)]
    unfetched = {ref.seq: DataError("it is gone") for ref in entry.batch.groups} if lost else {}
    return LedgerBatch(entry, entry.batch, payloads, unfetched)


def traced(lab, sink, batch, *, ratio=0.0, void=None, dropped=None, teacher=False):
    service = Service(lab.bus, "trainer", "r", tracing=Tracing(TelemetryConfig(ratio=ratio, slow_s=3600.0), sink))
    return trace_step(service, batch, TIMES, [], void=void, dropped=dropped or {}, teacher=teacher)


async def test_a_step_links_to_the_rollouts_that_are_kept_and_to_no_others(lab, sink):
    batch = await fed(lab, [[SCORED], [msgspec.structs.replace(SCORED, attempt=2)]])
    _, again = (ref.group for ref in batch.batch.groups)
    assert traced(lab, sink, batch) == [again]
    (step,) = [span for span in sink.spans if span.name == "train.step"]
    assert [link.trace for link in step.links] == [again]
    assert sink.roots() == {again: ("trained", "redelivered")}


async def test_a_group_whose_teacher_did_not_come_in_time_is_kept(lab, sink):
    batch = await fed(lab, [[SCORED], [SCORED, TAUGHT], []])
    late = batch.batch.groups[0].group
    assert traced(lab, sink, batch, teacher=True) == [late]
    assert sink.roots() == {late: ("trained", "late")}
    assert traced(lab, sink, batch) == []  # no process waited for one


@pytest.mark.parametrize("ratio", [0.0, 1.0])
async def test_a_batch_that_is_lost_ends_its_rollouts_too(lab, sink, ratio):
    """Their payloads say when they began, and are gone."""
    batch = await fed(lab, [[SCORED], []], lost=True)
    assert traced(lab, sink, batch, ratio=ratio, void="it is gone") == []
    assert sink.roots() == {ref.group: ("dropped", "failed") for ref in batch.batch.groups}
    assert all(span.start_ns <= span.end_ns for span in sink.spans)


async def test_a_group_that_a_trainer_leaves_out_is_kept_with_the_reason(lab, sink):
    batch = await fed(lab, [[SCORED], [SCORED]])
    left_out = batch.batch.groups[1]
    assert traced(lab, sink, batch, dropped={left_out.seq: "a token id beyond the vocabulary"}) == [left_out.group]
    assert sink.roots() == {left_out.group: ("dropped", "failed")}
    (root,) = [span for span in sink.spans if span.name == "rollout"]
    assert root.attributes["rl.outcome.reason"] == "a token id beyond the vocabulary"
