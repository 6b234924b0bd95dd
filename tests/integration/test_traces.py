"""One rollout, one trace: through every service, each a process, to a real OTLP receiver."""

from pathlib import Path
from typing import Any

import pytest
from integration.harness import Run
from integration.servers import Supervised
from otlp import Received, receiving

STEPS = 6

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def run_traced(folder: Path, received: Received, ratio: float, **settings: object) -> None:
    folder.mkdir()
    sets = {"telemetry.endpoint": received.url, "telemetry.ratio": ratio, **settings}
    run = Run(folder, STEPS, Supervised(folder), sets=sets, environ={"OTEL_METRIC_EXPORT_INTERVAL": "500"})
    with run:
        run.start()
        assert run.process is not None
        assert run.process.wait(200) == 0, run.tail()


def traces(received: Received) -> dict[str, list[tuple[str, Any]]]:
    found: dict[str, list[tuple[str, Any]]] = {}
    for service, span in received.spans:
        found.setdefault(span.trace_id.hex(), []).append((service, span))
    return found


def test_a_sampled_rollout_is_one_trace_over_all_processes(tmp_path: Path) -> None:
    with receiving("grpc") as received:
        run_traced(tmp_path / "a run", received, 1.0)
    whole = traces(received)
    trained = [
        trace
        for trace in whole.values()
        if any(span.name == "train.consume" for _, span in trace) and len({span.name for _, span in trace}) > 10
    ]
    assert len(trained) >= STEPS * 4 - 4
    trace = max(trained, key=len)
    spans = {(service, span.name): span for service, span in trace}
    root = spans["environment-sums", "rollout sums"]
    assert root.parent_span_id == b""
    rollout = "rl.rollout.killed.sums"
    attributes = {one.key: one.value for one in root.attributes}
    assert attributes.keys() >= {
        *("rl.group.id", "rl.group.size", "rl.env.name", "rl.policy.version", "rl.outcome", "rl.e2e_s"),
        *("rl.train.step", "rl.staleness", "rl.sampling.reason"),
    }
    assert attributes["rl.outcome"].string_value == "trained"
    assert attributes["rl.sampling.reason"].string_value == "ratio"
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
        ("trainer", "queue.wait rl.ledger"),
        ("trainer", "train.consume"),
    }
    assert {key for key, span in spans.items() if span.parent_span_id == root.span_id} == under_root
    assert all(
        root.start_time_unix_nano - 1_000_000 <= span.start_time_unix_nano <= span.end_time_unix_nano
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

    link = spans["trainer", "train.consume"].links[0]
    batch = {span.name: span for _, span in whole[link.trace_id.hex()]}
    assert link.span_id == batch["train.step"].span_id
    assert batch["train.step"].parent_span_id == batch["assemble batch"].span_id
    assert root.trace_id in {back.trace_id for back in batch["assemble batch"].links}
    for name in ("forward_backward", "optimizer.step", "publish_weights"):
        assert batch[name].parent_span_id == batch["train.step"].span_id

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
    assert len(kept) >= STEPS * 4
    for trace in kept:
        names = {span.name for _, span in trace}
        assert {"rollout sums", "generate sums", "process rl.rollout.killed.sums"} <= names
        assert {"process rl.score.killed.live.sums", "process rl.reward.killed.live.sums"} <= names
