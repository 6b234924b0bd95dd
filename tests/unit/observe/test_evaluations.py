"""What `up`, `status` and `top` say of held-out evaluations, next to the training reward."""

import io
import json

import msgspec
import pytest
from rich.console import Console

from lachesis.pipeline.config.evaluation_sources import evaluation_names
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig, TrainingConfig
from lachesis.pipeline.errors import HistoryLostError
from lachesis.pipeline.evaluator.evaluation_reader import EvaluationReader
from lachesis.pipeline.evaluator.logic.history import EvaluationHistory
from lachesis.schemas import subjects
from lachesis.schemas.annotations import EvalEvent
from lachesis.schemas.codec import encode
from lachesis.services.cli import top
from lachesis.services.cli.up import EvaluationWatch, describe_evaluation
from lachesis.services.observe.evaluations import (
    evaluation_line,
    evaluation_rows,
    evaluation_summary,
    evaluation_warnings,
)
from lachesis.services.observe.overview import look_back
from lachesis.services.observe.progress import progress_line, training_rewards

CONFIG = RunConfig(run="r", model="m", environments={"sums": EnvironmentConfig(kind="x")})


def reader_of(bus, config):
    return EvaluationReader(bus, config.run, config.revision, evaluation_names(config))


def evaluation(step, avg, *, env="sums", error=0.03, n=20):
    succeeded = [round(avg * 100)] * n
    return EvalEvent(
        run="r", env=env, revision="live", policy_version=f"{step}-a-d{step}", policy_step=step, items=n, k=100,
        temperature=1.0, avg=avg, error=error, pass_at_k=avg, greedy=0.5, tasks=list(range(n)),
        task_successes=succeeded, task_judged=[100] * n, started_ns=step + 1, ended_ns=step + 2,
    )  # fmt: skip


FALLEN = [evaluation(0, 0.30), evaluation(10, 0.03)]


