"""The trace model: names, parents, links, ids that do not depend on who computes them."""

from lachesis.pipeline.telemetry.spans import batch_span, batch_trace, root_id, span_id, step_span
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.plan import traceparent


def test_the_root_is_the_span_that_traceparent_names() -> None:
    group = new_group_id()
    assert traceparent(group, sampled=True) == f"00-{group}-{root_id(group)}-01"


def test_a_batch_and_its_groups_link_to_each_other() -> None:
    groups = [new_group_id(), new_group_id()]
    trace = batch_trace("r", "main", 4)
    assembled = batch_span("batcher", trace, groups, (1, 2), {})
    assert [(link.trace, link.span) for link in assembled.links] == [(group, group[16:]) for group in groups]
    assert assembled.attributes["rl.group.ids"] == groups
    step = step_span("trainer", trace, "train.step", (3, 9), {"rl.train.step": 5})
    inner = step_span("trainer", trace, "optimizer.step", (7, 9), {}, parent="train.step")
    assert (step.parent, inner.parent) == (assembled.id, step.id)


def test_ids_have_the_lengths_of_the_protocol() -> None:
    assert len(span_id("a", "b")) == 16
    assert len(batch_trace("r", "t", 0)) == 32
