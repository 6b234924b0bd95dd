"""Counts the failures of an environment's groups, and logs each reason once.

A task whose prompt leaves no room for an answer is named, and left out from then on. Bugs and refusals are counted in a
row; the log has each reason once, with the traceback of the environment's own code where there is one.
"""

import logging
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.common.code_place import is_own_code, stack_of_error
from lachesis.pipeline.common.secret_texts import error_text, without_secrets
from lachesis.pipeline.errors import EnvironmentCodeError, PromptTooLongError, leaves
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas.errors import DataError

__all__ = ["GroupFailures"]

log = logging.getLogger("lachesis")

_MAX_REASONS = 64
"""Different reasons that one process logs in full."""
_FAILURES_BEFORE_NOTICE = 3
"""Failed groups in a row after which a notice reports it."""
_VARIES = re.compile(r"'[^']*'|\d+")
"""Names and numbers: two failures for the same reason differ in them."""


class GroupFailures:
    """Counts the failures of one environment's groups. `tasks`: how many tasks its pool has."""

    def __init__(self, service: Service, env: str, tasks: int) -> None:
        self.in_a_row = 0
        self.made = 0
        """Groups that were made in this life of the process."""
        self._service = service
        self._env = env
        self._tasks = tasks
        self._too_long: dict[int, None] = {}
        self._longest_first = ""
        self._thought_calls = 0
        self._failed_samples = 0
        self._first_failed = ""
        self._logged: set[str] = set()

    @property
    def too_long(self) -> NDArray[np.int64]:
        """int64 [n]: the tasks with prompts beyond the context, which are not drawn again."""
        return np.array(list(self._too_long), np.int64)

    def is_too_long(self, index: int) -> bool:
        return index in self._too_long

    def count_made(self, thought_calls: int, failed_samples: Sequence[str] = ()) -> None:
        """Count a group that was made, and the tool calls of its samples that were only thought of or shown.

        `failed_samples`: what failed in the environment's code, one text for each sample that was left out for it.
        """
        self.in_a_row = 0
        self.made += 1
        self._service.set_note("failure", None)
        self._service.set_problem(f"{self._env} failing", None)
        if thought_calls:
            self._thought_calls += thought_calls
            self._service.vitals.metrics[f"environment/{self._env}/thought_calls"] = self._thought_calls
            self._service.set_note(
                f"{self._env} thought calls",
                f"{self._env}: {self._thought_calls} tool calls were only thought of, or shown in a block of code, and "
                "not run",
            )

        if failed_samples:
            self._first_failed = self._first_failed or " ".join(failed_samples[0].split())
            self._failed_samples += len(failed_samples)
            self._service.vitals.metrics[f"environment/{self._env}/failed_samples"] = self._failed_samples
            self._service.set_problem(
                f"{self._env} failed samples",
                f"environment {self._env}: {self._failed_samples} samples of {self.made} groups were left out because "
                f"they failed, the first: {self._first_failed}; what is trained on lacks such answers; "
                f"`lachesis dev {self._env}` shows it without a run",
            )

    def count_too_long(self, index: int, item: str, error: PromptTooLongError) -> None:
        """Count a task whose prompt leaves no room for an answer, and name the first one.

        It may be met more than once, by groups that were under way.
        """
        if index in self._too_long:
            return
        self._too_long[index] = None
        if not self._longest_first:
            self._longest_first = f"{item!r:.80} (task {index}): {error}"
            log.warning("item %s; it is not drawn again, nor is any other like it", self._longest_first)
        count = len(self._too_long)
        self._service.vitals.metrics[f"environment/{self._env}/too_long"] = count
        self._service.set_problem(
            f"{self._env} too long",
            f"environment {self._env}: {count} of {self._tasks} tasks leave no room for an answer and are not drawn "
            f"again, the first {self._longest_first}",
        )

    def refuse_all_too_long(self, drawable: int) -> None:
        """Raise `EnvironmentCodeError` when none of the `drawable` tasks fits into the context."""
        if len(self._too_long) >= drawable:
            raise EnvironmentCodeError(
                f"environment {self._env}: none of its {drawable} tasks leaves room for an answer, the first item "
                f"{self._longest_first}; shorten the prompts, or take a model with a longer context"
            )

    def count_failed(self, item: str, error: EnvironmentCodeError | DataError, most: int) -> None:
        """Count a group that the environment's code, its size or a refusal cost.

        Raises `EnvironmentCodeError` when `most` groups in a row failed.
        """
        self.in_a_row += 1
        text = error_text(error)
        reason = _VARIES.sub("#", text.partition("\n")[0])  # what an agent wrote is on the lines below
        if reason not in self._logged and len(self._logged) < _MAX_REASONS:
            self._logged.add(reason)
            log.warning("a group of item %s failed: %s", item, text, exc_info=_raised_by_own_code(error))
        self._service.vitals.metrics[f"environment/{self._env}/failed"] = (
            self._service.vitals.metrics.get(f"environment/{self._env}/failed", 0.0) + 1.0
        )
        said = " ".join(without_secrets(str(error)).split())
        self._service.set_note("failure", said)
        if self.in_a_row >= _FAILURES_BEFORE_NOTICE:
            self._service.set_problem(
                f"{self._env} failing",
                f"environment {self._env}: {self.in_a_row} groups in a row failed, the last one: {said}; "
                f"`lachesis dev {self._env}` shows it without a run",
            )
        if self.in_a_row >= most:
            before = "" if self.made else ", and none was made before"
            raise EnvironmentCodeError(
                f"environment {self._env}: {self.in_a_row} groups in a row failed{before}, the last one: {said}; "
                f"`lachesis env verify` and `lachesis dev {self._env}` show it without a run"
            ) from error


def _raised_by_own_code(error: EnvironmentCodeError | DataError) -> BaseException | None:
    """Return the error with the traceback of the environment's own code; None: no line of it is in one."""
    cause = error.__cause__ if isinstance(error, EnvironmentCodeError) else None
    return cause if cause is not None and any(is_own_code(stack_of_error(leaf)) for leaf in leaves(cause)) else None
