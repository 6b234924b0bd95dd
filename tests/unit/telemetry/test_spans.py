"""The trace model: names, parents, links, ids that do not depend on who computes them."""

import pytest

from lachesis.pipeline.telemetry.spans import (
    SpanLink,
    batch_span,
    batch_trace,
    root_id,
    sampled_parent,
    span_id,
    step_span,
)
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.planning_header import traceparent


def test_the_root_is_the_span_that_traceparent_names() -> None:
    group = new_group_id()
    assert traceparent(group, sampled=True) == f"00-{group}-{root_id(group)}-01"


def test_a_batch_and_its_groups_link_to_each_other() -> None:
    groups = [new_group_id(), new_group_id()]
    trace = batch_trace("r", "main", 4)
    unsampled = new_group_id()
    assembled = batch_span("batcher", trace, [*groups, unsampled], (1, 2), {}, kept=groups)
    assert [(link.trace, link.span) for link in assembled.links] == [(group, group[16:]) for group in groups]
    assert assembled.attributes["rl.group.ids"] == [*groups, unsampled]
    step = step_span("trainer", trace, (3, 9), {"rl.train.step": 5})
    assert step.parent == assembled.id


def test_ids_have_the_lengths_of_the_protocol() -> None:
    assert len(span_id("a", "b")) == 16
    assert len(batch_trace("r", "t", 0)) == 32


@pytest.mark.parametrize(
    ("flags", "sampled"), [("01", True), ("03", True), ("00", False), ("02", False), ("01-of-another-version", True)]
)
def test_a_traceparent_names_a_parent_only_where_that_is_exported(flags: str, sampled: bool) -> None:
    parent = sampled_parent(f"00-{'a' * 32}-{'b' * 16}-{flags}")
    assert parent == (SpanLink("a" * 32, "b" * 16) if sampled else None)


@pytest.mark.parametrize(
    "header", ["", "00", "nonsense", f"00-{'0' * 32}-{'b' * 16}-01", f"ff-{'a' * 32}-{'b' * 16}-01"]
)
def test_a_header_that_names_no_span_names_no_parent(header: str) -> None:
    assert sampled_parent(header) is None
