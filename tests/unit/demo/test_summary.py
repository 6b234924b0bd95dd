import os
from collections.abc import Sequence
from io import StringIO
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
from rich.console import Console

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.telemetry.histogram import Histogram
from lachesis.schemas import subjects
from lachesis.schemas.annotations import EvalEvent, EvalExample
from lachesis.schemas.codec import encode
from lachesis.schemas.control import Heartbeat, StageVitals
from lachesis.schemas.ledger import Batch, GroupRef, LedgerEntry, Outcome
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.services.demo import view
from lachesis.services.demo.observed import RunObservation
from lachesis.services.demo.prepare import PreparedModel
from lachesis.services.demo.report import render
from lachesis.services.demo.settings import DemoOptions, demo_config
from lachesis.services.demo.summary import DemoSummary, WallTimes, latest_figures, summarize
from lachesis.services.demo.view import showing, stage_table
from lachesis.services.observe.run_state import SUMMARY_FIELDS, StateName, project

CONFIG = demo_config(DemoOptions(run="r", steps=2))
PREPARED = PreparedModel(folder="m", cached=True, key="k", seconds=1.0, difficulties=[3.0])
GROUPS = [os.urandom(16).hex() for _ in range(3)]
S = 1_000_000_000


def evaluation(step: int, avg: float, *, items: int = 200, greedy: float | None = 0.5) -> EvalEvent:
    return EvalEvent(
        run="r", env="words", revision="live", policy_version=f"{step}-abc-def", policy_step=step, items=items, k=4,
        temperature=1.0, avg=avg, pass_at_k=avg, greedy=greedy, started_ns=0, ended_ns=1,
    )  # fmt: skip


def stored(stream: str, subject: str, seq: int, event: Any = None, **headers: str) -> StoredMessage:
    return StoredMessage(stream, subject, seq, encode(event) if event else b"", 0, headers)


def ledger(seq: int, groups: Sequence[str], outcomes: Sequence[Outcome] = ()) -> StoredMessage:
    refs = [
        GroupRef(group=g, seq=1, env="words", sequences=8, tokens=100, policy_step=0, advantages=[]) for g in groups
    ]
    batch = Batch(number=seq - 1, groups=refs, sequences=8 * len(refs), tokens=100 * len(refs)) if refs else None
    entry = LedgerEntry(
        run="r", trainer="main", index=seq - 1, previous="", watermark=0, resolved=b"", events_cursor=1,
        batch=batch, outcomes=list(outcomes), next_batch=seq if batch else seq - 1, written_ns=seq * S,
    )  # fmt: skip
    return stored(subjects.LEDGER, subjects.ledger("r", "main"), seq, entry)


def beat(service: str, pid: int, instance: str, handled: int, waits: Sequence[float] = ()) -> Heartbeat:
    vitals = StageVitals(handled=handled, wait=Histogram.of(waits).pack(), process=Histogram().pack())
    return Heartbeat(
        host="h", schema_version=1, run="r", service=service, instance=instance, pid=pid, time_ns=handled, stage=vitals
    )


def summary(
    observed: RunObservation, *, state: StateName = "finished", gate: bool = True, figures: Any = ()
) -> DemoSummary:
    walls = WallTimes(prepare=1.0, start=2.0, train=10.0, finish=3.0, total=16.0)
    places = {"config": "/a b/run.toml"}
    return summarize(observed, PREPARED, list(figures), walls, state=state, gate=gate, places=places)


def progress_line(observed: RunObservation, elapsed_s: float, width: int = 120) -> str:
    return view.progress_line(observed, observed.state(0), elapsed_s, width)


def with_evaluations(*events: EvalEvent) -> RunObservation:
    observed = RunObservation(CONFIG)
    for seq, event in enumerate(events, 1):
        observed.stored(stored(subjects.EVENTS, subjects.event("eval", "r", "live", "words"), seq, event))
    return observed


