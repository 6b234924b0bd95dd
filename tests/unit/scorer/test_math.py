"""Boxed answers and their comparison in processes that can be killed."""

import os
import resource
import signal
import time
from unittest.mock import Mock

import anyio
import anyio.to_process
import pytest

from lachesis.pipeline.scorer import worker_process
from lachesis.pipeline.scorer.answers.compare_math import equal
from lachesis.pipeline.scorer.answers.last_box import boxed
from lachesis.pipeline.scorer.config import RaterConfig
from lachesis.pipeline.scorer.loader import load_member
from lachesis.pipeline.scorer.rater import Sample
from lachesis.pipeline.scorer.raters import math as math_rater
from lachesis.pipeline.scorer.raters.math import MathRater
from lachesis.pipeline.scorer.runner import EnsembleRunner

pytestmark = pytest.mark.hostile


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{x}", "x"),
        (r"\boxed {7}", "7"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"<think>\boxed{1}</think> I do not know", None),
        (r"<think>\boxed{1}</think> \boxed{2}", "2"),
        (r"\boxed{1", None),
        (r"\boxed", None),
        (r"\boxed and {1}", None),
        (r"no box", None),
        (r"\boxed 7", "7"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{6} or \boxed{7}", "6, 7"),
        (r"$\boxed{6}$ and $\boxed{7}$.", "6, 7"),
        (r"$x=\boxed{2}$, $y=\boxed{3}$", "2, 3"),
        (r"\boxed{1} \text{ or } \boxed{2} \text{ or } \boxed{3}", "1, 2, 3"),
        (r"It is not $\boxed{7}$.", None),
        (r"It is \boxed{6}, not \boxed{7}", None),
        (r"It isn't 6 but \boxed{7}", "7"),
        (r"\boxed{7} and again \boxed{7}", "7"),
        (r"\boxed{7}, \boxed{7}", "7"),
        (r"\boxed{6}. So the answer is \boxed{7}", "7"),
        (r"\boxed{6} or rather \boxed{7}", "7"),
        (r"\boxed{\text{so }\fbox{7}}", "7"),
        (r"thought \boxed{1}</think> \boxed{2}", "2"),
        (r"<think>\boxed{1}", None),
        (r"\boxed{1} <think>\boxed{2}", None),
        (r"[THINK]\boxed{1}[/THINK]\boxed{2}", "2"),
        (r"<THINK>\boxed{1}</THINK>2", None),
        (r"\boxed{" + "1" * 512 + "}", "1" * 512),
        (r"\boxed{" + "1" * 513 + "}", None),
        (r"\boxed{" + "{" * 64 + "}" * 64 + "}", None),
        (r"\boxed{" + "{" * 63 + "}" * 63 + "}", "{" * 63 + "}" * 63),
    ],
)
def test_the_last_box_after_thinking_holds_the_answer(text: str, answer: str | None) -> None:
    assert boxed(text) == answer


@pytest.mark.parametrize(
    ("gold", "given", "same"),
    [
        ("0.5", r"\frac{1}{2}", True),
        ("x^2+1", "1+x^2", True),
        (r"\{1,2\}", r"\{2,1\}", True),
        ("7", "8", False),
        ("7", "3+4", False),
        ("7", "7.0", True),
        ("1,000", "1000", True),
        ("x+1", "x+2", False),
        ("7", "", False),
        ("", "7", None),
    ],
)
def test_equal_answers_are_equal_and_no_sum_passes_for_its_value(gold: str, given: str, same: bool | None) -> None:
    assert equal(gold, given) is same


def math_runner(timeout_s: float) -> EnsembleRunner:
    return EnsembleRunner([load_member(RaterConfig(rater="math", timeout_s=timeout_s, params={"workers": 1}))])


def sample(given: str, gold: str | None) -> Sample:
    return Sample(prompt="", completion=given, task={} if gold is None else {"answer": gold})


@pytest.mark.slow
@pytest.mark.outside
async def test_an_adversarial_answer_is_missing_and_the_next_one_is_rated() -> None:
    runner = math_runner(20.0)
    first = await runner.rate_group([sample(r"\boxed{\frac{2}{4}}", "0.5"), sample("none", "1"), sample("x", None)])
    assert [rating.value for rating in first["math"]] == [1.0, 0.0, None]
    hard = r"\boxed{9^{9^{9^{9^{9}}}}}"
    slow = math_runner(1.5)
    began = time.monotonic()
    with anyio.fail_after(30):
        (rating,) = (await slow.rate_group([sample(hard, "x^{9^{9^{9}}}")]))["math"]
        assert time.monotonic() - began < 10
        if rating.value is not None:
            assert rating.value == 0.0
        (after,) = (await runner.rate_group([sample(r"\boxed{2}", "2")]))["math"]
    assert after.value == 1.0


@pytest.mark.slow
@pytest.mark.outside
async def test_an_answer_that_takes_too_much_memory_or_depth_is_missing_and_says_so(monkeypatch) -> None:
    monkeypatch.setattr(math_rater, "equal", hungry)
    for given, why in (("2000+x", "the answer takes more than 256 MiB to rate"), ("x+1", "nested too deeply")):
        (rating,) = (await math_runner(30.0).rate_group([sample(rf"\boxed{{{given}}}", "x+y")]))["math"]
        assert (rating.value, rating.status) == (None, "error")
        assert why in rating.detail


def hungry(_: str, given: str) -> bool:
    """Take a MiB for each unit of a number, or recurse without end."""
    number = given.partition("+")[0]
    return len(bytearray(int(number) << 20)) < 0 if number.isdigit() else hungry("", given)


def test_the_limits_of_a_call_are_gone_afterwards(monkeypatch) -> None:
    kinds = (resource.RLIMIT_AS, resource.RLIMIT_CPU)
    before = [resource.getrlimit(kind) for kind in kinds]
    monkeypatch.setattr(worker_process, "_base_bytes", None)
    assert worker_process.call_within(256 << 20, bytearray, (8 << 20,))
    with pytest.raises(worker_process.AnswerTooLargeError, match="more than 256 MiB"):
        worker_process.call_within(256 << 20, bytearray, (4096 << 20,))
    assert [resource.getrlimit(kind) for kind in kinds] == before


def test_a_worker_whose_memory_is_half_full_ends_before_it_is_called(monkeypatch) -> None:
    monkeypatch.setattr(worker_process, "_base_bytes", 1)
    monkeypatch.setattr(worker_process.os, "_exit", ended := Mock(side_effect=SystemExit))
    with pytest.raises(SystemExit):
        worker_process.call_within(2, str, ("x",))
    ended.assert_called_once_with(0)


@pytest.mark.slow
@pytest.mark.outside
async def test_a_worker_that_ended_is_replaced_and_its_answer_is_rated() -> None:
    rater = MathRater(workers=1)
    assert await rater.rate(sample(r"\boxed{1+x}", "x+1")) == 1.0
    os.kill(await anyio.to_process.run_sync(os.getpid, limiter=rater._workers.limiter), signal.SIGKILL)
    rater._known.clear()
    assert await rater.rate(sample(r"\boxed{1+x}", "x+1")) == 1.0
