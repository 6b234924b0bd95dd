"""Computes the figures of an evaluation, with the names in heartbeats, logs and wandb. Pure."""

from lachesis.pipeline.evaluator.logic.rates import interval_of
from lachesis.schemas.annotations import EvalEvent

__all__ = ["evaluation_figures"]


def evaluation_figures(event: EvalEvent) -> dict[str, float]:
    """Return `eval/{env}/{avg@k,pass@k,error,low,high,greedy,step}`; what was not measured is left out.

    `low` and `high` bound the 95 % interval of `avg@k`.
    """
    name = f"eval/{event.env}"
    low, high = interval_of(event) or (None, None)
    figures = {
        f"{name}/avg@{event.k}": event.avg,
        f"{name}/pass@{event.k}": event.pass_at_k,
        f"{name}/error": event.error,
        f"{name}/low": low,
        f"{name}/high": high,
        f"{name}/greedy": event.greedy,
        f"{name}/step": float(event.policy_step),
    }
    return {key: value for key, value in figures.items() if value is not None}
