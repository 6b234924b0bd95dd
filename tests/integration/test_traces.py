"""One rollout, one trace: through every service, each a process, to a real OTLP receiver."""

from pathlib import Path
from typing import Any

import pytest
from integration.harness import Run
from integration.servers import Supervised
from otlp import Received, receiving

STEPS = 6
CLOCKS_NS = 200_000_000
"""Each process knows the server's time to half an exchange with it, which is long on a busy machine."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run_traced(folder: Path, received: Received, ratio: float, **settings: object) -> None:
    folder.mkdir()
    sets = {"telemetry.endpoint": received.url, "telemetry.ratio": ratio, **settings}
    run = Run(
        folder,
        STEPS,
        Supervised(folder),
        sets=sets,
        environ={"OTEL_METRIC_EXPORT_INTERVAL": "500", "OTEL_BSP_SCHEDULE_DELAY": "100"},
    )
    with run:
        run.start()
        assert run.process is not None
        assert run.process.wait(400) == 0, run.tail()


def traces(received: Received) -> dict[str, list[tuple[str, Any]]]:
    found: dict[str, list[tuple[str, Any]]] = {}
    for service, span in received.spans:
        found.setdefault(span.trace_id.hex(), []).append((service, span))
    return found


def values(span: Any) -> dict[str, Any]:
    """Return a span's attributes; lists stay as OTLP has them."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


MESSAGE = {"messaging.system", "messaging.destination.name", "messaging.destination.template"}
OPERATION = {*MESSAGE, "messaging.operation.name", "messaging.operation.type", "server.address", "server.port"}
DELIVERY = {"rl.group.id", "rl.delivery.attempt", "rl.queue.wait_s"}
CONSUMED = {"messaging.message.id", "messaging.consumer.group.name"}


def check_attributes(spans: dict[tuple[str, str], Any], group: str, resources: dict[str, dict[str, str]]) -> None:
    """What every span of a rollout's trace says, by service and kind of span."""
    found = {(service, name.partition(" ")[0]): values(span) for (service, name), span in spans.items()}
    publishes = {*OPERATION, "messaging.message.id", "messaging.message.body.size"}
    expected = {
        ("environment-sums", "generate"): {"rl.group.size", "rl.policy.version"},
        ("environment-sums", "chat"): {
            "gen_ai.operation.name", "gen_ai.request.model", "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens",
        },
        ("environment-sums", "publish"): publishes,
        ("scorer", "queue.wait"): MESSAGE,
        ("scorer", "process"): OPERATION | DELIVERY | CONSUMED,
        ("scorer", "score"): {"rl.rater", "rl.samples", "rl.missing"},
        ("scorer", "publish"): publishes,
        ("teacher", "queue.wait"): MESSAGE,
        ("teacher", "process"): OPERATION | DELIVERY | CONSUMED,
        ("teacher", "prompt_logprobs"): {
            "gen_ai.operation.name", "gen_ai.request.model", "gen_ai.usage.input_tokens",
        },
        ("teacher", "publish"): publishes,
        ("normalizer", "queue.wait"): MESSAGE,
        ("normalizer", "process"): OPERATION | DELIVERY | {"messaging.message.id"},
        ("normalizer", "publish"): publishes,
        ("batcher", "queue.wait"): MESSAGE,
        ("batcher", "process"): OPERATION | DELIVERY,
        ("batcher", "publish"): publishes,
        ("trainer", "queue.wait"): MESSAGE,
        ("trainer", "train.consume"): {
            *OPERATION, "rl.group.id", "rl.train.step", "rl.batch.id", "rl.train.trace_id",
        },
    }  # fmt: skip
    told = {key: about.keys() for key, about in found.items() if key != ("environment-sums", "rollout")}
    assert told == expected
    servers = {(about["server.address"], about["server.port"]) for about in found.values() if "server.port" in about}
    assert len(servers) == 1
    assert {about["rl.group.id"] for about in found.values() if "rl.group.id" in about} == {group}
    published = {name: values(span)["messaging.message.id"] for (_, name), span in spans.items() if "publish " in name}
    assert {name.removeprefix("publish "): stored.partition(":")[0] for name, stored in published.items()} == {
        "rl.rollout.killed.sums": "ROLLOUTS",
        "rl.score.killed.live.sums": "EVENTS",
        "rl.logprobs.killed.live.sums": "TEACHER",
        "rl.teacher.killed.live.sums": "EVENTS",
        "rl.reward.killed.live.sums": "EVENTS",
        "rl.ledger.killed.main": "LEDGER",
    }
    process = {"service.namespace", "service.instance.id", "host.name", "rl.run"}
    assert all(resources[service].keys() >= process for service in ("scorer", "teacher", "normalizer", "trainer"))


