"""Causes of standstill, injected one by one into a simulated run: said where, after how long, with which cause.

Each is said by the notice of the service at fault with the words that name the cause, and withdrawn when it is gone.
What real processes do is `tests/integration/test_standstill.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
from unit.notices.simulated_run import Simulated, SimulatedRun

from lachesis.pipeline.notices.facts import Moment
from lachesis.pipeline.notices.text import notice_line
from lachesis.schemas.notices import Notice


class Cause(NamedTuple):
    """`inject` makes it so, `mend` ends it. `source` and `words` of the notice; `within_s` of simulated time."""

    name: str
    inject: Callable[[SimulatedRun], None]
    mend: Callable[[SimulatedRun], None]
    source: str
    words: tuple[str, ...]
    within_s: int = 10
    stops: bool = True


def _stopped(service: str) -> Cause:
    """Return a process that SIGSTOP froze."""

    def inject(run: SimulatedRun) -> None:
        run[service].speaks, run[service].kernel = False, "T"

    def mend(run: SimulatedRun) -> None:
        run[service].speaks, run[service].kernel = True, "S"

    words = (f"{service} is silent", "stopped", "kill -CONT")
    stops = service not in {"curriculum", "health", "evaluator", "inference-eval"}
    return Cause(f"{service} is frozen", inject, mend, service, words, 5, stops)


def _hangs(service: str) -> Cause:
    """Return a process whose event loop is blocked."""

    def inject(run: SimulatedRun) -> None:
        run[service].speaks, run[service].kernel = False, "R"

    def mend(run: SimulatedRun) -> None:
        run[service].speaks, run[service].kernel = True, "S"

    return Cause(f"{service} hangs", inject, mend, service, (f"{service} is silent", "blocks", "kill -9"))


def _waits(service: str, note: str) -> Cause:
    def inject(run: SimulatedRun) -> None:
        run.wait(service, note)

    def mend(run: SimulatedRun) -> None:
        run[service].state, run[service].note = "ok", None

    return Cause(f"{service} waits: {note}", inject, mend, service, (f"{service} is waiting", note), 12)


def _says(service: str, what: str, *, stops: bool = False) -> Cause:
    def inject(run: SimulatedRun) -> None:
        run.problem(service, "topic", what, stops=stops)

    def mend(run: SimulatedRun) -> None:
        run[service].notices = []

    return Cause(f"{service} says {what}", inject, mend, service, (what,), 2, stops)


def _ended(service: str, how: str, ends: int) -> Cause:
    def inject(run: SimulatedRun) -> None:
        one = run[service]
        one.runs, one.failing, one.ends, one.last_end = False, how, ends, how

    def mend(run: SimulatedRun) -> None:
        run.restart(service)
        run[service].ends = 0

    return Cause(f"{service} {how}, {ends} times", inject, mend, service, tuple(how.split(": ")), 2)


def _reported(name: str, notice: Notice) -> Cause:
    """Return what the supervisor finds elsewhere: about the server, its disk, its streams."""

    def inject(run: SimulatedRun) -> None:
        run.board.report(name, [notice])

    def mend(run: SimulatedRun) -> None:
        run.board.report(name, [])

    return Cause(name, inject, mend, notice.source, (notice.what,), 2, notice.stops)


def _server_away() -> Cause:
    def inject(run: SimulatedRun) -> None:
        for one in run.processes.values():
            one.speaks = False
        run.board.report_server(
            Notice(key="away", source="nats-server", what="nats-server does not answer", stops=True)
        )

    def mend(run: SimulatedRun) -> None:
        for one in run.processes.values():
            one.speaks = True
        run.run(1)
        run.board.report_server(None)

    return Cause("nats-server is paused", inject, mend, "nats-server", ("does not answer",), 2)


def _fruitless(kind: str, words: str) -> Cause:
    def inject(run: SimulatedRun) -> None:
        run.trains = False
        run.each_second = lambda run: run.outcomes.update({kind: run.outcomes.get(kind, 0) + 5})

    def mend(run: SimulatedRun) -> None:
        run.trains, run.each_second = True, None

    return Cause(f"groups are {kind}", inject, mend, "batcher", ("no group was fit", kind, words), 6)


def _stale() -> Cause:
    def inject(run: SimulatedRun) -> None:
        run.each_second = lambda run: run.outcomes.update(stale=run.outcomes.get("stale", 0) + 5)

    def mend(run: SimulatedRun) -> None:
        run.each_second = lambda run: run.outcomes.update(batched=run.outcomes["batched"] + 10)

    return Cause("groups are stale", inject, mend, "batcher", ("groups were too old", "max_staleness"), 15, stops=False)


def _standstill(service: str, note: str, in_flight: int) -> Cause:
    def inject(run: SimulatedRun) -> None:
        run.trains = False
        run[service].in_flight, run[service].note = in_flight, note

    def mend(run: SimulatedRun) -> None:
        run.trains = True
        run[service].in_flight, run[service].note = 0, None

    words = ("no optimizer step since step", "one usually takes 4 s", service, note)
    return Cause(f"no step: {service} {note}", inject, mend, "trainer", words, 65)


CAUSES = [
    *map(_stopped, ("governor", "batcher", "normalizer", "scorer", "teacher", "trainer", "inference-policy",
                    "inference-teacher", "environment-sums", "gateway", "health", "curriculum")),
    *map(_hangs, ("batcher", "trainer", "environment-words", "scorer")),
    _waits("scorer", "rater judge: unavailable"),
    _waits("environment-sums", "inference: the server at http://h:1 is away"),
    _waits("teacher", "the teacher's server answers 503"),
    _waits("gateway", "nothing is heard of atropos: is it running?"),
    _waits("trainer", "rl.logprobs is not readable"),
    _waits("batcher", "LEDGER has no leader"),
    _says("scorer", "environment sums, rater mine: no answer of its last 3 groups has a rating: error, KeyError"),
    _says("health", "environment sums is halted by the health check nonfinite", stops=True),
    _says("health", "environment words is quarantined by the health check truncated", stops=True),
    _says("environment-sums", "environment sums can generate nothing: a group of 16 sequences can never be admitted",
          stops=True),
    _says("environment-words", "environment words: 9 of 9 tasks leave no room for an answer"),
    _says("inference-policy", "policy 3-ab was refused: adapter has rank 64"),
    _says("trainer", "send figures to wandb: project nobody/none not found"),
    _says("governor", "history was not trimmed: the record is broken"),
    _says("health", "the ledger is broken", stops=True),
    _ended("environment-words", "ended with code 1: boom", 4),
    _ended("scorer", "ended with code -9 (killed from outside)", 1),
    _ended("trainer", "ended with code 9 (a disk is full)", 2),
    _server_away(),
    _reported("disk", Notice(key="disk", source="nats-server", what="the disk that holds S is full", stops=True)),
    _reported("exhaustion", Notice(key="x", source="nats-server", what="stream LEDGER-r: 91 % taken", stops=True)),
    _fruitless("zero_variance", "same reward"),
    _fruitless("unscorable", "no answer got a score"),
    _stale(),
    _standstill("teacher", "prompts take 40 s each", 12),
]  # fmt: skip


def _line(notices: list[Notice], cause: Cause) -> str | None:
    """Return the line that tells of the cause, if there is one."""
    for one in notices:
        line = notice_line(one)
        if one.source == cause.source and all(word in line for word in cause.words):
            assert one.stops == cause.stops
            return line
    return None


def test_there_are_forty_causes_at_least() -> None:
    assert len({cause.name for cause in CAUSES}) == len(CAUSES) >= 40


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_a_cause_is_said_in_time_and_withdrawn(cause: Cause) -> None:
    run = SimulatedRun()
    assert run.run(30) == []
    cause.inject(run)
    after = next((s for s in range(1, cause.within_s + 1) if _line(run.second(), cause) is not None), None)
    assert after is not None
    found = run.run(5)
    assert _line(found, cause) is not None
    about = {one.source for one in found} - {"trainer"}  # which may say that no step was taken
    assert about <= {cause.source}, "one cause is one notice, not one for everybody whom it holds up"
    cause.mend(run)
    assert run.run(10) == []


@pytest.mark.parametrize("cause", CAUSES[:12], ids=lambda cause: cause.name)
def test_without_a_supervisor_a_silent_service_is_said_all_the_same(cause: Cause) -> None:
    run = SimulatedRun(supervised=False)
    assert run.run(30) == []
    cause.inject(run)
    assert any(one.source == cause.source and "is silent" in one.what for one in run.run(10))
    cause.mend(run)
    assert run.run(10) == []


def test_what_one_service_says_hides_nothing_of_the_others() -> None:
    run = SimulatedRun()
    run.run(5)
    run["scorer"].notices = [Notice(key=f"k{n}", source="scorer", what=f"problem {n}") for n in range(5000)]
    run.problem("health", "stopped", "environment sums is halted", stops=True)
    found = run.run(2)
    assert found[0].what == "environment sums is halted"
    assert len(found) == 33
    for number in range(300):
        run.processes[f"s{number}"] = Simulated(f"s{number}", 5000 + number, supervised=False)
        run.problem(f"s{number}", "k", "text")
    found = run.run(2)
    assert len(found) == 256
    assert found[0].what == "environment sums is halted"


def test_one_who_was_held_up_himself_calls_nobody_silent() -> None:
    run = SimulatedRun()
    run.run(20)
    run.s += 120.0  # the machine was suspended, or this process was stopped
    assert run.board.notices(Moment(run.s, 0)) == []
    assert run.run(5) == []


def test_a_service_that_was_never_heard_is_named_and_all_of_them_once() -> None:
    run = SimulatedRun(supervised=False)
    run["batcher"].speaks = False
    assert [one.what for one in run.run(12)] == ["batcher is silent"]
    other = SimulatedRun(supervised=False)
    for one in other.processes.values():
        one.speaks = False
    assert [one.what for one in other.run(12)] == ["all 15 services are silent"]


def test_a_process_that_was_replaced_or_has_drained_is_not_missed() -> None:
    run = SimulatedRun(supervised=False)
    run.run(10)
    run.restart("scorer")
    run["evaluator"].state = "draining"
    run.run(2)
    run["evaluator"].speaks = False
    assert run.run(30) == []


def test_a_run_that_has_taken_its_last_step_misses_nobody() -> None:
    run = SimulatedRun(steps=5)
    run.run(22)
    run.trains = False
    for one in run.processes.values():
        one.speaks = False
    assert run.run(200) == []


def test_a_slow_run_is_no_standstill_and_a_restart_of_the_batcher_no_lack_of_fit_groups() -> None:
    run = SimulatedRun()
    run.run(40)
    run.trains = False
    assert run.run(50) == []
    run.outcomes = {"batched": 3, "zero_variance": 500}
    assert run.run(5) == []


@pytest.mark.parametrize(("service", "is_cause"), [("evaluator", False), ("curriculum", False), ("governor", True)])
def test_what_training_does_not_wait_for_is_not_why_no_step_is_taken(service: str, is_cause: bool) -> None:
    run = SimulatedRun()
    run.run(40)
    run.wait(service, "the server answers 503")
    run.trains = False
    (said,) = [one for one in run.run(90) if one.key == "standstill"]
    assert (said.why == f"{service} is waiting") == is_cause


def test_several_processes_that_wait_for_one_thing_are_one_notice() -> None:
    run = SimulatedRun(services=("scorer", "trainer"))
    for number in (2, 3):
        run.processes[f"scorer{number}"] = Simulated("scorer", 2000 + number, replica=str(number))
    run.run(5)
    for number, name in enumerate(("scorer", "scorer2", "scorer3")):
        run.wait(name, f"group {number:032x}: rater judge is away, tried {number} times")
    (found,) = run.run(15)
    assert (found.processes, found.source) == (3, "scorer")


def test_a_wait_that_looks_well_between_two_attempts_is_one_wait() -> None:
    run = SimulatedRun()
    run.run(5)
    run["environment-sums"].works = False

    def flap(run: SimulatedRun) -> None:
        if run.s % 3 == 0:
            run["environment-sums"].state = "ok"
        else:
            run.wait("environment-sums", "inference: away")

    run.each_second = flap
    assert [one.what for one in run.run(20)] == ["environment-sums is waiting"]


def test_services_that_wait_for_a_server_on_a_full_disk_are_not_said_beside_the_disk() -> None:
    run = SimulatedRun()
    run.run(5)
    run.board.report("disk", [Notice(key="disk/failed", source="nats-server", what="the disk is full", stops=True)])
    for name in ("batcher", "teacher"):
        run.wait(name, f"stalled for 7 s: publish rl.{name}: its disk is or was full")
    run.wait("scorer", "rater judge: unavailable")
    assert {one.source for one in run.run(20)} == {"nats-server", "scorer"}
    run.board.report("disk", [])
    assert {one.source for one in run.run(3)} == {"scorer"}
    assert {one.source for one in run.run(10)} == {"scorer", "batcher", "teacher"}


def test_an_environment_at_its_limit_is_no_wait_and_a_governor_that_admits_nothing_is() -> None:
    run = SimulatedRun()
    run.wait("environment-sums", "full", "backpressure")
    assert run.run(30) == []
    run.wait("governor", "stream LEDGER is full", "backpressure")
    assert [one.source for one in run.run(12)] == ["governor"]


def test_a_replica_that_is_started_again_and_again_is_said_without_a_supervisor() -> None:
    run = SimulatedRun(supervised=False)
    run.run(5)
    for _ in range(4):
        run.restart("environment-sums")
        run.run(5)
    assert [one.what.partition(" in ")[0] for one in run.run(1)] == ["environment-sums was started 4 times"]


def test_two_processes_of_one_name_are_said_once() -> None:
    run = SimulatedRun(services=("scorer", "trainer"))
    run.processes["other"] = Simulated("scorer", 2000)
    (found,) = run.run(10)
    assert "2 processes of scorer call themselves replica 1" in found.what
    assert "--replica" in found.mend


def test_a_process_started_by_hand_beside_a_supervised_run_is_missed_too() -> None:
    run = SimulatedRun()
    run.processes["by hand"] = Simulated("scorer", 9000, replica="7", supervised=False)
    assert run.run(20) == []
    run["by hand"].speaks = False
    (found,) = run.run(10)
    assert found.what == "scorer is silent, others of it speak"
    assert not found.stops


def test_a_process_of_another_machine_is_not_taken_for_the_one_here_that_has_its_pid() -> None:
    run = SimulatedRun()
    here = run["environment-sums"]
    away = Simulated("environment-sums", here.pid, life=2, replica="2", supervised=False, host="elsewhere")
    run.processes["another"] = away
    run.run(20)
    away.speaks = False
    (notice,) = run.run(12)
    assert notice.what == "environment-sums is silent, others of it speak"
    assert notice.why.startswith(f"process {here.pid} on elsewhere sends no heartbeats")
    assert "kill" not in notice.mend
    here.runs = False
    assert any("on elsewhere" in one.why for one in run.run(3)), "the end of the one here says nothing about it"
