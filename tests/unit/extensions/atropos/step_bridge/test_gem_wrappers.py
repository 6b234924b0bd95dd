"""Step environments under gem's wrappers, with text as action, and in a loop as ROLL has it."""

import copy
import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from unit.extensions.atropos.step_bridge import gem_stand_in
from unit.extensions.atropos.step_bridge.test_step_env import GUESSING, said

from lachesis import AtroposStepEnv, SampledText, StepEnv
from lachesis.schemas.errors import DataError
from lachesis.testing import FakeInference

pytestmark = pytest.mark.outside

STUB = Path(__file__).parents[1] / "native" / "stub"
FAKE = FakeInference(lambda prompt, call: "")
MARKS = ("<user>", "<assistant>", "<end>")


@pytest.fixture
def gem() -> Iterator[Any]:
    before = sys.modules.get("gem.core")
    yield gem_stand_in.gem()
    if before is None:
        sys.modules.pop("gem.core", None)


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[AtroposStepEnv]:
    monkeypatch.setenv("PYTHONPATH", str(STUB))
    made = AtroposStepEnv(
        f"{STUB / 'words_env.py'}:Words",
        FAKE.tokenize,
        FAKE.detokenize,
        params={"python": sys.executable, "settings": {"how": "turns", "flag": str(tmp_path / "flag")}},
    )
    yield made
    made.close()


class ChatML:
    """The tokenizer of a caller, whose template is not the engine's."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"[{one['role']}] {one['content']}\n" for one in messages) + "[assistant] "


def actions() -> list[Any]:
    """Return the same three answers as plain text, as text with its sample, and as a sample."""
    return ["yes", SampledText(said("no")), said("yes")]


def test_a_step_environment_is_a_gem_env(gem: Any, env: AtroposStepEnv) -> None:
    assert isinstance(env, gem.Env)
    assert isinstance(StepEnv(GUESSING, FAKE.tokenize), gem.Env)
    env.reset(seed=2)
    assert isinstance(env.sample_random_action(), str)
    wrapped = gem.EpisodeTrackingWrapper(env)
    assert wrapped.unwrapped is env
    assert wrapped.max_steps is None


def test_gems_concat_with_action_has_the_texts_alone(gem: Any, env: AtroposStepEnv) -> None:
    wrapped = gem.EpisodeTrackingWrapper(gem.ObservationWrapper(env, include_action=True, include_chat_template=False))
    first, _ = wrapped.reset(seed=2)
    assert not any(mark in first for mark in MARKS)
    second, reward, terminated, truncated, _ = wrapped.step(actions()[0])
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert second == f"{first}yes\nand 0?\n"
    third = wrapped.step(actions()[1])[0]
    assert third == f"{second}no\nand 1?\n"
    last, reward, terminated, _, info = wrapped.step(actions()[2])
    assert last == f"{third}yes\n"
    assert (reward, terminated, info["step_counter"]) == (2.0, True, 3)


def test_gems_concat_chat_writes_the_callers_template_around_the_texts(gem: Any, env: AtroposStepEnv) -> None:
    wrapped = gem.ObservationWrapper(env, tokenizer=ChatML())
    first, _ = wrapped.reset(seed=2)
    assert first.startswith("[user] ")
    assert first.endswith("\n[assistant] ")
    second = wrapped.step(actions()[1])[0]
    assert second == f"{first}no\n[user] and 0?\n[assistant] "


def test_the_exact_tokens_travel_beside_a_text_and_a_text_alone_has_no_logprobs(env: AtroposStepEnv) -> None:
    _, info = env.reset(seed=2)
    begun = [len(info["prompt_ids"])]
    for action in actions():
        *_, info = env.step(action)
        begun.append(len(info["prompt_ids"] or ()))
    plain, beside, sample = (slice(at, at + length) for at, length in zip(begun, (4, 3, 4), strict=False))
    assert info["tokens"][plain] == said("yes").token_ids.tolist(), "the template's tokens of the text and its end"
    assert all(map(math.isnan, info["logprobs"][plain]))
    for place, text in ((beside, "no"), (sample, "yes")):
        assert info["tokens"][place] == said(text).token_ids.tolist()
        np.testing.assert_array_equal(np.float32(info["logprobs"][place]), said(text).logprobs)
    assert sum(info["loss_mask"]) == 11
    assert info["parsed_action"] == "yes"


@pytest.mark.parametrize("carries", [False, True])
def test_a_loop_as_roll_has_it(env: AtroposStepEnv, carries: bool) -> None:
    """Its environment manager renders messages by its own template, and steps with `action=` a decoded text."""
    observation, info = env.reset(seed=5)
    history: list[dict[str, str]] = []
    terminated = truncated = False
    rewards = []
    while not (terminated or truncated):
        history.append({"role": "user", "content": observation})
        assert not any(mark in ChatML().apply_chat_template(history) for mark in MARKS)
        sample = said("yes")
        response = SampledText(sample) if carries else sample.text
        history.append({"role": "assistant", "content": response})
        observation, reward, terminated, truncated, info = env.step(action=response)
        rewards.append(reward)
    assert rewards == [0.0, 0.0, 3.0]
    assert np.isfinite(info["logprobs"]).all() == carries


def test_ours_take_text_too() -> None:
    env = StepEnv(GUESSING, FAKE.tokenize)
    observation, info = env.reset(seed=5)
    assert env.sample_random_action() in observation.split()
    start = len(info["prompt_ids"])
    _, _, _, _, info = env.step("5")
    assert info["tokens"][start : start + 2] == said("5").token_ids.tolist()
    assert all(map(math.isnan, info["logprobs"][start : start + 2]))
    env.close()
    with pytest.raises(DataError, match="SampledText"):
        env.reset(seed=5) and env.step(7)  # type: ignore[arg-type]
    env.close()


def test_a_sampled_text_is_a_text_that_can_be_copied() -> None:
    text = SampledText(said("no"))
    assert text == "no"
    again = copy.deepcopy(text)
    assert again == "no"
    assert again.sample.token_ids.tolist() == text.sample.token_ids.tolist()


def test_the_first_item_is_that_of_the_seed(env: AtroposStepEnv) -> None:
    """gem's `make_vec` gives each environment a seed as an argument."""
    other = env.spawn(seed=3)
    try:
        assert other.reset()[1]["item"] == "item-3"
        assert other.reset()[1]["item"] == "item-4"
    finally:
        other.close()


def test_gems_own_wrappers_are_used_where_gem_is_installed() -> None:
    if importlib.util.find_spec("gem") is None:
        pytest.skip("gem-llm is not installed: its stand-in was used")
    assert gem_stand_in.gem().is_real
