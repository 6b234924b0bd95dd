"""Maps figures of heartbeats to names, attributes and units of OpenTelemetry metrics. Pure.

A heartbeat says `health/shop/truncated` or `reward/shop/rater/format`. Exported so, every environment, rater and stream
would make metrics of its own, which dashboards could not sum and a metrics store has to keep for ever. So what names a
thing becomes an attribute: `lachesis.health.truncated{rl.env.name="shop"}`, and names come from a bounded set.

Units are UCUM's. A share has unit 1, which Prometheus shows as `_ratio`.
"""

import re
from typing import NamedTuple

__all__ = ["MetricName", "metric_name"]


class MetricName(NamedTuple):
    """How one figure is exported."""

    name: str
    attributes: dict[str, str]
    unit: str


_ENV, _RATER, _STREAM, _STAGE = "rl.env.name", "rl.rater.name", "rl.stream.name", "rl.stage.name"
_SKILL, _COMPONENT, _OUTCOME = "rl.skill.name", "rl.reward.component", "rl.outcome"
_QUANTILE, _WINDOW, _SAMPLES = "rl.quantile", "rl.window", "rl.eval.samples"

_RULES: tuple[tuple[re.Pattern[str], str, tuple[str, ...]], ...] = tuple(
    (re.compile(pattern), name, attributes)
    for pattern, name, attributes in (
        # groups a, b and c are the attributes in order; kind and rest stand in the name
        (r"curriculum/(?P<a>[^/]+)/ability/(?P<b>.+)", "curriculum.ability", (_ENV, _SKILL)),
        (r"reward/(?P<a>[^/]+)/rater/(?P<b>.+)", "reward.rater", (_ENV, _RATER)),
        (r"reward/(?P<a>[^/]+)/length_bias/(?P<b>.+)", "reward.length_bias", (_ENV, _RATER)),
        (r"reliability/(?P<a>[^/]+)/(?P<b>.+)", "reliability.share", (_ENV, _RATER)),
        (r"reward_norm/(?P<a>[^/]+)/(?P<b>[^/]+)/(?P<rest>[^/]+)", "reward_norm.{rest}", (_ENV, _COMPONENT)),
        (r"eval/(?P<a>[^/]+)/(?P<rest>avg|pass)@(?P<b>[0-9]+)", "eval.{rest}", (_ENV, _SAMPLES)),
        (r"(?P<kind>curriculum|environment|health|reward|reward_norm|reward_shaping|eval)/(?P<a>[^/]+)/(?P<rest>[^/]+)",
         "{kind}.{rest}", (_ENV,)),
        (r"flow/(?P<rest>fill|held_from|lost_bytes|trimmed_[a-z]+)/(?P<a>[^/]+)", "flow.{rest}", (_STREAM,)),
        (r"batching/outcomes/(?P<a>[^/]+)", "batching.outcomes", (_OUTCOME,)),
        (r"batching/tokens_per_sequence/(?P<a>[^/]+)", "batching.tokens_per_sequence", (_OUTCOME,)),
        (r"latency/e2e/(?P<b>rolling_)?(?P<a>p[0-9]+)", "latency.end_to_end", (_QUANTILE, _WINDOW)),
        (r"latency/(?P<c>[^/]+)/(?P<kind>proc|wait)/(?P<b>rolling_)?(?P<a>p[0-9]+)", "latency.{kind}",
         (_QUANTILE, _WINDOW, _STAGE)),
        (r"throughput/(?P<a>[^/]+)/(?P<rest>[^/]+)", "throughput.{rest}", (_STAGE,)),
    )
)  # fmt: skip
_UNITS = (
    (
        re.compile(
            r"(_share|_fraction|error_rate|_ratio)$|^flow/fill/|^reliability/|^eval/.*/(avg@[0-9]+|pass@[0-9]+|greedy|error|low|high)$"
        ),
        "1",
    ),
    (re.compile(r"_ms$"), "ms"),
    (re.compile(r"^latency/|(^|[/_])seconds$"), "s"),
    (re.compile(r"^train/time$"), "s"),
    (re.compile(r"(^|[/_])bytes(/|$)"), "By"),
    (re.compile(r"(requests|items|groups|sequences|tokens)_per_s(ec)?$"), "{item}/s"),
)


def metric_name(figure: str) -> MetricName:
    """Return how the figure of a heartbeat is exported.

    What no rule knows keeps its name, dots for slashes.
    """
    unit = next((unit for pattern, unit in _UNITS if pattern.search(figure)), "")
    for pattern, name, attributes in _RULES:
        if (match := pattern.fullmatch(figure)) is not None:
            parts = match.groupdict()
            values = {
                attribute: _window(parts[key]) if attribute == _WINDOW else str(parts[key])
                for attribute, key in zip(attributes, "abc", strict=False)
            }
            return MetricName(f"lachesis.{name.format(**parts)}", values, unit)
    return MetricName(f"lachesis.{figure.replace('/', '.')}", {}, unit)


def _window(rolling: str | None) -> str:
    """Return what a quantile is over: one batch, or the last ones."""
    return "rolling" if rolling else "batch"
