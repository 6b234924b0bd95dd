"""What a run tells wandb, TensorBoard and MLflow, read back with their own tools: every name, every value."""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.harness import RUN, Run
from integration.servers import Supervised
from mlflow.tracking import MlflowClient
from otlp import receiving
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.ledger import LedgerEntry
from lachesis.services.run.connect import open_history

STEPS = 20
STAGES = ("scorer", "normalizer", "batcher", "trainer")
NAMES = {
    *("train/loss", "train/learning_rate", "reward/mean", "advantages/mean", "advantages/std"),
    *("logprobs/mean", "logprobs/mean_training", "logprobs/diff", "staleness/mean", "staleness/max"),
    *(f"reward_norm/sums/score/{name}" for name in ("count", "mean", "std", "min", "max")),
    *(f"api_perf/latency_{name}_ms" for name in ("p50", "p95", "p99", "mean", "min", "max")),
    *(f"api_perf/{name}" for name in ("total_items", "total_requests", "failed_requests", "error_rate")),
    *("api_perf/items_per_sec", "api_perf/requests_per_sec"),
    *(f"latency/{stage}/{part}/{q}" for stage in STAGES for part in ("wait", "proc") for q in ("p50", "p95", "p99")),
    *(f"latency/e2e/{q}" for q in ("p50", "p95", "p99", "rolling_p50", "rolling_p95", "rolling_p99")),
    *(f"throughput/{stage}/items_per_s" for stage in STAGES),
    *("throughput/groups_per_s", "throughput/tokens_per_s"),
    *(f"queue/scorer/{name}" for name in ("lag", "redelivered")),
    *("trace/kept_ratio", "trace/dropped_spans", "curriculum/sums/observed"),
    *("reward/sums/reliability_alpha", "reward/sums/mean_disagreement", "reward/sums/mean"),
}
"""What is to be logged, at some step or other: what the services tell comes with their heartbeats."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def inspected(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the one offline run in `folder`, as `wandb leet inspect` reads them."""
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    lines = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout.splitlines()
    return [json.loads(line) for line in lines]


async def ledger(run: Run) -> list[LedgerEntry]:
    """Return the entries of the ledger whose batches were trained."""
    async with (
        open_history(run.load_config(), "test") as bus,
        bus.read(subjects.LEDGER, [subjects.ledger(RUN, "main")], follow=False) as messages,
    ):
        entries = [decode(LedgerEntry, message.data) async for message in messages]
    return [entry for entry in entries if entry.batch is not None and entry.batch.number < STEPS]


def check_trackers(folder: Path, store: Path, step: int, figures: dict[str, float]) -> None:
    """Compare the figures of a step with what TensorBoard and MLflow have of it."""
    loss = pytest.approx(figures["train/loss"], rel=1e-6)
    assert scalars(folder)[step] == [loss], "TensorBoard"
    assert metrics_of(store)[step] == [loss], "MLflow"


@cache
def scalars(folder: Path) -> dict[int, list[float]]:
    events = EventAccumulator(str(folder / "tensorboard" / RUN))
    events.Reload()
    assert any(tag.startswith("samples/") for tag in events.Tags()["tensors"])
    return by_step((event.step, event.value) for event in events.Scalars("train/loss"))


@cache
def metrics_of(store: Path) -> dict[int, list[float]]:
    client = MlflowClient(tracking_uri=f"file://{store}/mlruns")
    (run,) = client.search_runs([client.get_experiment_by_name("lachesis").experiment_id])
    assert run.info.status == "FINISHED"
    return by_step((metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "train/loss"))


def by_step(points: Iterable[tuple[int, float]]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = defaultdict(list)
    for step, value in points:
        found[step].append(value)
    return found


async def test_every_tracker_holds_every_name_with_the_right_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    folder = tmp_path / "a run"
    folder.mkdir()
    with receiving("grpc") as received:
        sets = {
            "training.wandb.project": "tests",
            "training.tensorboard": "true",
            "training.mlflow.uri": f"file://{tmp_path}/mlruns",
            "health.webhook_from": "inform",
            "health.window": 16,
            "telemetry.endpoint": received.url,
            "telemetry.ratio": 0.5,
            "normalization.window": 8,
        }
        run = Run(
            folder,
            STEPS,
            Supervised(folder),
            sets=sets,
            environ={"WANDB_MODE": "offline"},
        )
        with run:
            run.start()
            assert run.process is not None
            assert run.process.wait(500) == 0, run.tail()
    records = inspected(folder)
    rows = [record["history"]["item"] for record in records if "history" in record]
    history = {row["train/step"]: row for row in rows if "train/loss" in row}
    assert sorted(history) == list(range(1, STEPS + 1))
    assert set().union(*history.values()) >= NAMES

    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    for figures in logged:
        row = history[figures["train/step"]]
        assert {name: row[name] for name in figures} == pytest.approx(figures)
        assert row["_step"] == figures["train/step"]

        check_trackers(folder, tmp_path, int(figures["train/step"]), figures)

    metrics = [record["metric"] for record in records if "metric" in record]
    assert [metric["step_metric"] for metric in metrics if metric.get("glob_name") == "*"] == ["train/step"]
    (started,) = (record["run"] for record in records if record.get("type") == "run")
    assert (started["project"], started["run_id"]) == ("tests", RUN)
    alerts = [record["alert"] for record in records if "alert" in record]
    assert {alert["title"].split(":")[0] for alert in alerts} == {"sums"}, "no alert of the health checks"
    assert int(alerts[0]["wait_duration"]) < 1000, "wandb would drop the next alert of the same title"

    for entry in await ledger(run):
        assert entry.batch is not None
        row = history[entry.batch.number + 1]
        refs = entry.batch.groups
        assert row["reward/mean"] == pytest.approx(np.mean([ref.score for ref in refs]))
        staleness = [entry.batch.number - ref.last_step for ref in refs]  # as batching.staleness_of counts by default
        assert (row["staleness/mean"], row["staleness/max"]) == pytest.approx((np.mean(staleness), max(staleness)))
        assert row["train/tokens"] <= entry.batch.tokens
        assert row["train/sequences"] == sum(advantage is not None for ref in refs for advantage in ref.advantages)
        stamps = [stamp for stamps in entry.stamps.values() for stamp in stamps if stamp.stage == "scorer"]
        waits = [(stamp.start_ns - stamp.stored_ns) / 1e9 for stamp in stamps]
        for name, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
            assert row[f"latency/scorer/wait/{name}"] == pytest.approx(np.quantile(waits, q))
    last = history[STEPS]
    assert last["api_perf/total_requests"] == STEPS
    assert last["logprobs/mean_training"] == pytest.approx(last["logprobs/mean"] - last["logprobs/diff"])
    assert 0 < last["trace/kept_ratio"] <= 1
