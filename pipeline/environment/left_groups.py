"""Finds the groups that a killed process has left behind, and decides how they go on.

Guarantees that a group goes on only with the task, the tokenizer and the number of samples it began with, and that one
that ends the process time and again is given up. Its rollout has the id, producer and counter of its first life, so it
counts once, whichever lives store it.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import anyio
import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.calls.left_group_request import Reservation, request_left_group
from lachesis.pipeline.calls.recorded import RecordedGroup
from lachesis.pipeline.calls.recorder import CallRecorder, end_group
from lachesis.pipeline.common.cut_text import cut_middle
from lachesis.pipeline.environment.config import EnvironmentConfig
from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.environment.epoch import Claimer
from lachesis.pipeline.environment.epoch_claims import EpochClaims
from lachesis.pipeline.environment.group_environment import GroupEnvironment
from lachesis.pipeline.environment.session_calls import CallFigures, GroupCalls
from lachesis.pipeline.errors import EnvironmentCodeError, InfrastructureError
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.tasks.task import Task
from lachesis.schemas.calls import GroupStart
from lachesis.schemas.control import EpochClaim
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.rollout import Dispatch

__all__ = ["GroupTask", "LeftGroups", "records_calls"]

log = logging.getLogger("lachesis")

_MAX_FRUITLESS = 3
"""Lives in a row that may end without a further record of a group, until it is given up: it may be what ends them."""


class GroupTask(NamedTuple):
    """An item to work on.

    `recorded`: what another life has done of its group. `reservation`: until when it is this process's to begin with.
    """

    item: int
    snapshot_id: str
    probability: float
    claim: EpochClaim | None = None
    recorded: RecordedGroup | None = None
    reservation: Reservation | None = None

    @property
    def dispatch(self) -> Dispatch:
        return Dispatch(index=self.item, snapshot_id=self.snapshot_id, probability=self.probability)


def records_calls(name: str, env: Environment, settings: EnvironmentConfig) -> bool:
    """Return whether the calls of an environment are recorded. Raises `ConfigError` if they cannot be."""
    whole = isinstance(env, GroupEnvironment)
    if settings.record == "always" and (whole or not env.resumable):
        reason = "makes whole groups by itself" if whole else "says that its conversations cannot go on (resumable)"
        raise ConfigError(f'environments.{name}.record is "always", but {type(env).__name__} {reason}: set "auto"')
    if whole or not env.resumable:
        return False
    return settings.record == "always" or (settings.record == "auto" and _has_turns(env))


def _has_turns(env: Environment) -> bool:
    """Whether a conversation may go beyond the model's first answer."""
    own = type(env)
    overridden = own.respond is not Environment.respond or own.rollout is not Environment.rollout
    return env.max_turns > 1 and (overridden or bool(env.tools))