@pytest.fixture
def folder(tmp_path):
    rows = [{"train/step": n, "reward/mean": 0.28 + 0.05 * (n - 1)} for n in range(1, 21)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"train/st')
    return tmp_path


def rows_of(*events):
    return evaluation_rows(EvaluationHistory.of(events))


def test_an_evaluation_is_a_line_as_it_comes():
    first, next_ = evaluation(0, 0.30), evaluation(10, 0.41)
    assert evaluation_line(first, first) == "held-out sums: 0.30 [0.28, 0.32] after step 0; 20 tasks, 100 answers each"
    assert evaluation_line(next_, first).startswith(
        "held-out sums: 0.41 [0.39, 0.43] after step 10 (first 0.30: +0.11 +- 0.00); "
    )
    odd = next_.replace(error=None, tasks=[], task_successes=[], task_judged=[], unjudged=3)
    assert evaluation_line(odd, odd) == (
        "held-out sums: 0.41 after step 10; 20 tasks, 100 answers each, 3 answers not rated"
    )


def test_a_shorter_evaluation_stands_beside_what_the_first_was_on_its_tasks():
    first = evaluation(0, 0.30).replace(task_successes=[60] * 10 + [0] * 10)
    next_ = evaluation(10, 0.50, n=10)
    assert "(first 0.60: -0.10 +- 0.00)" in evaluation_line(next_, first)
    (row,) = rows_of(first, next_)
    assert (row.first, row.change, row.change_error) == (0.6, pytest.approx(-0.1), pytest.approx(0, abs=1e-9))


def test_reward_and_held_out_rate_stand_side_by_side():
    (row,) = rows_of(*FALLEN)
    line = progress_line({"train/step": 12.0, "reward/mean": 0.78}, 100, [evaluation_summary(row, named=False)])
    assert line == "step 12/100, reward 0.78, held-out 0.03 [0.02, 0.04] (step 10, first 0.30)"
    (row,) = rows_of(evaluation(0, 0.3), evaluation(10, 0.5), evaluation(20, 0.4))
    assert evaluation_summary(row) == "sums 0.40 [0.38, 0.42] (step 20, first 0.30, best 0.50 after step 10)"


def test_a_fall_is_told_with_what_the_reward_did(folder):
    said = (
        "the held-out rate of sums fell from 0.30 to 0.03 (difference -0.27 +- 0.00 on 20 tasks) between step 0 and 10"
    )
    evaluations = EvaluationHistory.of(FALLEN)
    assert evaluation_warnings(evaluations, folder) == {
        "sums": f"{said}, while the training reward rose from 0.28 to 0.73"
    }
    assert evaluation_warnings(evaluations, folder / "elsewhere") == {"sums": said}
    assert evaluation_warnings(EvaluationHistory.of(FALLEN[:1]), folder) == {}


def test_rewards_are_those_of_the_steps_that_made_the_policies(folder):
    assert training_rewards(folder, 0, 10) == (0.28, pytest.approx(0.73))
    assert training_rewards(folder, 10, 10) == (pytest.approx(0.73), pytest.approx(0.73))
    assert training_rewards(folder, 30, 40) is None
    assert training_rewards(folder, 0, 0) is None


def test_top_shows_them_under_the_reward_and_warns():
    overview = look_back("r", [], [{"train/step": 12.0, "reward/mean": 0.78, "train/time": 1.0}], {})
    warnings = list(evaluation_warnings(EvaluationHistory.of(FALLEN), CONFIG.path).values())
    overview = msgspec.structs.replace(overview, evaluations=rows_of(*FALLEN), warnings=warnings)
    console = Console(width=200, file=io.StringIO())
    console.print(top.render(overview, 200))
    lines = console.file.getvalue().splitlines()
    (at,) = [n for n, line in enumerate(lines) if "reward 0.78" in line]
    assert lines[at + 1].strip() == "held out  sums 0.03 [0.02, 0.04] (step 10, first 0.30)"
    assert any(line.startswith("warning: the held-out rate of sums fell") for line in lines)


async def store(lab, *events):
    for event in events:
        subject = subjects.event("eval", "r", "live", event.env)
        await lab.bus.publish(subject, encode(event), msg_id=f"{event.env}{event.policy_version}")


async def test_each_evaluation_is_read_once_and_those_of_other_names_are_not(lab):
    reader = reader_of(lab.bus, CONFIG)
    assert await reader.catch_up() == []
    await store(lab, *FALLEN, evaluation(0, 0.5, env="old"))
    await lab.bus.publish(subjects.event("eval", "r", "live", "sums"), b"\xc1", msg_id="odd")
    assert [event.policy_step for event in await reader.catch_up()] == [0, 10]
    assert await reader.catch_up() == []
    await store(lab, evaluation(20, 0.4))
    assert [event.policy_step for event in await reader.catch_up()] == [20]
    assert set(reader.evaluations.envs) == {"sums"}
    by_name = reader_of(lab.bus, RunConfig(run="r"))
    assert len(await by_name.catch_up()) == 4
    none = msgspec.structs.replace(CONFIG, mode="observe")
    assert await reader_of(lab.bus, none).catch_up() == []


async def test_an_evaluation_that_ended_long_after_it_was_stored_hides_no_later_one(lab):
    reader = reader_of(lab.bus, CONFIG)
    await store(lab, evaluation(0, 0.5), msgspec.structs.replace(evaluation(10**9, 1.0), ended_ns=(1 << 63) - 1))
    await store(lab, evaluation(10, 0.4))
    assert [event.policy_step for event in await reader.catch_up()] == [0, 10]


async def test_a_broker_that_lost_history_is_read_from_its_start(lab, monkeypatch):
    reader = reader_of(lab.bus, CONFIG)
    await store(lab, *FALLEN)
    await reader.catch_up()
    read, lost = lab.bus.read, []

    def rolled_back(stream, *args, start=1, **kwargs):
        if start > 1:
            lost.append(start)
            raise HistoryLostError("gone")
        return read(stream, *args, start=start, **kwargs)

    monkeypatch.setattr(lab.bus, "read", rolled_back)
    await store(lab, evaluation(20, 0.4))
    assert [event.policy_step for event in await reader.catch_up()] == [20]
    assert len(lost) == 1


def run_in(folder, **changes):
    config = msgspec.structs.replace(CONFIG, folder=str(folder), training=TrainingConfig(steps=20))
    return msgspec.structs.replace(config, **changes)


async def test_up_prints_them_as_they_come_warns_once_and_names_the_best(lab, folder, capsys, caplog):
    config = run_in(folder)
    for step in (10, 20):
        (folder / "checkpoints" / f"step-{step}").mkdir(parents=True)
        state = {
            "step": step, "lineage": "a", "policy_version": f"{step}-a-d{step}", "ledger_position": 1,
            "chain_hash": "f",
        }  # fmt: skip
        (folder / "checkpoints" / f"step-{step}" / "trainer.json").write_text(json.dumps(state))
    await store(lab, evaluation(0, 0.30))  # of an earlier life of the run
    watch = EvaluationWatch(config)

    async def follow(service):
        async with service.until_drained():
            await watch.follow(lab.bus)

    async def shown(summary):
        return watch.summaries() == [summary]

    async with lab.running(follow, "up"):
        await lab.until(lambda: shown("0.30 [0.28, 0.32] (step 0)"))
        await store(lab, evaluation(10, 0.03))
        await lab.until(lambda: shown("0.03 [0.02, 0.04] (step 10, first 0.30)"))
        await store(lab, evaluation(15, 0.02))
        await lab.until(lambda: shown("0.02 [0.01, 0.03] (step 15, first 0.30)"))
    assert list(watch.conclude()) == [
        "the best by held-out rate: the model begun with, m (sums 0.30, the last policy 0.02 on the same 20 tasks)"
    ]
    await store(lab, evaluation(19, 0.50))
    await watch.finish(lab.bus)  # what came while the services stopped
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(";")[0] for line in printed] == [
        "held-out sums: 0.30 [0.28, 0.32] after step 0",
        "held-out sums: 0.03 [0.02, 0.04] after step 10 (first 0.30: -0.27 +- 0.00)",
        "held-out sums: 0.02 [0.01, 0.03] after step 15 (first 0.30: -0.28 +- 0.00)",
        "held-out sums: 0.50 [0.48, 0.52] after step 19 (first 0.30: +0.20 +- 0.00)",
    ]
    assert [record.getMessage().split(" (")[0] for record in caplog.records if "held-out" in record.getMessage()] == [
        "the held-out rate of sums fell from 0.30 to 0.03"
    ]
    assert list(watch.conclude()) == [
        f"the best by held-out rate: {folder}/checkpoints/step-20, the nearest to step 19 (sums 0.50 on 20 tasks)"
    ]
    assert (folder / "checkpoints" / "best").read_text() == "step-20\n"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "held out of training and evaluated every 10 steps: 10% of the tasks of sums, 8 to 200 of each or none"),
        ({"evaluation": {"exam": EnvironmentConfig(kind="x")}}, "evaluated every 10 steps: exam"),
        ({"mode": "observe"}, "no held-out evaluation: mode is observe"),
    ],
)
def test_up_says_what_is_evaluated_or_why_nothing_is(changes, said):
    assert describe_evaluation(msgspec.structs.replace(CONFIG, **changes)).startswith(said)
