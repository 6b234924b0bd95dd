"""No answer holds a scorer up: what may run for ever runs in a process that is ended."""

import anyio
import pytest

from lachesis.pipeline.scorer.config import RaterConfig
from lachesis.pipeline.scorer.loader import load_member
from lachesis.pipeline.scorer.rater import Sample
from lachesis.pipeline.scorer.raters.json_valid import json_valid
from lachesis.pipeline.scorer.runner import EnsembleRunner

pytestmark = [pytest.mark.hostile, pytest.mark.outside]

SLOW = "a" * 64 + "!"
BACKTRACKS = "(a+)+$"
FIND = "(1|(?:a+)+$)"
NESTED = {"$defs": {"list": {"type": "array", "items": {"$ref": "#/$defs/list"}}}, "$ref": "#/$defs/list"}


def runner(rater: str, timeout_s: float, **params) -> EnsembleRunner:
    return EnsembleRunner([load_member(RaterConfig(rater=rater, timeout_s=timeout_s, params=params))])


def sample(completion: str) -> Sample:
    return Sample(prompt="", completion=completion, task={"answer": "1"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rater", "params", "hostile", "fair"),
    [
        ("json_valid", {"schema": {"type": "string", "pattern": f"^{BACKTRACKS}"}}, f'"{SLOW}"', '"aa"'),
        ("json_valid", {"pattern": FIND}, SLOW, "1"),
        ("exact_match", {"pattern": FIND}, SLOW, "1"),
        ("numeric", {"pattern": FIND}, SLOW, "1"),
        ("similarity", {"pattern": FIND}, SLOW, "1"),
        ("format", {"pattern": BACKTRACKS}, SLOW, "aaa"),
    ],
)
async def test_an_answer_on_which_an_expression_backtracks_is_missing_and_the_loop_goes_on(
    rater: str, params: dict, hostile: str, fair: str
) -> None:
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await anyio.sleep(0.01)
            turns += 1

    with anyio.fail_after(60):
        ((rating,),) = (await runner(rater, 30.0, **params).rate_group([sample(fair)])).values()  # starts a worker
        assert rating.value == 1.0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(turn)
            ((rating,),) = (await runner(rater, 0.5, **params).rate_group([sample(hostile)])).values()
            tasks.cancel_scope.cancel()
    assert (rating.value, rating.status) == (None, "timeout")
    assert turns > 5


@pytest.mark.slow
async def test_one_answer_that_hangs_costs_no_other_its_rating() -> None:
    ensemble = runner("json_valid", 5.0, schema={"type": "string", "pattern": f"^{BACKTRACKS}"})
    with anyio.fail_after(60):
        await ensemble.rate_group([sample('"a"')] * 2)
        hostile, fair = sample(f'"{SLOW}"'), sample('"aa"')
        (ratings,) = (await ensemble.rate_group([hostile, hostile, *[fair] * 8])).values()
    assert [rating.status for rating in ratings] == ["timeout"] * 2 + ["ok"] * 8


@pytest.mark.slow
async def test_a_value_nested_deeper_than_a_schema_can_follow_is_missing_and_says_so() -> None:
    with anyio.fail_after(60):
        ensemble = runner("json_valid", 20.0, schema=NESTED)
        (ratings,) = (await ensemble.rate_group([sample("[" * 900 + "]" * 900), sample("[[]]")])).values()
    assert [rating.value for rating in ratings] == [None, 1.0]
    assert "nested too deeply" in ratings[0].detail


def test_a_fence_that_does_not_end_is_read_in_linear_time() -> None:
    assert json_valid(Sample(prompt="", completion="```" + " " * 1_000_000 + "x")) == 0.0  # quadratic: 800 s
