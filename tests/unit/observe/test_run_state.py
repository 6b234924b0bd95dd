"""The one state of a run, and what each view prints of it."""

import msgspec
import pytest

from lachesis.services.observe.run_results import printed_results
from lachesis.services.observe.run_state import (
    FOLDER_FIELDS,
    STATUS_FIELDS,
    SUMMARY_FIELDS,
    TOP_FIELDS,
    EnvRates,
    RunState,
    RunTotals,
    fields_of_step,
    project,
)
from lachesis.services.observe.services import Quantiles

FIGURES = {
    "train/step": 7.0, "reward/mean": 0.5, "reward/sums/mean": 0.5, "staleness/mean": 1.0, "staleness/max": 2.0,
    "latency/e2e/p99": 3.0, "latency/e2e/rolling_p99": 4.0, "eval/sums/avg@4": 0.25, "eval/sums/step": 6.0,
    "health/sums/halted": 1.0, "health/words/halted": 0.0, "health/words/quarantined": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("fields", [FOLDER_FIELDS, STATUS_FIELDS, TOP_FIELDS, SUMMARY_FIELDS])
def test_every_field_of_every_view_is_there_where_nothing_is_known(fields: tuple[str, ...]) -> None:
    printed = project(RunState(run="r"), fields)
    assert len(printed) == len(fields)
    assert msgspec.json.decode(msgspec.json.encode(printed))["run"] == "r"


def test_the_views_show_the_same_figures_of_the_newest_step() -> None:
    state = RunState(run="r", reward_curve=[0.25, 0.5], **fields_of_step(FIGURES))
    shown, status, top = (project(state, fields) for fields in (FOLDER_FIELDS, STATUS_FIELDS, TOP_FIELDS))
    assert shown["step"] == status["step"] == top["step"] == 7
    assert shown["rewards"] == status["rewards"] == top["env_rewards"] == state.rewards
    assert top["rewards"] == [0.25, 0.5]
    assert [row.rate for row in status["evaluations"]] == [0.25]
    assert (shown["staleness"], top["staleness"], top["staleness_max"]) == (1.0, 1.0, 2.0)
    assert (shown["end_to_end_p99_s"], top["e2e_p99_s"]) == (4.0, 3.0)
    assert (shown["halted"], shown["quarantined"]) == (["sums"], ["words"])


def test_what_the_figures_do_not_say_is_not_known() -> None:
    nothing = RunState(run="r", **fields_of_step({}))
    assert nothing == RunState(run="r")
    assert nothing.end_to_end == Quantiles()


def test_results_name_the_totals_and_the_places() -> None:
    totals = RunTotals(sequences=3, held_out={"sums": EnvRates(first=0.0, last=1.0, best=1.0)})
    printed = printed_results(RunState(run="r", problems=["no more"], totals=totals, places={"plots": "/p"}))
    assert (printed["reason"], printed["sequences"], printed["evaluations"]) == ("no more", 3, totals.held_out)
    assert (printed["checkpoint"], printed["plots"], printed["metrics"]) == (None, "/p", None)