def test_held_out_answers_before_and_after_stand_beside_each_other() -> None:
    def answered(step: int, answers: dict[int, tuple[str, float | None]]) -> EvalEvent:
        examples = [EvalExample(task=task, prompt=f"p{task}", answer=a, score=s) for task, (a, s) in answers.items()]
        return evaluation(step, 0.5).replace(examples=examples)

    before = answered(0, {4: ("I think\nit is 5", 0.0), 7: ("\x1b[2J", None)})
    judged = summary(with_evaluations(before, answered(2, {7: ("", 1.0), 4: ("x" * 500, 1.0)})))
    assert [(one.prompt, one.before_score, one.after_score) for one in judged.examples] == [
        ("p4", 0.0, 1.0),
        ("p7", None, 1.0),
    ]
    text = render(judged)
    assert "  p4\n    before - I think it is 5\n    after  + " in text
    assert "before ? \\x1b[2J\n    after  + (nothing)" in text
    assert max(map(len, text.splitlines())) < 200
    assert "answers at temperature 0" not in render(summary(with_evaluations(evaluation(0, 0.1), evaluation(2, 0.5))))


def test_samples_that_nobody_judged_fail_the_gate() -> None:
    before = evaluation(0, 0.0).replace(unjudged=3)
    judged = summary(with_evaluations(before, evaluation(2, 1.0)))
    assert (judged.gate.unjudged, judged.gate.passed, judged.ok) == (3, False, False)


@pytest.mark.parametrize(
    ("before", "after", "passed"), [(0.40, 0.60, True), (0.40, 0.59, False), (0.60, 0.40, False), (0.0, 1.0, True)]
)
def test_the_gate_wants_twenty_points(before: float, after: float, passed: bool) -> None:
    judged = summary(with_evaluations(evaluation(0, before), evaluation(1, 1.0), evaluation(2, after)))
    assert judged.gate.passed is passed
    assert judged.ok is passed
    assert judged.gate.gain == pytest.approx(100 * (after - before))


@pytest.mark.parametrize(
    "events",
    [
        [],
        [evaluation(0, 0.0)],
        [evaluation(1, 0.0), evaluation(2, 1.0)],
        [evaluation(0, 0.0), evaluation(1, 1.0)],
        [evaluation(0, 0.0, items=50), evaluation(2, 1.0)],
    ],
)
def test_what_was_not_measured_alike_does_not_pass(events: list[EvalEvent]) -> None:
    judged = summary(with_evaluations(*events))
    assert judged.gate.passed is False
    assert not judged.ok
    assert "FAILED" in render(judged)


def test_a_run_that_did_not_finish_is_not_ok_whatever_it_measured() -> None:
    good = with_evaluations(evaluation(0, 0.0), evaluation(2, 1.0))
    assert summary(good).ok
    assert not summary(good, state="interrupted").ok
    assert not summary(good, state="failed", gate=False).ok
    assert summary(with_evaluations(), gate=False).ok


def test_the_model_is_named_as_cached() -> None:
    judged = summary(with_evaluations())
    assert judged.warm_start == "cached"
    assert "from the cache" in render(judged)


def test_the_ledger_is_counted_once_and_the_oversampling_ratio_follows() -> None:
    observed = RunObservation(CONFIG)
    stale = [Outcome(9, None, "stale"), Outcome(10, None, "zero_variance")]
    for message in (ledger(1, GROUPS[:2]), ledger(2, GROUPS[2:], stale), ledger(2, GROUPS[2:], stale)):
        observed.stored(message)
    judged = summary(observed)
    assert judged.run.outcomes == {"batched": 3, "stale": 1, "zero_variance": 1}
    assert judged.oversampling == pytest.approx(5 / 3)
    assert (judged.run.groups_per_s, judged.run.tokens_per_s) == (pytest.approx(0.3), pytest.approx(30.0))


