"""Logs once what heartbeats say that a person has to know.

A stopped environment, a broken ledger, a service that waits for long, the last step.
"""

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.health.ledger_reader import LEDGER_REPAIR_HINT
from lachesis.pipeline.runtime.stream_marks import describe_lost_bytes
from lachesis.pipeline.telemetry.heartbeat_log import ReportedNames, SharedName
from lachesis.schemas.control import Heartbeat, StopKind

__all__ = ["Notices"]

log = logging.getLogger("lachesis")

_LONG_WAIT_S = 10.0
"""Seconds of waiting from which on a person has to know: shorter waits are part of a healthy run."""
_MAX_PROBLEMS = 256
"""Different problems that are logged."""
_MAX_PROBLEM_CHARS = 1000
_FORGET_S = 30.0
"""Seconds after which a process that says nothing more does not count as waiting: it has ended."""
_LOST = "flow/lost_bytes/"
_VARIES = re.compile(r"\b[0-9a-f]{32}\b|\d[\d.:]*")
"""Ids of groups, counts and times: two processes that wait for the same thing differ in them."""


@dataclass(slots=True)
class _Wait:
    """A process that waits: times of its first and newest heartbeat that said so, ns, and `logged`, what was logged."""

    since_ns: int
    newest_ns: int
    logged: str | None = None


class Notices:
    """What was logged of a run so far, so that it is logged once."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.ledger_broken = ""
        """How the ledger is broken, as the health service found it; empty: it is not known to be."""
        self._stopped: set[tuple[str, StopKind]] = set()
        self._evaluator_note: str | None = None
        self._last_step_logged = False
        self._waits: dict[str, _Wait] = {}
        self._problems: set[str] = set()
        self._reported_names = ReportedNames()
        self._lost: dict[str, int] = {}

    def report(self, beat: Heartbeat, *, evaluates: bool) -> None:
        """Log what is new in a heartbeat. `evaluates`: the run has an evaluator that has not finished."""
        self._report_wait(beat)
        self._report_problems(beat)
        if beat.service == "health":
            self._report_health(beat)
        if beat.service == "governor":
            self._report_store(beat)
        if beat.service == "trainer" and evaluates:
            self._report_last_step(beat)
        if beat.service == "evaluator" and beat.stage.state == "ok":  # else it says what it waits for
            self._report_not_evaluated(beat.stage.note)

    def report_shared_names(self, found: Iterable[SharedName]) -> None:
        """Log, once for each name, that several processes of a service go by it."""
        for shared in self._reported_names.new_among(found):
            log.warning("%s", shared)

    def _report_wait(self, beat: Heartbeat) -> None:
        """Log what a service has waited for ten seconds long, and that it goes on.

        Once, however many processes wait for the same thing. An environment at its limit is no wait: that is how a
        healthy run looks. A governor in that state is one: nothing is admitted any more.
        """
        now_ns, state = beat.time_ns, beat.stage.state
        self._waits = {name: one for name, one in self._waits.items() if now_ns - one.newest_ns < _FORGET_S * 1e9}
        if state != "waiting" and not (state == "backpressure" and beat.service == "governor"):
            wait = self._waits.pop(beat.instance, None)
            if wait is not None and wait.logged is not None:
                log.info("%s goes on after %.0f s", beat.service, (now_ns - wait.since_ns) / 1e9)
            return
        wait = self._waits.setdefault(beat.instance, _Wait(now_ns, now_ns))
        wait.newest_ns = now_ns
        waited_s = (now_ns - wait.since_ns) / 1e9
        if wait.logged is not None or waited_s < _LONG_WAIT_S:
            return
        text = beat.stage.note or "it does not say for what"
        what = _VARIES.sub("#", text)
        if all(one.logged != what for one in self._waits.values()):
            wait.logged = what
            log.warning("%s has been waiting for %.0f s: %s", beat.service, waited_s, text)

    def _report_problems(self, beat: Heartbeat) -> None:
        """Log what goes wrong in a service while it goes on: once, however many processes say it, and however a count
        in it grows."""
        for said in beat.stage.problems:
            problem = said[:_MAX_PROBLEM_CHARS]
            what = f"{beat.service}: {_VARIES.sub('#', problem)}"
            if what not in self._problems and len(self._problems) < _MAX_PROBLEMS:
                self._problems.add(what)
                log.warning("%s: %s", beat.service, problem)

    def _report_health(self, beat: Heartbeat) -> None:
        """Log when a health check has stopped an environment: a run that stands still must not look busy."""
        if beat.metrics.get("ledger/broken") and not self.ledger_broken:
            self.ledger_broken = beat.stage.note or "its log says how"
            log.error("the ledger is broken: %s. %s", self.ledger_broken, LEDGER_REPAIR_HINT)
        stopped = {(env, how) for env, kinds in beat.stopped.items() for how in kinds}
        for env, how in sorted(stopped - self._stopped):
            log.warning("%s is %s by a health check: `lachesis health` says why, `lachesis resume %s` lets it go on",
                        env, how, env)  # fmt: skip
        self._stopped = stopped

    def _report_store(self, beat: Heartbeat) -> None:
        """Log what the server could not read of its store, as the governor measured it."""
        lost = {name.rpartition("/")[2]: int(size) for name, size in beat.metrics.items() if name.startswith(_LOST)}
        if lost != self._lost:
            self._lost = lost
            if (text := describe_lost_bytes(lost)) is not None:
                log.error("%s", text)

    def _report_last_step(self, beat: Heartbeat) -> None:
        """Log what the run still waits for after its last step."""
        steps = self._config.training.steps
        if steps is not None and beat.metrics.get("train/step", 0) >= steps and not self._last_step_logged:
            self._last_step_logged = True
            log.info("all %s steps are taken; the last policy is evaluated", steps)

    def _report_not_evaluated(self, note: str | None) -> None:
        """Log what the evaluator could not evaluate."""
        if note is not None and note != self._evaluator_note:
            log.warning("%s", note)
        self._evaluator_note = note
