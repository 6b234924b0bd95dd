"""Computes the figures of an evaluation, with the names in heartbeats, logs and wandb. Pure."""

from lachesis.schemas.annotations import EvalEvent

__all__ = ["evaluation_figures"]


def evaluation_figures(event: EvalEvent) -> dict[str, float]:
    """Return `eval/{env}/{avg@k,pass@k,error,greedy,step}`; figures that were not measured are left out."""
    name = f"eval/{event.env}"
    figures = {
        f"{name}/avg@{event.k}": event.avg,
        f"{name}/pass@{event.k}": event.pass_at_k,
        f"{name}/error": event.error,
        f"{name}/greedy": event.greedy,
        f"{name}/step": float(event.policy_step),
    }
    return {key: value for key, value in figures.items() if value is not None}
