"""The files of deploy/: each by its own schema or parser, and what they say of each other."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from opentelemetry.sdk.metrics.export import Sum
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from unit.telemetry.test_metric_names import HEARTBEAT

from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.telemetry.figures import ServiceFigures
from lachesis.pipeline.telemetry.histogram import Histogram
from lachesis.pipeline.telemetry.metrics import metrics_data
from lachesis.schemas import subjects
from lachesis.schemas.control import StageVitals
from lachesis.services.cli.auth import run_auth_init
from lachesis.services.cli.options import Options
from lachesis.services.registry import services

pytestmark = pytest.mark.outside

DEPLOY = Path(__file__).parents[3] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
JAEGER = yaml.safe_load((DEPLOY / "jaeger/config.yaml").read_text())
PROMETHEUS = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
ALERTS = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
KUBERNETES = [
    document
    for name in ("lachesis", "gateway")
    for document in yaml.safe_load_all((DEPLOY / f"kubernetes/{name}.yaml").read_text())
]
AUTOSCALING = yaml.safe_load((DEPLOY / "kubernetes/autoscaling.yaml").read_text())
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


def pods() -> dict[str, dict[str, Any]]:
    found = [document for document in KUBERNETES if document["kind"] in {"Deployment", "Job"}]
    return {document["metadata"]["name"]: document["spec"]["template"]["spec"] for document in found}


def test_every_pod_can_read_its_keys_and_every_service_is_probed() -> None:
    for name, pod in pods().items():
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"] == 10001, name
        (container,) = pod["containers"]
        assert ("livenessProbe" in container) == (name != "init")
        assert "nvidia.com/gpu" not in container.get("resources", {}).get("limits", {})  # the image's torch is for CPUs
    assert {name for name, pod in pods().items() if "readinessProbe" in pod["containers"][0]} == {
        "inference",
        "gateway",
    }


def test_the_probe_looks_at_the_file_that_services_touch() -> None:
    (run,) = [document for document in KUBERNETES if document["kind"] == "ConfigMap"]
    alive = tomllib.loads(run["data"]["run.toml"])["services"]["alive_file"]
    for name, pod in pods().items():
        if name != "init":
            assert alive in pod["containers"][0]["livenessProbe"]["exec"]["command"][-1]


def test_the_probe_tells_a_fresh_file_from_an_old_one(tmp_path: Path) -> None:
    command = pods()["scorer"]["containers"][0]["livenessProbe"]["exec"]["command"]
    alive = tmp_path / "alive"
    ours = [re.sub(r"find \S+", f"find '{alive}'", part) for part in command]
    assert subprocess.run(ours, check=False, capture_output=True).returncode != 0
    alive.touch()
    assert subprocess.run(ours, check=False).returncode == 0
    os.utime(alive, (0, 0))
    assert subprocess.run(ours, check=False).returncode != 0


def test_autoscaling_names_what_is_there() -> None:
    (trigger,) = AUTOSCALING["spec"]["triggers"]
    assert AUTOSCALING["spec"]["scaleTargetRef"]["name"] in pods()
    assert trigger["metadata"]["stream"] == subjects.stream_name("kubernetes", subjects.ROLLOUTS)
    assert trigger["metadata"]["consumer"] == subjects.durable("scorer", "kubernetes", subjects.LIVE)


def test_autoscaling_asks_for_the_account_that_auth_init_makes(tmp_path: Path) -> None:
    (run,) = [document for document in KUBERNETES if document["kind"] == "ConfigMap"]
    (tmp_path / "run.toml").write_text(run["data"]["run.toml"])
    run_auth_init(Options(file=tmp_path / "run.toml"), tmp_path, force=False, tls=None)
    (trigger,) = AUTOSCALING["spec"]["triggers"]
    account = (tmp_path / "auth/kubernetes.conf").read_text().split(" {")[0]
    assert account.strip('"') == trigger["metadata"]["account"]


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
    assert needed <= ran <= set(services())
    assert {command[0] for command in commands()} == {"run", "init"}


def run_configs() -> list[str]:
    (config,) = (document for document in KUBERNETES if document["kind"] == "ConfigMap")
    return [(DEPLOY / "compose/run.toml").read_text(), config["data"]["run.toml"]]


@pytest.mark.parametrize("text", run_configs(), ids=["compose", "kubernetes"])
def test_the_run_configurations_load_and_name_what_runs(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    config = load(run_config_type(), file=file, environ={}, sets=[]).config
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


def exported() -> dict[str, set[str]]:
    """Return Prometheus' names of all metrics that services send, with the labels of each.

    The heartbeat's figures are those of `test_metric_names`; names are translated as Prometheus' OTLP receiver does.
    """
    texts = [name.replace("ENV", "shop").replace("RATER", "r").replace("STREAM", "EVENTS") for name in HEARTBEAT]
    waits = Histogram.of([0.5]).pack()
    stage = StageVitals(handled=1, wait=waits, process=waits, lag=1, in_flight=1)
    data = metrics_data(ServiceFigures(stage, dict.fromkeys(texts, 1.0), 1, 2), Resource({}), InstrumentationScope("s"))
    found: dict[str, set[str]] = {}
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        name = re.sub(r"[^a-zA-Z0-9]", "_", metric.name)
        unit = {"s": "seconds", "ms": "milliseconds", "By": "bytes", "1": "ratio"}.get(metric.unit)
        if unit is not None and not name.endswith(f"_{unit}"):
            name += f"_{unit}"
        if isinstance(metric.data, Sum):
            name += "_total"
        labels = {key.replace(".", "_") for point in metric.data.data_points for key in point.attributes}
        found.setdefault(name, set()).update(labels)
    return found


def asked() -> list[str]:
    """Return every query of the dashboard and of the alerts."""
    shown = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return shown + [rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("expression", asked())
def test_each_query_asks_for_metrics_and_labels_that_the_services_send(expression: str) -> None:
    known = exported()
    matching = r'\{__name__=~"([^"]+)"'
    names = set(re.findall(r"\blachesis_\w+", re.sub(matching, "", expression)))
    for pattern in re.findall(matching, expression):
        names |= {name for name in known if re.fullmatch(pattern, name)} or {pattern}
    assert names
    assert names <= known.keys()
    resource = {name.replace(".", "_") for name in PROMETHEUS["otlp"]["promote_resource_attributes"]}
    labels = set(re.findall(r"\b(rl_\w+|service_\w+)\b", expression))
    assert labels <= resource.union(*(known[name] for name in names))


def test_the_dashboard_shows_what_a_run_is_watched_by() -> None:
    titles = {panel["title"] for panel in DASHBOARD["panels"]}
    assert {"Services", "Held-out rate", "Reward by rater", "Lag", "Rate", "Wait, p99", "Dead letters"} <= titles
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_legends_and_alerts_name_labels_that_are_there() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            check_labels(target["legendFormat"], target["expr"], r"\{\{(\w+)\}\}")
    assert PROMETHEUS["rule_files"] == ["alerts.yml"]
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            check_labels(rule["annotations"]["summary"], rule["expr"], r"\$labels\.(\w+)")


def check_labels(text: str, expression: str, pattern: str) -> None:
    known = exported()
    names = {name for name in known if name in expression} or known.keys()
    resource = {name.replace(".", "_") for name in PROMETHEUS["otlp"]["promote_resource_attributes"]}
    assert set(re.findall(pattern, text)) - {"__name__"} <= resource.union(*(known[name] for name in names))


def test_the_dashboard_knows_the_services_by_their_names() -> None:
    named = {name for text in asked() for name in re.findall(r'service_name="([^"]+)"', text)}
    assert named
    assert named <= {subjects.service_name(service) for service in services()}
