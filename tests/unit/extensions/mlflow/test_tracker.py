"""MLflow's own client and store: one run for all lives, each step once, samples, alerts, a server that is away."""

import json
from pathlib import Path

import msgspec
import pytest
from unit.extensions.tensorboard.test_tracker import ALERT

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.extensions.mlflow.config import MlflowConfig
from lachesis.pipeline.extensions.mlflow.tracker import MlflowTracker
from lachesis.pipeline.trainer.samples import ReadableSample
from lachesis.pipeline.trainer.tracking import open_tracking
from lachesis.schemas.errors import DataError

pytestmark = pytest.mark.hostile


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    return MlflowConfig(uri=f"file://{tmp_path}/mlruns", experiment="tests")


def opened(config, step=0):
    tracker = MlflowTracker(config, "a-run")
    tracker.open(step)
    return tracker


def history(config, name, run_name="a-run"):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=config.uri)
    runs = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    (run,) = (one for one in runs if one.info.run_name == run_name)
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)], run, client


def test_one_run_for_all_lives_with_each_step_once(config):
    first = opened(config)
    for step in (1, 2, 3):
        first.log_figures({"train/step": float(step), "train/loss": 0.0, "odd%name": 1.0}, step)
    first.close()
    again = opened(config, 2)  # killed after its checkpoint of step 2
    for step in (3, 4):
        again.log_figures({"train/step": float(step), "train/loss": 1.0}, step)
    again.log_figures({"eval/sums/rate": 0.5}, 4)
    again.close()
    losses, run, _ = history(config, "train/loss")
    assert losses == [(1, 0.0), (2, 0.0), (3, 0.0), (4, 1.0)]
    assert history(config, "eval/sums/rate")[0] == [(4, 0.5)]
    assert history(config, "odd_name")[0] == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert run.info.run_name == "a-run"
    assert run.info.status == "FINISHED"


async def test_steps_of_a_life_that_ended_while_mlflow_was_away_are_sent_by_the_next_one(config, tmp_path):
    opened(config).log_figures({"train/step": 1.0, "train/loss": 1.0}, 1)
    run = RunConfig(folder=str(tmp_path / "runs"))
    async with open_tracking(run.path, 0) as tracking:  # MLflow is away, and the trainer ends
        await tracking.resume(1)
        for step in (1, 2, 3, 4):
            await tracking.log({"train/step": float(step), "train/loss": float(step)})
    async with open_tracking(run.path, 0, [MlflowTracker(config, "a-run")]) as tracking:
        await tracking.resume(3)
        await tracking.log({"train/step": 4.0, "train/loss": 40.0})
    assert history(config, "train/loss")[0] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    async with open_tracking(run.path, 0, [MlflowTracker(config, "later")]) as tracking:  # added to a run that goes on
        await tracking.resume(4)
    assert history(config, "train/loss", "later")[0] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]


def test_more_figures_than_a_request_holds(config):
    tracker = opened(config)
    tracker.log_figures({"train/step": 1.0, **{f"m/{n}": float(n) for n in range(1500)}}, 1)
    assert history(config, "m/1499")[0] == [(1, 1499.0)]
    assert history(config, "train/step")[0] == [(1, 1.0)]


def test_samples_and_alerts_are_artifacts_and_the_standing_a_tag(config):
    tracker = opened(config)
    tracker.log_samples([ReadableSample("item7", "1+1=", "2", None)], 10)
    tracker.log_alert(ALERT, 10)
    _, run, client = history(config, "train/step")
    folder = Path(client.download_artifacts(run.info.run_id, ""))
    rows = json.loads((folder / "samples/step-00000010.json").read_text())
    assert rows == [{"item": "item7", "prompt": "1+1=", "completion": "2", "advantage": None}]
    alert = (folder / "alerts/000000000007-sums.txt").read_text()
    assert alert == "step 10\nrun r, environment sums: halted\n"
    assert run.data.tags["lachesis.standing.sums"] == "halted"


def test_a_server_that_is_away_is_an_outage_and_a_refusal_is_none(config, monkeypatch):
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

    away = MlflowTracker(MlflowConfig(uri="http://127.0.0.1:9"), "r")
    with pytest.raises(InfrastructureError, match="MLflow does not answer"):
        away.open(0)
    tracker = opened(config)

    def refuse(*_, **__):
        raise MlflowException("no such thing", error_code=INVALID_PARAMETER_VALUE)

    monkeypatch.setattr(tracker._client, "log_batch", refuse)
    with pytest.raises(DataError):
        tracker.log_figures({"x": 1.0}, 1)


HOSTILE = ("../../../x", "a/../../b", "/x", "x/", "a//b", "./a", "..", "x" * 300, "\x1b[2J", "a\n", "a\\..\\b", "")


@pytest.mark.parametrize("name", HOSTILE, ids=[f"{name:.12}".encode("unicode_escape").decode() for name in HOSTILE])
def test_no_name_of_a_figure_costs_the_others_or_leads_out_of_the_store(config, tmp_path, name):
    """Names hold what a rollout says, such as its skill."""
    tracker = opened(config)
    tracker.log_figures({name: 1.0, "train/step": 1.0}, 1)
    assert history(config, "train/step")[0] == [(1, 1.0)]
    assert {path.name for path in tmp_path.iterdir()} == {"mlruns"}


@pytest.mark.parametrize("uri", ["http://me:canary-pw@127.0.0.1:9", "postgresql://me:canary-pw@127.0.0.1:9/x"])
def test_no_password_of_its_address_is_said(uri):
    with pytest.raises((InfrastructureError, DataError)) as away:
        MlflowTracker(MlflowConfig(uri=uri), "r").open(0)
    assert "127.0.0.1:9" in str(away.value)
    assert "canary" not in str(away.value)


@pytest.mark.parametrize("environment", ["/../../../../../evil", "../x", "x" * 400, ""])
def test_no_name_of_an_environment_leads_out_of_the_alerts_or_is_tried_for_ever(config, tmp_path, environment):
    opened(config).log_alert(msgspec.structs.replace(ALERT, environment=environment), 1)
    (stored,) = tmp_path.rglob("alerts/*")
    assert stored.parent.parent.name == "artifacts"
    assert {path.name for path in tmp_path.iterdir()} == {"mlruns"}


def test_mlflow_without_an_address_says_what_to_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracker = MlflowTracker(MlflowConfig(), "run")
    tracker._make_client = lambda: _refuse(tracker)
    for call in (tracker.check, lambda: tracker.open(0)):
        with pytest.raises(DataError, match=r"name a tracking server by training\.mlflow\.uri or MLFLOW_TRACKING_URI"):
            call()


def _refuse(tracker):
    from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

    raise tracker._error(" unsupported URI 'sqlite:///mlflow.db'", error_code=INVALID_PARAMETER_VALUE)


def test_a_store_that_is_there_is_named(config):
    assert MlflowTracker(config, "run").check().endswith("where the experiment tests will be made")
    opened(config).close()
    assert MlflowTracker(config, "run").check().endswith("where the experiment tests is there")
