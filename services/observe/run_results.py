"""The results of a run that has ended, or those so far, out of the figures in its folder."""

from collections.abc import Mapping
from typing import Any

import msgspec

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.trainer.tracking import METRICS_FILE
from lachesis.services.observe.run_state import RESULT_FIELDS, RunState, fields_of_step, project
from lachesis.services.observe.runs import look_at_folder
from lachesis.services.observe.summary import PLOTS, read_steps, totals_of
from lachesis.services.run.checkpoints import newest_checkpoint

__all__ = ["printed_results", "results_of"]


def results_of(config: RunConfig) -> RunState:
    """Return the state of a run, which may still go on, with its totals and where its results are."""
    folder = config.path
    steps = read_steps(folder)
    places = {"checkpoint": newest_checkpoint(folder), "plots": folder / PLOTS, "metrics": folder / METRICS_FILE}
    return msgspec.structs.replace(
        look_at_folder(config.run, folder),
        run=config.run,
        steps=config.training.steps,
        totals=totals_of(steps),
        places={name: str(path) for name, path in places.items() if path is not None and path.exists()},
        **_of_last(steps[-1] if steps else {}),
    )


def _of_last(figures: Mapping[str, float]) -> dict[str, Any]:
    known = fields_of_step(figures)
    return {"step": known["step"] or 0, "end_to_end": known["end_to_end"]}


def printed_results(results: RunState) -> dict[str, Any]:
    """Return the results as they are printed."""
    return project(results, RESULT_FIELDS) | {
        name: results.places.get(name) for name in ("checkpoint", "plots", "metrics")
    }
