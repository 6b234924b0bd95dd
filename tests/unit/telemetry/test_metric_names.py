"""Names of exported metrics: bounded, whatever a run's environments, raters and streams are called."""

import re

import pytest

from lachesis.pipeline.telemetry.metric_names import MetricName, metric_name

HEARTBEAT = (
    "advantages/mean",
    "api_perf/error_rate",
    "api_perf/http/latency_p99_ms",
    "api_perf/inference/mean_payload_bytes",
    "batching/outcomes/batched",
    "batching/outcomes/zero_variance",
    "batching/oversampling",
    "batching/tokens_per_sequence/stale",
    "bus/unanswered_requests",
    "curriculum/ENV/ability/SKILL",
    "curriculum/ENV/drawn_success",
    "curriculum/ENV/without_task",
    "environment/ENV/lost_samples",
    "eval/ENV/avg@4",
    "eval/ENV/pass@4",
    "eval/ENV/error",
    "eval/ENV/low",
    "eval/ENV/high",
    "eval/ENV/greedy",
    "eval/ENV/step",
    "flow/fill/STREAM",
    "flow/lost_bytes/STREAM",
    "flow/held_from/STREAM",
    "flow/trimmed_below/STREAM",
    "flow/trimmed_bytes/STREAM",
    "flow/outstanding",
    "flow/disk_bytes",
    "health/ENV/alerts",
    "health/ENV/halted",
    "health/ENV/quarantined",
    "health/ENV/truncated",
    "latency/e2e/p50",
    "latency/e2e/rolling_p99",
    "latency/scorer/proc/p95",
    "latency/scorer/wait/rolling_p95",
    "ledger/problems",
    "policy/step",
    "reliability/ENV/RATER",
    "reward/mean",
    "reward/ENV/mean",
    "reward/ENV/rater/RATER",
    "reward/ENV/rater/RATER/flipped",
    "reward/ENV/length_bias/RATER",
    "reward/ENV/raters_away",
    "reward/ENV/control_ratings",
    "reward/ENV/fixed_ratings",
    "reward_norm/ENV/open_windows",
    "reward_norm/ENV/score/mean",
    "reward_shaping/ENV/mean",
    "reward_shaping/ENV/scale",
    "staleness/max",
    "staleness/mean",
    "teacher/kl",
    "teacher/kl_topk",
    "throughput/scorer/items_per_s",
    "throughput/tokens_per_s",
    "train/kl",
    "train/padding",
    "train/shared",
    "train/seconds",
    "train/step",
    "train/step_kl",
    "train/time",
)
"""One of each kind that the services of a run send."""


def of(env: str, rater: str, stream: str) -> list[MetricName]:
    words = {"ENV": env, "RATER": rater, "STREAM": stream, "SKILL": f"{env}/hard"}
    return [metric_name(re.sub("ENV|RATER|STREAM|SKILL", lambda m: words[m[0]], figure)) for figure in HEARTBEAT]


def test_names_do_not_depend_on_what_a_run_calls_its_things() -> None:
    one, other = of("shop", "format", "EVENTS"), of("a-b_2", "my.judge/2", "ROLLOUTS")
    assert [(found.name, found.unit) for found in one] == [(found.name, found.unit) for found in other]
    for found in one:
        assert not set(re.split(r"[./]", found.name)) & {"shop", "format", "EVENTS", "hard"}
        assert re.fullmatch(r"lachesis(\.[a-z0-9_]+)+", found.name)


def test_no_two_figures_of_one_service_fall_together() -> None:
    found = [(name, tuple(sorted(attributes.items()))) for name, attributes, _ in of("shop", "format", "EVENTS")]
    assert len(set(found)) == len(HEARTBEAT)


@pytest.mark.parametrize(
    ("figure", "expected"),
    [
        ("health/shop/truncated", ("lachesis.health.truncated", {"rl.env.name": "shop"}, "")),
        (
            "reward/shop/rater/format",
            ("lachesis.reward.rater", {"rl.env.name": "shop", "rl.rater.name": "format"}, ""),
        ),
        (
            "reliability/shop/format",
            ("lachesis.reliability.share", {"rl.env.name": "shop", "rl.rater.name": "format"}, "1"),
        ),
        ("reward_shaping/shop/scale", ("lachesis.reward_shaping.scale", {"rl.env.name": "shop"}, "")),
        ("eval/shop/avg@4", ("lachesis.eval.avg", {"rl.env.name": "shop", "rl.eval.samples": "4"}, "1")),
        (
            "latency/scorer/wait/rolling_p99",
            (
                "lachesis.latency.wait",
                {"rl.quantile": "p99", "rl.window": "rolling", "rl.stage.name": "scorer"},
                "s",
            ),
        ),
        ("latency/e2e/p50", ("lachesis.latency.end_to_end", {"rl.quantile": "p50", "rl.window": "batch"}, "s")),
        ("flow/fill/EVENTS", ("lachesis.flow.fill", {"rl.stream.name": "EVENTS"}, "1")),
        ("flow/disk_bytes", ("lachesis.flow.disk_bytes", {}, "By")),
        ("api_perf/http/latency_p99_ms", ("lachesis.api_perf.http.latency_p99_ms", {}, "ms")),
        ("mine/own/figure/of/a/plug-in", ("lachesis.mine.own.figure.of.a.plug-in", {}, "")),
    ],
)
def test_by_hand(figure: str, expected: tuple[str, dict[str, str], str]) -> None:
    assert metric_name(figure) == expected