def test_end_to_end_times_join_rollouts_batches_and_steps() -> None:
    observed = RunObservation(CONFIG)
    for seq, (group, started_s) in enumerate(zip(GROUPS, (1, 2, 3), strict=True), 1):
        plan = Plan(
            group=group, sequences=8, samples=8, tokens=100, policy_step=0, producer="p", epoch=0, counter=seq,
            started_ns=started_s * S,
        )  # fmt: skip
        observed.stored(stored(subjects.ROLLOUTS, "rl.rollout.r.words", seq, **{PLAN_HEADER: plan.pack()}))
    observed.stored(ledger(1, GROUPS[:2]))
    observed.stored(ledger(2, GROUPS[2:]))
    figures = [
        {"train/step": 1.0, "train/time": 5.0, "staleness/mean": 1.0, "staleness/max": 1.0},
        {"train/step": 2.0, "train/time": 9.0, "staleness/mean": 2.0, "staleness/max": 3.0},
    ]
    judged = summary(observed, figures=figures)
    assert judged.run.end_to_end.p50 == pytest.approx(4.0)  # of 5-1, 5-2 and 9-3
    assert judged.generated_groups == 3
    assert (judged.run.totals.staleness_mean, judged.run.totals.staleness_max) == (1.5, 3.0)
    assert judged.run.step == 2


def test_the_processes_of_a_service_add_up_and_more_than_planned_are_restarts() -> None:
    observed = RunObservation(CONFIG)
    for heartbeat in (
        beat("scorer", 1, "1-a", 5, [0.1]),
        beat("scorer", 1, "1-a", 10, [0.1, 0.1]),
        beat("scorer", 2, "2-b", 20, [0.4]),
        beat("trainer", 3, "3-c", 1),
        beat("trainer", 4, "4-d", 2),
    ):
        observed.heartbeat(heartbeat)
    observed.supervisor_pids = [7, 8]
    judged = summary(observed)
    scorer = next(row for row in judged.run.services if row.service == "scorer")
    assert (scorer.pids, scorer.handled) == ([1, 2], 30)
    assert scorer.wait.p50 == pytest.approx(0.1, rel=0.02)
    assert scorer.wait.p99 == pytest.approx(0.4, rel=0.02)
    assert scorer.process.p99 is None
    assert judged.run.restarts == {"trainer": 1, "supervisor": 1}


def test_a_step_taken_again_counts_once_and_a_void_one_not_at_all() -> None:
    lines = [
        {"train/step": 1.0, "a": 1.0},
        {"train/step": 2.0, "a": 2.0},
        {"latency/x": 1.0},
        {"train/step": 2.0, "a": 3.0},
    ]
    assert [line["a"] for line in latest_figures(lines)] == [1.0, 3.0]


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        (
            [{"teacher/kl_topk": float(10 - n), "teacher/kl": 0.0} for n in range(10)],
            "9.50 -> 1.50 nats a token, means",
        ),
        ([{"teacher/kl": 2.0}, {}, {"teacher/kl": 1.0}], "2.00 -> 1.00 nats"),
        ([{"teacher/kl_topk": 2.0}], None),
    ],
)
def test_a_distilled_policys_distance_to_its_teacher_is_told(figures: list[dict[str, float]], said: str | None) -> None:
    def text(*, distill: bool) -> str:
        config = demo_config(DemoOptions(run="r", steps=2, distill=distill))
        return render(summary(RunObservation(config), figures=[{"train/step": 1.0} | one for one in figures]))

    assert f"teacher      KL to it {said}" in text(distill=True) if said else "KL to it" not in text(distill=True)
    assert "KL to it" not in text(distill=False)


def test_hostile_messages_are_passed_over() -> None:
    observed = RunObservation(CONFIG)
    observed.stored(StoredMessage(subjects.LEDGER, subjects.ledger("r", "main"), 1, b"\xff", 0))
    observed.stored(StoredMessage(subjects.EVENTS, subjects.event("eval", "r", "live", "words"), 1, b"", 0))
    observed.stored(StoredMessage(subjects.ROLLOUTS, "rl.rollout.r.words", 1, b"", 0))
    assert summary(observed).run.outcomes == {}


def test_the_summary_is_json_and_its_text_says_how_to_look_further() -> None:
    judged = summary(with_evaluations(evaluation(0, 0.1), evaluation(2, 0.5)))
    written = msgspec.json.decode(msgspec.json.encode(judged.fields()))
    assert set(project(judged.run, SUMMARY_FIELDS)) < set(written), "the demo leaves what every run leaves, and more"
    assert (written["run"], written["state"], written["wall_s"], written["gate"]["gain"]) == ("r", "finished", 16, 40)
    text = render(judged)
    for command in ("tail reward", "replay", "compare live median", "top"):
        assert f"lachesis {command} --config '/a b/run.toml'" in text
    assert text.endswith("PASSED: the held-out pass rate rose by 40.0 points; 20 points are required")


