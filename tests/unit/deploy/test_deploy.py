"""The files of deploy/: each by its own schema or parser, and what they say of each other."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from lachesis.pipeline.config.load import load
from lachesis.pipeline.config.run import RunConfig
from lachesis.schemas import subjects
from lachesis.services.registry import SERVICES

DEPLOY = Path(__file__).parents[3] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
JAEGER = yaml.safe_load((DEPLOY / "jaeger/config.yaml").read_text())
PROMETHEUS = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
KUBERNETES = list(yaml.safe_load_all((DEPLOY / "kubernetes/lachesis.yaml").read_text()))
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/lachesis.json").read_text())


def test_the_compose_file_fits_the_specification() -> None:
    command = ["check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(DEPLOY / "compose/compose.yaml")]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dockerfile_passes_its_linter() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "document", KUBERNETES, ids=lambda document: f"{document['kind']}-{document['metadata']['name']}"
)
def test_kubernetes_takes_the_manifest(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, "1.33", strict=True)


def commands() -> list[list[str]]:
    composed = [service["command"] for service in COMPOSE["services"].values() if service.get("image") == "lachesis"]
    pods = [
        document["spec"]["template"]["spec"] for document in KUBERNETES if document["kind"] in {"Deployment", "Job"}
    ]
    return [*composed, *(container["args"] for pod in pods for container in pod["containers"])]


def test_every_command_is_one_of_the_command_line() -> None:
    ran = {command[1] for command in commands() if command[0] == "run"}
    needed = {
        "governor",
        "batcher",
        "normalizer",
        "curriculum",
        "health",
        "scorer",
        "trainer",
        "inference",
        "environment",
    }
    assert needed <= ran <= set(SERVICES)
    assert {command[0] for command in commands()} == {"run", "init"}


def run_configs() -> list[str]:
    (config,) = (document for document in KUBERNETES if document["kind"] == "ConfigMap")
    return [(DEPLOY / "compose/run.toml").read_text(), config["data"]["run.toml"]]


@pytest.mark.parametrize("text", run_configs(), ids=["compose", "kubernetes"])
def test_the_run_configurations_load_and_name_what_runs(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    config = load(RunConfig, file=file, environ={}, sets=[]).config
    assert set(config.environments) == {"words"}
    assert config.streams.replicas == 3
    assert tomllib.loads(text)["inference"]["policy"]["advertise"] == "http://inference:8000"


def test_the_nodes_are_those_that_services_look_for() -> None:
    config = tomllib.loads((DEPLOY / "compose/run.toml").read_text())
    nodes = {
        service["environment"]["NATS_NODE"]
        for name, service in COMPOSE["services"].items()
        if name.startswith("nats-") and name != "nats-exporter"
    }
    assert {f"nats://{node}:4222" for node in nodes} == set(config["nats"]["url"].split(","))


def test_what_jaegers_pipelines_name_is_configured() -> None:
    kinds = {
        "receivers": {"receivers", "connectors"},
        "processors": {"processors"},
        "exporters": {"exporters", "connectors"},
    }
    for pipeline in JAEGER["service"]["pipelines"].values():
        for part, names in pipeline.items():
            known = {name for section in kinds[part] for name in JAEGER.get(section, {})}
            assert set(names) <= known
    assert set(JAEGER["service"]["extensions"]) == set(JAEGER["extensions"])
    storage = JAEGER["extensions"]["jaeger_storage"]
    query = JAEGER["extensions"]["jaeger_query"]["storage"]
    assert query["traces"] in storage["backends"]
    assert query["metrics"] in storage["metric_backends"]
    assert JAEGER["exporters"]["jaeger_storage_exporter"]["trace_storage"] in storage["backends"]
    assert JAEGER["connectors"]["spanmetrics"]["histogram"]["explicit"]["buckets"][-1] == "1800s"


def test_prometheus_scrapes_what_runs() -> None:
    targets = [
        target for job in PROMETHEUS["scrape_configs"] for part in job["static_configs"] for target in part["targets"]
    ]
    assert {target.split(":")[0] for target in targets} <= set(COMPOSE["services"])
    assert f":{JAEGER['exporters']['prometheus']['endpoint'].rpartition(':')[2]}" in next(
        t for t in targets if "jaeger" in t
    )


def test_the_dashboard_asks_for_metrics_that_the_services_export() -> None:
    exported = {"lag", "handled_total", "wait_seconds", "process_seconds", "redelivered_total", "dead_total"}
    asked = {
        name
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
        for name in re.findall(r"lachesis_stage_(\w+)", target["expr"])
    }
    assert asked == exported
    titles = {panel["title"] for panel in DASHBOARD["panels"]}
    assert {"Lag", "Rate", "Wait, p99", "Redeliveries", "Dead letters"} <= titles


def test_the_dashboard_knows_the_services_by_their_names_and_the_attributes_by_what_prometheus_keeps() -> None:
    asked = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    named = {name for text in asked for name in re.findall(r'service_name="([^"]+)"', text)}
    assert named
    assert named <= {subjects.service_name(service) for service in SERVICES}
    labels = {name for text in asked for name in re.findall(r"\b(rl_\w+|service_name)\b", text)}
    assert labels <= {name.replace(".", "_") for name in PROMETHEUS["otlp"]["promote_resource_attributes"]}
    assert labels == {"rl_run", "rl_env_name", "service_name"}
