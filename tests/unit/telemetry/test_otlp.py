"""Exporting to real OTLP receivers: what arrives, what a dead or slow one costs."""

import socket
import threading
import time
from typing import get_args

import pytest
from otlp import Protocol, receiving

from lachesis.pipeline.telemetry.config import TelemetryConfig
from lachesis.pipeline.telemetry.figures import Exemplar, ServiceFigures
from lachesis.pipeline.telemetry.histogram import Histogram
from lachesis.pipeline.telemetry.messages import rebuild_trace
from lachesis.pipeline.telemetry.otlp import OtlpExporter, open_otlp
from lachesis.pipeline.telemetry.spans import RolloutEnd
from lachesis.schemas.annotations import Stamp
from lachesis.schemas.control import StageVitals
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.ids import new_group_id

pytestmark = pytest.mark.outside

RESOURCE = {"service.name": "lachesis-scorer", "service.namespace": "lachesis"}
PROTOCOLS = get_args(Protocol)
PATIENCE = {"close_s": TelemetryConfig().close_s}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is left be delivered, however long a busy machine takes."""
    monkeypatch.setitem(PATIENCE, "close_s", 60.0)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")  # s


def opened(url: str, protocol: str) -> OtlpExporter:
    otlp = open_otlp(TelemetryConfig(endpoint=url, protocol=protocol, **PATIENCE), RESOURCE)  # type: ignore[arg-type]
    assert otlp is not None
    return otlp


def ended(group: str, **fields: object) -> RolloutEnd:
    defaults = {
        "group": group,
        "run": "r",
        "env": "words",
        "seq": 7,
        "sequences": 8,
        "policy_step": 3,
        "started_ns": 1_000_000_000,
        "ended_ns": 5_000_000_000,
        "outcome": "trained",
        "kept": "slow",
    }
    return RolloutEnd(**(defaults | fields))  # type: ignore[arg-type]


def until_exported(otlp: OtlpExporter, count: int) -> None:
    end = time.monotonic() + 200
    while otlp.exported < count:
        assert time.monotonic() < end, (otlp.exported, otlp.dropped)
        time.sleep(0.01)


STAMPS = [
    Stamp("scorer", 2_000_000_000, 2_100_000_000, 2_200_000_000),
    Stamp("normalizer", 2_200_000_000, 2_300_000_000, 2_400_000_000),
]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_rebuilt_trace_arrives_whole(protocol: Protocol) -> None:
    group = new_group_id()
    with receiving(protocol) as received:
        otlp = opened(received.url, protocol)
        otlp.emit(rebuild_trace(ended(group, outcome="dead_letter", reason="it broke"), STAMPS))
        otlp.close()
    assert (otlp.exported, otlp.dropped) == (6, 0)
    trace = received.trace(group)
    assert set(trace) == {
        "rollout",
        "generate",
        "queue.wait rl.rollout.{run}.{env}",
        "process rl.rollout.{run}.{env}",
        "queue.wait rl.score.{run}.{revision}.{env}",
        "process rl.score.{run}.{revision}.{env}",
    }
    root = trace["rollout"]
    assert root.parent_span_id == b""
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (1_000_000_000, 5_000_000_000)
    assert root.status.message == "it broke"
    assert all(span.parent_span_id == root.span_id for name, span in trace.items() if name != "rollout")
    wait, work = trace["queue.wait rl.rollout.{run}.{env}"], trace["process rl.rollout.{run}.{env}"]
    assert wait.end_time_unix_nano + 1_000 == work.start_time_unix_nano == 2_100_000_000
    services = {span.name: service for service, span in received.spans}
    assert services["process rl.rollout.{run}.{env}"] == "lachesis-scorer"
    assert services["process rl.score.{run}.{revision}.{env}"] == "lachesis-normalizer"
    assert services["rollout"] == "lachesis-environment"


@pytest.mark.usefixtures("patient")
def test_a_span_rebuilt_for_another_service_does_not_claim_this_ones_process() -> None:
    about = {**RESOURCE, "service.instance.id": "r.scorer.1", "host.name": "here", "rl.run": "r"}
    with receiving("grpc") as received:
        otlp = open_otlp(TelemetryConfig(endpoint=received.url, **PATIENCE), about)
        assert otlp is not None
        otlp.emit(rebuild_trace(ended(new_group_id()), STAMPS))
        otlp.close()
    assert received.resources["lachesis-scorer"].items() >= about.items()
    for other in ("lachesis-normalizer", "lachesis-environment"):
        assert received.resources[other].items() >= {("service.namespace", "lachesis"), ("rl.run", "r")}
        assert received.resources[other].keys().isdisjoint({"service.instance.id", "host.name"})


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_metrics_arrive_as_exponential_histograms_with_exemplars(protocol: Protocol) -> None:
    group = new_group_id()
    waits = Histogram.of([0.0, 0.5, 0.5, 3.0])
    stage = StageVitals(handled=4, wait=waits.pack(), lag=2)
    exemplar = Exemplar(3.0, group, 9)
    with receiving(protocol) as received:
        otlp = opened(received.url, protocol)
        otlp.observe(ServiceFigures(stage, {"reward/mean": 0.25}, 1, 10, wait_exemplars=[exemplar]))
        otlp.close()
    wait = received.metrics["lachesis-scorer", "lachesis.stage.wait"].exponential_histogram.data_points[0]
    assert (wait.count, wait.sum, wait.scale, wait.zero_count, wait.min, wait.max) == (4, 4.0, 5, 1, 0.0, 3.0)
    assert sum(wait.positive.bucket_counts) == 3
    upper = 2 ** ((wait.positive.offset + 1) / 32)
    assert wait.positive.bucket_counts[0] == 2
    assert 0.5 <= upper < 0.512
    assert wait.exemplars[0].trace_id.hex() == group
    handled = received.metrics["lachesis-scorer", "lachesis.stage.handled"].sum
    assert handled.is_monotonic
    assert handled.data_points[0].as_int == 4
    assert received.metrics["lachesis-scorer", "lachesis.stage.lag"].gauge.data_points[0].as_int == 2
    assert received.metrics["lachesis-scorer", "lachesis.reward.mean"].gauge.data_points[0].as_double == 0.25
    assert ("lachesis-scorer", "lachesis.stage.process") not in received.metrics


def test_metrics_that_cannot_be_encoded_are_reported_and_end_no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no such attribute")

    monkeypatch.setattr("lachesis.pipeline.telemetry.otlp.metrics_data", refuse)
    with receiving("grpc") as received:
        otlp = opened(received.url, "grpc")
        otlp.observe(ServiceFigures(StageVitals(), {}, 1, 10))
        otlp._export_metrics()
        assert otlp.problem == "the OTLP receiver takes no metrics: it does not answer, or refuses them"
        otlp.close()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_dead_receiver_costs_two_seconds_at_most_and_every_loss_is_counted(protocol: Protocol) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    otlp = opened(url, protocol)
    spans = rebuild_trace(ended(new_group_id()), STAMPS)
    for _ in range(4000):
        otlp.emit(spans)
    otlp.close()
    otlp._thread.join(60)
    assert not otlp._thread.is_alive(), "it goes on trying for nobody"
    assert otlp.exported == 0
    assert 24_000 - 16_384 - 512 <= otlp.dropped <= 24_000
    assert otlp.problem is not None
    assert "does not answer, or refuses them" in otlp.problem


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_collector_that_is_killed_on_the_way_holds_nobody_up(protocol: Protocol) -> None:
    spans = rebuild_trace(ended(new_group_id()), STAMPS)
    with receiving(protocol) as received:
        otlp = opened(received.url, protocol)
        otlp.emit(spans)
        until_exported(otlp, len(spans))
    for _ in range(4000):
        otlp.emit(spans)
    otlp.close()
    otlp._thread.join(60)
    assert not otlp._thread.is_alive(), "it goes on trying for nobody"
    assert otlp.exported == len(spans)
    assert otlp.dropped >= 24_000 - 16_384 - 512


def test_a_receiver_that_accepts_and_never_answers_delays_nobody_and_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        otlp = opened(f"http://127.0.0.1:{mute.getsockname()[1]}", "http/protobuf")
        assert otlp.problem is None
        otlp.emit(rebuild_trace(ended(new_group_id()), STAMPS))
        monkeypatch.setattr("lachesis.pipeline.telemetry.otlp._LATE_S", 0.1)
        while otlp.problem is None:
            assert otlp._thread.is_alive()
        assert otlp.problem == "the OTLP receiver takes no telemetry: it has not answered for 0 s"
        otlp.close()
        assert otlp._thread.is_alive(), "it was waited for to the end"
    otlp._thread.join(60)  # with the receiver its wait for an answer has ended
    assert otlp.exported == 0


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_spans_in_their_thousands_arrive_without_a_drop(protocol: Protocol) -> None:
    with receiving(protocol) as received:
        otlp = opened(received.url, protocol)
        paced = threading.Event()
        for _ in range(10):
            for _ in range(84):
                otlp.emit(rebuild_trace(ended(new_group_id()), STAMPS))
            paced.wait(0.1)
        until_exported(otlp, 10 * 84 * 6)
        otlp.close()
    assert otlp.dropped == 0
    assert otlp.exported == 10 * 84 * 6
    assert len({span.span_id for _, span in received.spans}) == 10 * 84 * 6  # what is sent again came late, not twice


@pytest.mark.usefixtures("patient")
def test_the_standard_variables_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving("http/protobuf") as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=north")
        otlp = open_otlp(TelemetryConfig(endpoint="http://127.0.0.1:9", **PATIENCE), RESOURCE)
        assert otlp is not None
        otlp.observe(ServiceFigures(StageVitals(), {}, 1, 2))
        otlp.emit(rebuild_trace(ended(new_group_id()), STAMPS))
        otlp.close()
    assert otlp.exported == 6
    assert not received.metrics


def test_nothing_is_exported_unless_somebody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_otlp(TelemetryConfig(), RESOURCE) is None
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert open_otlp(TelemetryConfig(endpoint="http://127.0.0.1:9"), RESOURCE) is None


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many"),
    ],
)
def test_a_variable_that_means_nothing_here_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=variable):
        open_otlp(TelemetryConfig(endpoint="http://127.0.0.1:9"), RESOURCE)