def test_progress_is_one_line_whatever_is_known_yet() -> None:
    observed = RunObservation(CONFIG)
    assert "step 0/2 | reward - | held out -" in progress_line(observed, 3.0)
    observed = with_evaluations(evaluation(0, 0.25), evaluation(2, 0.5))
    trainer = Heartbeat(
        host="h", schema_version=1, run="r", service="trainer", instance="1-a", pid=1, time_ns=1, stage=StageVitals(),
        metrics={"train/step": 2.0, "reward/mean": 0.5, "staleness/mean": 1.5, "latency/e2e/p99": 2.0},
    )  # fmt: skip
    observed.heartbeat(trainer)
    line = progress_line(observed, 61.0)
    assert line.startswith("  61 s | step 2/2 | reward 0.500 | held out 25%@0 50%@2 |")
    assert line.endswith("staleness 1.5 | e2e p99 2.0 s")
    observed = with_evaluations(*(evaluation(step, step / 100) for step in (0, 20, 40, 60)))
    assert "| held out 0%@0 ... 40%@40 60%@60 |" in progress_line(observed, 61.0)


def test_progress_names_what_a_health_check_has_stopped_until_it_goes_on() -> None:
    observed = RunObservation(CONFIG)
    health = Heartbeat(
        host="h", schema_version=1, run="r", service="health", instance="1-a", pid=1, time_ns=1, stage=StageVitals()
    )
    observed.heartbeat(health.replace(stopped={"words": ["halted"], "sums": []}))
    line = progress_line(observed, 3.0)
    assert "step 0/2 | words halted by a health check: lachesis health --run r | reward" in line
    observed.heartbeat(health.replace(time_ns=2))
    assert "halted" not in progress_line(observed, 3.0)


async def test_what_a_service_waits_for_is_said_once_until_it_changes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "_LINE_S", 0.0)
    observed = RunObservation(CONFIG)
    wait = "generate: timed out after 120 s (tried since 07:00:00 UTC)"
    waiting = beat("environment-words", 2, "2-b", 1)
    again = waiting.replace(stage=msgspec.structs.replace(waiting.stage, state="waiting", note=wait, retried=3))
    for time_ns, one in enumerate([again, again, waiting, again], 1):
        observed.heartbeat(one.replace(time_ns=time_ns))
        async with showing(observed, 0.0):
            shown = ""
            while shown.count("step 0/2") < 3:
                shown += capsys.readouterr().out
                await anyio.lowlevel.checkpoint()
        assert shown.count(f"environment-words waits: {wait}") == (one is again)


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100])
def test_the_progress_line_fits_a_terminal_and_cuts_no_figure_short(width: int) -> None:
    observed = with_evaluations(*(evaluation(step, step / 100) for step in (0, 20, 40, 60)))
    whole, line = progress_line(observed, 61.0, 1000), progress_line(observed, 61.0, width)
    assert len(line) <= width < len(whole)
    assert whole.startswith(line)
    assert line.split(" | ") == whole.split(" | ")[: line.count(" | ") + 1]


async def test_without_a_terminal_the_lines_fit_as_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    observed = with_evaluations(*(evaluation(step, step / 100) for step in (0, 20, 40, 60)))
    async with showing(observed, 0.0):
        pass
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all(len(line) <= 50 for line in lines)


def test_the_live_table_has_a_row_for_each_service() -> None:
    observed = RunObservation(CONFIG)
    observed.heartbeat(beat("trainer", 3, "3-c", 1))
    observed.heartbeat(beat("batcher", 2, "2-b", 4, [0.5]))
    console = Console(width=80, file=StringIO())
    console.print(stage_table(observed.state(0)))
    rows = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [row.split()[0] for row in rows] == ["stage", "batcher", "trainer"]
    assert rows[1].split()[1:6] == ["ok", "-", "4", "0", "500"]