class LeftGroups:
    """The groups that the process `holder` may go on with.

    `task` makes an environment's task of an index. `is_held`: whether the lease of that name is held still.
    """

    def __init__(
        self,
        service: Service,
        name: str,
        env: Environment,
        settings: EnvironmentConfig,
        holder: Claimer,
        *,
        held_out: NDArray[np.int64],
        task: Callable[[int], Task],
        is_held: Callable[[str], Awaitable[bool]],
    ) -> None:
        self.figures = CallFigures()
        self.may_be = True
        """Whether groups may have been left behind that no process has taken up."""
        self._service = service
        self._name = name
        self._items = len(env)
        self._settings = settings
        self._holder = holder
        self._held_out = held_out
        self._task = task
        self._is_held = is_held
        self._lock = anyio.Lock()

    async def take_up(self, claims: EpochClaims | None, tokenizer_hash: str) -> GroupTask | None:
        """Return a group that another life has left behind; None: there is none, or the service drains.

        One that cannot go on is ended, and counted as lost. `claims`: of the epoch, where items are claimed.
        """
        async with self._lock:  # its place of the epoch is taken over before any other place is claimed
            while self.may_be:
                try:
                    left = await request_left_group(self._service, self._name, self._holder.holder, self._holder.life)
                    if left is None:
                        self.may_be = False
                        return None
                    draw, reason = None, left.reason
                    if left.recorded is not None:
                        draw, reason = await self._go_on(left.recorded, claims, tokenizer_hash)
                    if draw is not None:
                        return draw._replace(reservation=left.reservation)
                    if left.reservation.is_over:
                        continue  # another process may go on with it
                    lost_s = 0.0 if left.recorded is None else left.recorded.seconds
                    await end_group(self._service, self._name, left.group, self._holder.life, reason, lost_s=lost_s)
                except InfrastructureError:
                    return None  # draining
                self._count_lost(left.group, reason, lost_s)
        return None

    async def _go_on(
        self, recorded: RecordedGroup, claims: EpochClaims | None, tokenizer_hash: str
    ) -> tuple[GroupTask | None, str]:
        """Return how to go on with a group, or None and the reason why that is not possible."""
        start, dispatch = recorded.start, recorded.start.dispatch
        reason = self._why_not(recorded, tokenizer_hash)
        if reason is not None or dispatch is None:
            return None, reason or "it names no task"
        if (claims is None) is not (start.claim is None):
            return None, "curriculum.strategy is another one by now"
        claim = None
        if claims is not None and start.claim is not None:
            claim = await claims.take_over(start.claim)
            if claim is None:
                return None, "its place of the epoch is settled"
        return GroupTask(dispatch.index, dispatch.snapshot_id, dispatch.probability, claim, recorded), ""

    def _why_not(self, recorded: RecordedGroup, tokenizer_hash: str) -> str | None:
        """Return why it is not possible to go on with a group, None if it is."""
        start = recorded.start
        item = f"item {start.item[:80]!r}"
        try:
            index = -1 if start.dispatch is None else start.dispatch.index
            if not 0 <= index < self._items or self._task(index).item != start.item:
                return f"the environment has no {item} there any more"
        except EnvironmentCodeError as error:
            return str(error)
        if np.isin(index, self._held_out):
            return f"{item} is held out by now"
        if start.samples != self._settings.samples or start.tokenizer_hash != tokenizer_hash:
            return "samples, tokenizer or chat template are other ones by now"
        if self._fruitless(recorded) >= _MAX_FRUITLESS:
            return f"{_MAX_FRUITLESS} lives in a row have ended without a further record of it"
        return None

    def _fruitless(self, recorded: RecordedGroup) -> int:
        """Return how many lives in a row have ended without a further record; waits of one life do not count."""
        start, holder = recorded.start, self._holder
        is_own = start.holder == holder.holder and start.life >= holder.life
        return 0 if recorded.since_start else start.fruitless + (not is_own)

    def recorder(self, draw: GroupTask, lease: str, new: GroupStart) -> CallRecorder:
        """Return what stores the records of a group: of `new`, or of that which `draw` goes on with."""
        recorded = draw.recorded
        if recorded is None:
            return CallRecorder(self._service, new, is_held=self._is_held)
        self.figures.resumed_groups += 1
        log.info(
            "group %s goes on: %d calls, %.1f s of generation, are recorded",
            recorded.start.group,
            recorded.n_calls,
            recorded.seconds,
        )
        reservation = draw.reservation or Reservation.from_now()
        start = recorded.start.replace(
            holder=self._holder.holder,
            # a process that runs for longer may replace a newer one, and not one that was given the group after it
            life=max(reservation.asked_ns, recorded.start.life + 1),
            lease=lease,
            fruitless=self._fruitless(recorded),
            known_seq=recorded.last_seq,
        )
        return CallRecorder(self._service, start, recorded, is_held=self._is_held, reservation=reservation)

    def calls(self, recorder: CallRecorder) -> GroupCalls:
        """Return the recorded conversations of a group."""
        return GroupCalls(recorder, self.figures, self._settings.diverged)

    async def stored(self, recorder: CallRecorder) -> None:
        """End a group whose rollout is stored."""
        try:
            await recorder.end("stored")
        except InfrastructureError:
            return  # draining: the next life stores the same rollout again, which counts once

    async def abandon(self, recorder: CallRecorder | None, reason: str) -> None:
        """End a group of which nothing will be used."""
        if recorder is None:
            return
        lost_s = recorder.known.seconds
        try:
            await recorder.end("abandoned", reason=cut_middle(reason, 500), lost_s=lost_s)
        except InfrastructureError:
            return  # draining: the next life goes on with it, and finds the same
        self._count_lost(recorder.group, reason, lost_s)

    def _count_lost(self, group: str, reason: str, lost_s: float) -> None:
        self.figures.lost_groups += 1
        self.figures.lost_seconds += lost_s
        self._service.vitals.metrics |= self.figures.metrics(self._name)
        log.warning("group %s does not go on, and %.1f s of generation are lost: %s", group, lost_s, reason)
