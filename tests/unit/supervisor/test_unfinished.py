"""The rollouts that a run leaves unfinished: which they are, and that each traced one gets its root."""

from collections.abc import Iterator
from contextlib import aclosing, contextmanager

import msgspec
import pytest
from unit.spans import Sink

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.telemetry.config import TelemetryConfig
from lachesis.pipeline.telemetry.tracing import Tracing
from lachesis.schemas import subjects
from lachesis.schemas.annotations import DeadLetter
from lachesis.schemas.codec import encode
from lachesis.schemas.ledger import TrainReport
from lachesis.services.supervisor import unfinished
from lachesis.services.supervisor.unfinished import trace_unfinished, unfinished_rollouts


@pytest.fixture
def config(tmp_path):
    return RunConfig(run="r", folder=str(tmp_path), telemetry=TelemetryConfig(endpoint="http://127.0.0.1:1", ratio=1.0))


async def unfinished_of(lab, config):
    async with aclosing(unfinished_rollouts(lab.bus, config)) as ends:
        return {end.group: (end.outcome, end.reason) async for end in ends}


async def report(lab, entry):
    """Report everything up to `entry` as trained."""
    found = TrainReport(
        run="r", trainer="main", lineage="a", term="t", step=entry.next_batch, ledger_index=entry.index,
        chain=entry.digest(), next_batch=entry.next_batch, policy_version="1-a-b", checkpoint="c",
    )  # fmt: skip
    subject = subjects.state("r", "trainer", subjects.LIVE, "main")
    await lab.bus.commit(subject, encode(found), expected=0, msg_id="report")


async def test_before_the_first_entry_everything_stored_is_unfinished(lab, config):
    assert await unfinished_of(lab, config) == {}
    group = lab.group(1)
    await lab.store(group)
    await lab.store(msgspec.structs.replace(group, counter=9))  # a copy
    await lab.bus.publish(subjects.rollout("r", "sums"), b"no rollout", msg_id="x")
    await lab.bus.publish(subjects.rollout("another", "sums"), b"another's", msg_id="y")
    assert await unfinished_of(lab, config) == {group.id: ("unfinished", "the run ended before")}


async def test_what_is_batched_and_not_trained_is_unfinished_and_what_is_dead_is_so(lab, config):
    groups = [lab.group(n) for n in range(1, 6)]
    _, first, _, _ = await lab.extend_ledger(groups[:2], groups[2:3])
    await lab.store(groups[3])
    seq = await lab.store(groups[4])
    await report(lab, first)
    letter = DeadLetter(
        leased=True, run="r", env="sums", revision="live", stage="scorer", kind="poison", stream="ROLLOUTS", seq=seq,
        group=groups[4].id, reason="it kills", place="scorer 7", time_ns=1, attempts=5,
    )  # fmt: skip
    await lab.bus.publish(subjects.event("dead", "r", "live", "sums"), encode(letter), msg_id="dead")
    found = await unfinished_of(lab, config)
    waiting = "the run ended before"
    # the entries of this test record nothing as resolved: groups of trained batches are distinguished by the report
    assert found.pop(groups[2].id) == ("unfinished", "batched, and not trained")
    assert found.pop(groups[3].id) == ("unfinished", waiting)
    assert found.pop(groups[4].id) == ("dead_letter", "scorer, poison: it kills")


@pytest.fixture
def sink(monkeypatch):
    made = Sink()

    @contextmanager
    def tracing(config: RunConfig, name: str, replica: int) -> Iterator[Tracing]:
        yield Tracing(config.telemetry, made)

    monkeypatch.setattr(unfinished, "open_tracing", tracing)
    return made


@pytest.mark.parametrize("ratio", [0.0, 1.0])
async def test_those_of_the_sampled_share_get_a_root(lab, config, sink, ratio):
    await lab.store(lab.group(1))
    telemetry = TelemetryConfig(endpoint="http://127.0.0.1:1", ratio=ratio)
    await trace_unfinished(lab.bus, msgspec.structs.replace(config, telemetry=telemetry))
    assert [(span.trace, span.name, span.attributes["rl.outcome"]) for span in sink.spans] == (
        [(lab.group(1).id, "rollout", "unfinished")] if ratio else []
    )


async def test_a_server_that_is_away_costs_the_roots_and_says_so(lab, config, sink, monkeypatch, caplog):
    async def away(*_, **__):
        raise InfrastructureError("the server is unavailable")

    monkeypatch.setattr(lab.bus, "last", away)
    await trace_unfinished(lab.bus, config)
    assert not sink.spans
    assert "no root span: the server is unavailable" in caplog.text


async def test_without_traces_the_streams_are_not_read(lab, sink, monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.setattr(lab.bus, "last", None)
    await trace_unfinished(lab.bus, RunConfig(run="r"))
