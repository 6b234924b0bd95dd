"""Whatever is one real number is a reward, a rating and a score; whatever is not is refused, and says what it is."""

import re
import sys
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from lachesis import Environment, Session, Task
from lachesis.pipeline.common.real_number import finite_number
from lachesis.pipeline.environment import verify
from lachesis.pipeline.environment.fake_inference import FakeInference
from lachesis.pipeline.environment.rollout import collect_group
from lachesis.pipeline.errors import EnvironmentCodeError
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.scorer.rater import to_rating

pytestmark = pytest.mark.outside

NUMBERS: list[Any] = [
    1, True, 1.0, np.float32(1), np.float16(1), np.int64(1), np.bool_(True), np.array(1.0), np.array([[1]]),
    torch.tensor(1.0), torch.tensor([1]), torch.tensor(1.0, requires_grad=True), Decimal("1.0"),
    torch.tensor(1.0, dtype=torch.bfloat16), Fraction(2, 2),
]  # fmt: skip
WRONG: list[Any] = [
    "1", b"1", 1j, np.complex64(1), torch.tensor(1j), torch.tensor(1 + 0j), np.array("1"), np.array([1.0, 2.0]),
    torch.zeros(2), torch.zeros(0), [1.0], (1,), {1}, object(), float("nan"), float("inf"), np.float32("nan"),
    torch.tensor(float("nan")), Decimal("NaN"), Decimal("sNaN"), 10**400, np.datetime64(1, "s"), lambda: 1,
]  # fmt: skip


class Paying(Environment):
    """Pays what it is given."""

    value: Any = None

    def __len__(self) -> int:
        return 3

    def task(self, index: int) -> Task:
        return Task(item=str(index), prompt="q", task={"answer": "1"})

    def reward(self, task: Task, session: Session) -> Any:
        return self.value


async def rewards(value: Any) -> list[dict[str, float | None]]:
    env = Paying()
    env.value = value
    inference = FakeInference(lambda prompt, call: "x")
    return (await collect_group(env, env.task(0), inference, 2, SamplingParams(max_tokens=9))).rewards


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
async def test_one_real_number_is_a_reward_a_rating_and_a_score(value: Any) -> None:
    assert type(finite_number(value)) is float
    assert await rewards(value) == [{"environment": 1.0}] * 2
    assert await rewards({"a": value, "b": None}) == [{"a": 1.0, "b": None}] * 2
    assert to_rating(value, (0.0, 1.0)).value == 1.0
    env = Paying()
    env.value = value
    assert await env.score(env.task(0), None) == 1.0  # type: ignore[arg-type]


@pytest.mark.parametrize("value", WRONG, ids=lambda value: re.sub(" at 0x.*", "", repr(value))[:30])
async def test_what_is_no_real_number_is_refused_by_what_it_is(value: Any) -> None:
    with pytest.raises(EnvironmentCodeError, match=r"Paying: reward environment is .*a reward is a finite number"):
        await rewards(value)
    assert to_rating(value, (0.0, 1.0)).status in {"error", "nonfinite"}


async def test_code_that_ends_the_process_ends_its_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Paying, "reward", lambda *_: sys.exit(3))
    with pytest.raises(EnvironmentCodeError, match=r"its code ends the process: SystemExit\(3\)"):
        await rewards(1.0)


def test_the_same_failure_has_the_same_words() -> None:
    assert (
        to_rating(object(), None).detail
        == to_rating(object(), None).detail
        == ("returned <object object> of type object, which is not a real number")
    )


async def test_several_rewards_have_texts_as_names() -> None:
    with pytest.raises(EnvironmentCodeError, match="1 names a reward"):
        await rewards({1: 1.0})


async def test_verify_says_of_a_reward_what_the_run_says(monkeypatch: pytest.MonkeyPatch) -> None:
    async def here(name: str, params: Any) -> list[str]:
        return verify.task_digests(name, params)

    monkeypatch.setattr(verify, "_digests_elsewhere", here)  # another process would import this file, and torch
    found = {}
    for value in ("good", np.float64(1)):
        monkeypatch.setattr(Paying, "value", value)
        checks = await verify.verify_environment(f"{__name__}:Paying")
        found[type(value).__name__] = next(one for one in checks if one.check == "scores")
    assert found["float64"].verdict == "ok"
    assert found["str"].verdict == "fail"
    assert "'good' of type str, which is not a real number" in found["str"].text
