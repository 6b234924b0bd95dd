"""Logs once what heartbeats say that a person has to know.

A stopped environment, a broken ledger, the last step.
"""

import logging

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.health.ledger_reader import LEDGER_REPAIR_HINT
from lachesis.schemas.control import Heartbeat, StopKind

__all__ = ["Notices"]

log = logging.getLogger("lachesis")


class Notices:
    """What was logged of a run so far, so that it is logged once."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.ledger_broken = ""
        """How the ledger is broken, as the health service found it; empty: it is not known to be."""
        self._stopped: set[tuple[str, StopKind]] = set()
        self._evaluator_note: str | None = None
        self._last_step_logged = False

    def report(self, beat: Heartbeat, *, evaluates: bool) -> None:
        """Log what is new in a heartbeat. `evaluates`: the run has an evaluator that has not finished."""
        if beat.service == "health":
            self._report_health(beat)
        if beat.service == "trainer" and evaluates:
            self._report_last_step(beat)
        if beat.service == "evaluator" and beat.stage.state == "ok":  # else it says what it waits for
            self._report_not_evaluated(beat.stage.note)

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
