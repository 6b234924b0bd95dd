"""The table of who may do what: no gaps, and one writer for each kind of event."""

from collections import Counter

import pytest

from lachesis.pipeline.bus.routing import matches, stream_of
from lachesis.schemas.access import OBSERVER, OPERATOR, Scope, access_table, roles
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.subjects import BUCKETS, STREAMS
from lachesis.services.registry import SERVICES

SCOPE = Scope(run="one", revision="live", trainer="main", environments=("words", "sums"))
TABLE = access_table(SCOPE)


def is_stored(subject: str) -> bool:
    try:
        return bool(stream_of(subject))
    except ConfigError:
        return False


def test_every_service_has_a_row() -> None:
    assert set(TABLE) == {*SERVICES, OPERATOR, OBSERVER}


def test_every_kind_of_event_has_one_service_that_writes_it() -> None:
    writers = Counter(
        subject
        for service in SERVICES
        for subject in TABLE[service].writes
        if is_stored(subject) and not subject.startswith(("rl.dead.", "rl.blob."))
    )
    assert writers
    assert {subject for subject, n in writers.items() if n > 1} == {"rl.rollout.one.*"}  # environments and the gateway


def test_what_is_named_exists() -> None:
    stores = {*STREAMS, *BUCKETS.values()}
    for row in TABLE.values():
        for names in (row.reads, row.gets, row.measures, row.trims, row.makes):
            assert set(names) <= stores
        assert {bucket for bucket, _ in row.sets} <= set(BUCKETS.values())
        assert set(row.reads) <= set(row.gets)
        assert not set(row.consumes) & set(row.others)


def test_nothing_belongs_to_another_run() -> None:
    for row in TABLE.values():
        for subject in row.writes:
            assert ".one" in subject or subject == "$SRV.>", subject
        for subject in row.hears:
            assert ".one" in subject or subject.startswith(("$SRV.", "rl.>")), subject


@pytest.mark.parametrize("subject", ["$SRV.>", "rl.>"])
def test_no_service_hears_everything(subject: str) -> None:
    # nats-server lets whoever may subscribe to `a.*` subscribe to `a.>` as well
    for service in SERVICES:
        assert not any(matches(pattern, subject) for pattern in TABLE[service].hears), service


def test_the_parts_that_services_play() -> None:
    assert roles("environment", ("a",)) == ("environment", "environment-a")
    assert roles("inference", ("a",)) == ("inference", "inference-policy", "inference-teacher", "inference-eval")
    assert roles("scorer", ("a",)) == ("scorer",)
