"""The results of a run that has ended, or those so far, out of the figures in its folder."""

from collections.abc import Mapping, Sequence

import msgspec

from lachesis.pipeline.config.run import RunConfig
from lachesis.services.observe.runs import look_at_folder
from lachesis.services.observe.summary import PLOTS, read_steps, summarize_run
from lachesis.services.run.checkpoints import newest_checkpoint

__all__ = ["EnvRates", "RunResults", "results_of"]


class EnvRates(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out rates of an environment: of the first policy in the figures, the last and the best."""

    first: float
    last: float
    best: float


class RunResults(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a run. Seconds are of wall time; None: not known. `reward_first` and `reward_last`: means over the
    first and the last tenth of the steps. `checkpoint`: folder of the newest trained model.
    """

    run: str
    folder: str
    state: str
    reason: str | None
    step: int
    steps: int | None
    sequences: int
    tokens: int
    reward_first: float | None
    reward_last: float | None
    evaluations: dict[str, EnvRates]
    staleness_mean: float | None
    end_to_end_p99_s: float | None
    checkpoint: str | None
    plots: str | None
    metrics: str | None


def results_of(config: RunConfig) -> RunResults:
    """Return the results of a run, which may still go on."""
    folder = config.path
    overview = look_at_folder(config.run, folder)
    steps = read_steps(folder)
    summary = summarize_run(
        config, steps, first_step=0, wall_s=0.0, reason=None, outcomes={}, evaluations=(), restarts={}, places={}
    )
    checkpoint = newest_checkpoint(folder)
    plots, metrics = folder / PLOTS, folder / "metrics.jsonl"
    return RunResults(
        run=config.run,
        folder=str(folder),
        state=overview.state,
        reason=overview.problem,
        step=summary.step,
        steps=summary.steps,
        sequences=summary.sequences,
        tokens=summary.tokens,
        reward_first=summary.reward_first,
        reward_last=summary.reward_last,
        evaluations=held_out_rates(steps),
        staleness_mean=summary.staleness_mean,
        end_to_end_p99_s=summary.end_to_end.p99,
        checkpoint=None if checkpoint is None else str(checkpoint),
        plots=str(plots) if plots.is_dir() else None,
        metrics=str(metrics) if metrics.exists() else None,
    )


def held_out_rates(steps: Sequence[Mapping[str, float]]) -> dict[str, EnvRates]:
    """Return by environment the held-out rates in the figures of a run's steps. Pure."""
    rates: dict[str, list[float]] = {}
    for figures in steps:
        for name, value in figures.items():
            kind, _, rest = name.partition("/")
            env, _, measure = rest.rpartition("/")
            if kind == "eval" and measure.startswith("avg@"):
                rates.setdefault(env, []).append(value)
    return {env: EnvRates(first=values[0], last=values[-1], best=max(values)) for env, values in rates.items()}