def test_a_sampled_rollout_is_one_trace_over_all_processes(tmp_path: Path) -> None:
    with receiving("grpc") as received:
        run_traced(tmp_path / "a run", received, 1.0)
    whole = traces(received)
    trained = [
        trace
        for trace in whole.values()
        if any(span.name == "train.consume" for _, span in trace) and len({span.name for _, span in trace}) > 10
    ]
    assert len(trained) >= (STEPS - 2) * 4  # what the last ones leave has two seconds to be delivered
    trace = max(trained, key=len)
    spans = {(service, span.name): span for service, span in trace}
    root = spans["environment-sums", "rollout sums"]
    assert root.parent_span_id == b""
    rollout, ledger = "rl.rollout.killed.sums", "rl.ledger.killed.main"
    attributes = values(root)
    assert attributes.keys() >= {
        *("rl.group.id", "rl.group.size", "rl.env.name", "rl.policy.version", "rl.outcome", "rl.e2e_s"),
        *("rl.train.step", "rl.staleness", "rl.sampling.reason"),
    }
    assert (attributes["rl.outcome"], attributes["rl.sampling.reason"]) == ("trained", "ratio")
    kinds = {name.partition(" ")[0]: span.kind for (_, name), span in spans.items()}
    assert kinds == {  # of OTLP: 1 is internal, 3 client, 5 consumer
        "rollout": 1, "generate": 1, "chat": 3, "publish": 3, "queue.wait": 1, "process": 5, "score": 1,
        "prompt_logprobs": 3, "train.consume": 5,
    }  # fmt: skip
    under_root = {
        ("environment-sums", "generate sums"),
        ("scorer", f"queue.wait {rollout}"),
        ("scorer", f"process {rollout}"),
        ("teacher", f"queue.wait {rollout}"),
        ("teacher", f"process {rollout}"),
        ("normalizer", "queue.wait rl.score.killed.live.sums"),
        ("normalizer", "process rl.score.killed.live.sums"),
        ("batcher", "queue.wait rl.reward.killed.live.sums"),
        ("batcher", "process rl.reward.killed.live.sums"),
        ("trainer", f"queue.wait {ledger}"),
        ("trainer", "train.consume"),
    }
    assert {key for key, span in spans.items() if span.parent_span_id == root.span_id} == under_root
    assert all(
        root.start_time_unix_nano - CLOCKS_NS <= span.start_time_unix_nano <= span.end_time_unix_nano
        for span in spans.values()
    )
    parents = {key: spans[key].span_id for key in under_root}
    generated = parents["environment-sums", "generate sums"]
    assert any(span.parent_span_id == generated and name.startswith("chat ") for (_, name), span in spans.items())
    scored = parents["scorer", f"process {rollout}"]
    assert spans["scorer", "score repetition"].parent_span_id == scored
    assert spans["scorer", "publish rl.score.killed.live.sums"].parent_span_id == scored
    taught = parents["teacher", f"process {rollout}"]
    assert any(
        span.parent_span_id == taught and name.startswith("prompt_logprobs") for (_, name), span in spans.items()
    )

    check_attributes(spans, root.trace_id.hex(), received.resources)

    link = spans["trainer", "train.consume"].links[0]
    batch = {span.name: span for _, span in whole[link.trace_id.hex()]}
    assert link.span_id == batch["train.step"].span_id
    assert batch["train.step"].parent_span_id == batch["assemble batch"].span_id
    assert root.trace_id in {back.trace_id for back in batch["assemble batch"].links}
    assert values(batch["assemble batch"]).keys() >= {"rl.group.ids", "rl.batch.id", "rl.run"}
    for name in ("forward_backward", "optimizer.step", "publish_weights"):
        assert batch[name].parent_span_id == batch["train.step"].span_id
        assert values(batch[name])["rl.train.step"] == values(batch["train.step"])["rl.train.step"]

    wait = received.metrics["scorer", "lachesis.stage.wait"].exponential_histogram.data_points[0]
    assert wait.count > 0
    assert wait.exemplars


def test_at_ratio_0_a_slow_rollout_is_kept_whole_and_others_are_not(tmp_path: Path) -> None:
    with receiving("http/protobuf") as received:
        run_traced(
            tmp_path / "a run", received, 0.0, **{"telemetry.slow_s": 3600.0, "telemetry.protocol": "http/protobuf"}
        )
    assert not [span for _, span in received.spans if span.name.startswith("rollout ")]
    with receiving("http/protobuf") as received:
        run_traced(
            tmp_path / "slow run", received, 0.0, **{"telemetry.slow_s": 0.001, "telemetry.protocol": "http/protobuf"}
        )
    kept = [trace for trace in traces(received).values() if any(span.name == "train.consume" for _, span in trace)]
    assert len(kept) >= (STEPS - 2) * 4  # as above
    for trace in kept:
        names = {span.name for _, span in trace}
        assert {"rollout sums", "generate sums", "process rl.rollout.killed.sums"} <= names
        assert {"process rl.score.killed.live.sums", "process rl.reward.killed.live.sums"} <= names
