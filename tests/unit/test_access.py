"""The table of who may do what: no gaps, and one writer for each kind of event."""

from collections import Counter

import pytest

from lachesis.pipeline.access import OBSERVER, OPERATOR, Scope, identity_of, roles
from lachesis.pipeline.bus.routing import matches, stream_of
from lachesis.pipeline.extension import access_of
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.subjects import BUCKET, STREAMS, WEIGHTS, value_subject, weights_subjects
from lachesis.services.registry import services

SCOPE = Scope(run="one", revision="live", trainer="main", environments=("words", "sums"), foreign=("sums",))
TABLE = access_of(SCOPE)
WORKERS = sorted(set(TABLE) - {OPERATOR, OBSERVER})


def is_stored(subject: str) -> bool:
    try:
        return bool(stream_of(subject))
    except ConfigError:
        return False


def test_every_service_has_a_row() -> None:
    assert set(WORKERS) == {*services(), "environment-words", "environment-sums"} - {"environment"}


@pytest.mark.extension
def test_every_kind_of_event_has_one_service_that_writes_it() -> None:
    writers = Counter(
        subject
        for identity in WORKERS
        for subject in TABLE[identity].writes
        if is_stored(subject) and not subject.startswith(("rl.dead.", "rl.blob."))
    )
    assert writers
    assert {subject for subject, n in writers.items() if n > 1} == {"rl.rollout.one.sums"}  # its key, and the gateway


def test_what_is_named_exists() -> None:
    stores = {*STREAMS, BUCKET}
    for row in TABLE.values():
        for names in (row.reads, row.gets, row.measures, row.trims, row.makes):
            assert set(names) <= stores
        assert set(row.reads) <= set(row.gets)
        single = {subject for stream, subject in row.rereads if stream == BUCKET}
        assert BUCKET in row.gets or {value_subject("one", key) for key in (*row.watches, *row.sets)} == single


def test_nothing_belongs_to_another_run() -> None:
    for row in TABLE.values():
        for subject in (*row.writes, *row.tells, *row.hears, *row.serves, *(subject for _, subject in row.asks)):
            assert ".one" in subject or subject.startswith("$SRV."), subject


@pytest.mark.parametrize("subject", ["$SRV.>", "rl.>"])
def test_no_service_hears_everything(subject: str) -> None:
    # nats-server lets a user that may subscribe to `a.*` subscribe to `a.>` as well
    for identity in WORKERS:
        heard = (*TABLE[identity].hears, *TABLE[identity].serves)
        assert not any(matches(pattern, subject) for pattern in heard), identity


def test_whoever_is_asked_serves_it() -> None:
    for identity, row in TABLE.items():
        for other, subject in row.asks:
            served = TABLE[other].serves
            assert any(matches(pattern, subject) or matches(subject, pattern) for pattern in served), (
                identity,
                subject,
            )


def test_an_environment_has_to_do_with_itself_alone() -> None:
    row = TABLE["environment-words"]
    assert not row.reads, "it makes no consumers"
    named = (*row.writes, *(subject for _, subject in row.asks), *row.watches)
    assert not [subject for subject in named if "sums" in subject]
    assert "rl.rollout.one.words" in row.writes
    assert ("governor", "rl.lease.one.words") in row.asks


def test_the_names_under_which_processes_speak() -> None:
    assert roles("environment-a") == ("environment-a",)
    assert roles("inference") == ("inference", "inference-policy", "inference-teacher", "inference-eval")
    assert identity_of("environment", "a") == "environment-a"
    assert identity_of("inference", "policy") == "inference"


def test_the_trainer_writes_and_trims_weights_and_inference_reads_them() -> None:
    stored = set(weights_subjects("one"))
    assert {name for name in WORKERS if stored & set(TABLE[name].writes)} == {"trainer"}
    assert {name for name in WORKERS if WEIGHTS in TABLE[name].trims} == {"trainer"}
    assert {name for name in WORKERS if WEIGHTS in TABLE[name].gets} == {
        "trainer",
        "inference",
        "evaluator",
        "governor",
    }
    assert not TABLE["inference"].writes
