"""The trainer's log takes other services' figures from their heartbeats, and those alone that belong there."""

import pytest

from lachesis.pipeline.trainer.peer_metrics import PeerMetrics
from lachesis.schemas import subjects
from lachesis.schemas.control import Heartbeat, StageVitals

pytestmark = pytest.mark.hostile


def beat(service, instance="1-a", *, at_s=0.0, metrics=None, **vitals):
    time_ns = int(at_s * 1e9) + 10**9
    stage = StageVitals(**vitals)
    return Heartbeat(
        host="h", schema_version=1,
        run="r", service=service, instance=instance, pid=1, time_ns=time_ns, stage=stage, metrics=metrics or {}
    )  # fmt: skip


def hear(peer_metrics, one):
    peer_metrics.record_heartbeat(one, one.time_ns / 1e9)


async def test_the_newest_figures_are_taken(lab):
    peer_metrics = PeerMetrics()
    async with lab.running(peer_metrics.listen, "trainer") as trainer:

        async def health(service):
            service.vitals.metrics = {"health/sums/truncated": 0.25, "service_load": 1.0}

            async def heard():
                await lab.bus.broadcast(subjects.heartbeat("r", "health", "bad"), b"\xc1")
                await trainer.heartbeat()
                await service.heartbeat()
                return bool(peer_metrics.figures())

            await lab.until(heard)

        async with lab.running(health, "health"):
            pass
        trainer.kill()
    assert peer_metrics.figures() == {"health/sums/truncated": 0.25}


def test_evaluations_are_logged_beside_the_step():
    peer_metrics = PeerMetrics()
    figures = {"eval/sums/avg@4": 0.4, "eval/sums/error": 0.03, "eval/sums/step": 10.0}
    hear(peer_metrics, beat("evaluator", metrics=figures))
    assert peer_metrics.figures() == figures


def test_queues_are_told_by_service_replicas_together():
    peer_metrics = PeerMetrics()
    hear(peer_metrics, beat("scorer", "1-a", lag=3, redelivered=1, metrics={"reward/sums/reliability_alpha": 0.5}))
    hear(peer_metrics, beat("scorer", "2-b", lag=5, redelivered=2))
    hear(peer_metrics, beat("normalizer", metrics={"reward_norm/sums/a/mean": 1.5, "api_perf/total_items": 2.0}))
    hear(peer_metrics, beat("curriculum", metrics={"curriculum/sums/observed": 4.0}))
    assert peer_metrics.figures() == {
        "queue/scorer/lag": 5.0, "queue/scorer/redelivered": 3.0, "reward/sums/reliability_alpha": 0.5,
        "reward_norm/sums/a/mean": 1.5, "curriculum/sums/observed": 4.0,
    }  # fmt: skip
    hear(peer_metrics, beat("scorer", "1-a", at_s=6.0, lag=1, redelivered=1))
    assert peer_metrics.figures()["queue/scorer/lag"] == 1.0, "the other one is gone"


def test_a_service_that_is_silent_is_gone_whoever_else_speaks():
    peer_metrics = PeerMetrics()
    hear(peer_metrics, beat("scorer", lag=700))
    hear(
        peer_metrics,
        beat("normalizer", at_s=6.0, metrics={"reward_shaping/sums/scale": 0.5, "reliability/sums/a": 0.4}),
    )
    assert peer_metrics.figures() == {"reward_shaping/sums/scale": 0.5, "reliability/sums/a": 0.4}


def test_lengths_of_what_is_trained_and_dropped_are_taken_along():
    peer_metrics = PeerMetrics()
    lengths = {"batching/tokens_per_sequence/stale": 90.0, "batching/tokens_per_sequence/batched": 40.0}
    hear(peer_metrics, beat("batcher", metrics=lengths | {"batching/batches": 3.0}))
    assert peer_metrics.figures() == lengths


def test_nobody_says_figures_in_the_place_of_another_service():
    peer_metrics = PeerMetrics()
    hear(peer_metrics, beat("evaluator", metrics={"eval/sums/avg@4": 0.25}))
    forged = {"eval/sums/avg@4": 1.0, "health/sums/halted": 0.0, "reward/sums/success": 1.0}
    hear(peer_metrics, beat("environment-sums", metrics=forged))
    hear(peer_metrics, beat("shadow-again", metrics=forged))
    assert {name: value for name, value in peer_metrics.figures().items() if not name.startswith("queue/")} == {
        "eval/sums/avg@4": 0.25
    }


def test_names_of_figures_are_bounded_in_number_and_length():
    peer_metrics = PeerMetrics()
    metrics = {"curriculum/sums/ability/" + "x" * 1000: 1.0, **{f"curriculum/sums/{n}": 1.0 for n in range(5000)}}
    hear(peer_metrics, beat("curriculum", metrics=metrics))
    assert len(peer_metrics.figures()) == 2000
    assert max(map(len, peer_metrics.figures())) < 200


def test_processes_that_share_a_name_are_logged_once(caplog):
    peer_metrics = PeerMetrics()
    for at_s in range(3):
        for instance in ("1-a", "2-b"):
            one = beat("scorer", instance, at_s=at_s + (instance == "2-b") / 2)
            hear(peer_metrics, one.replace(replica="gpu-1", host="gpu-1"))
    assert ["call themselves replica gpu-1" in text for text in caplog.messages] == [True]
