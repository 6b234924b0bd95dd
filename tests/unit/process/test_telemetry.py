"""Where a process's telemetry says it comes from."""

import pytest
from otlp import receiving

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.telemetry.config import TelemetryConfig
from lachesis.pipeline.telemetry.spans import generate_span
from lachesis.schemas import subjects
from lachesis.schemas.ids import new_group_id
from lachesis.services.process.telemetry import open_tracing


@pytest.mark.parametrize(
    ("role", "service", "env"),
    [("scorer", "lachesis-scorer", None), ("inference-policy", "lachesis-inference-policy", None),
     ("environment-words", "lachesis-environment", "words")],
)  # fmt: skip
def test_a_process_has_the_name_it_has_in_the_micro_protocol_and_says_which_environment_it_is(
    role: str, service: str, env: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert subjects.service_name(role) == service
    with receiving("grpc") as received:
        config = RunConfig(run="r", telemetry=TelemetryConfig(endpoint=received.url, close_s=60.0))
        with open_tracing(config, role, 2) as tracing:
            tracing.emit([generate_span(new_group_id(), env or "words", (1, 2))])
    about = received.resources["lachesis-environment"]
    of_its_own = about.get("service.instance.id") == "r.environment-words.2"
    assert of_its_own is (env is not None)  # the others have rebuilt it
    assert about.get("rl.env.name") == env


def test_every_environment_answers_the_micro_protocol_under_one_name() -> None:
    assert len({subjects.service_name(f"environment-{env}") for env in ("words", "sums", "a-b")}) == 1
    for verb in ("PING", "INFO", "STATS"):
        assert f"$SRV.{verb}.lachesis-environment" in subjects.micro("r", "environment-words")
    assert subjects.health("r", "environment-words") in subjects.micro("r", "environment-words")
