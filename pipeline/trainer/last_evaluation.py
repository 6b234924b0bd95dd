"""Waits for the evaluation of a run's last policy, so that the log of figures can end with it."""

from collections.abc import Collection
from contextlib import aclosing

import anyio

from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.errors import HistoryLostError, InfrastructureError, NotFoundError
from lachesis.pipeline.evaluator.evaluation_reader import EvaluationReader
from lachesis.pipeline.evaluator.logic.figures import evaluation_figures
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.trainer.peer_metrics import PeerMetrics

__all__ = ["last_evaluation"]

SILENCE_S = 5.0
"""Seconds without a heartbeat of the evaluator after which no evaluation is waited for."""


async def last_evaluation(
    service: Service, peer_metrics: PeerMetrics, reader: EvaluationReader, envs: Collection[str], step: int
) -> dict[str, float]:
    """Return the figures of the newest evaluations, once each of `envs` is evaluated after `step`.

    Waits for them while an evaluator is heard and the service does not drain; what there is by then is returned.
    """
    async with background() as tasks:
        tasks.start_soon(_cancel_without_evaluator, service, peer_metrics, tasks.cancel_scope)
        try:
            await reader.catch_up()
            async with aclosing(reader.follow()) as events:
                while not _are_evaluated(reader, envs, step):
                    await anext(events)
        except (InfrastructureError, HistoryLostError, NotFoundError):
            pass  # the log goes without; the events have it
    return {
        name: value
        for env in reader.evaluations.envs.values()
        for name, value in evaluation_figures(env.newest).items()
    }


def _are_evaluated(reader: EvaluationReader, envs: Collection[str], step: int) -> bool:
    found = reader.evaluations.envs
    return all(env in found and found[env].newest.policy_step >= step for env in envs)


async def _cancel_without_evaluator(service: Service, peer_metrics: PeerMetrics, scope: anyio.CancelScope) -> None:
    begun_s = anyio.current_time()
    while not service.draining.is_set():
        heard_s = max(begun_s, peer_metrics.last_heard_s("evaluator"))
        left_s = heard_s + SILENCE_S - anyio.current_time()
        if left_s <= 0:
            break
        with anyio.move_on_after(left_s):
            await service.draining.wait()
    scope.cancel()
