"""Environments of Atropos in a process of their own; atroposlib is the stand-in in `stub`, its process is real."""

import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from lachesis.pipeline.environment.load import load_environment
from lachesis.pipeline.environment.rollout import GroupDraft, build_group, collect_group
from lachesis.pipeline.environment.verify import verify_environment
from lachesis.pipeline.errors import EnvironmentCodeError, GroupDeclinedError, InfrastructureError
from lachesis.pipeline.evaluator.evaluate import evaluate
from lachesis.pipeline.extensions.atropos.native.source import AtroposSource
from lachesis.pipeline.extensions.atropos.step_bridge.step_env import StepEnv
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.schemas.errors import ConfigError
from lachesis.testing import FakeInference

pytestmark = pytest.mark.outside

STUB = Path(__file__).parent / "stub"
SAMPLING = SamplingParams(max_tokens=64)
Make = Callable[..., AtroposSource]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    monkeypatch.setenv("PYTHONPATH", str(STUB))

    def made(how: str = "", *, settings: dict[str, Any] | None = None, **params: Any) -> AtroposSource:
        place = f"{STUB / 'words_env.py'}:Words"
        own = {"how": how, "flag": str(tmp_path / "flag"), **(settings or {})}
        env = load_environment("atropos", {"place": place, "python": sys.executable, "settings": own, **params})
        assert isinstance(env, AtroposSource)
        return env

    return made


def server() -> FakeInference:
    return FakeInference(lambda prompt, call: f"answer {call}", version="3-run-abcd")


async def group(env: AtroposSource, index: int = 0, inference: FakeInference | None = None, n: int = 3) -> GroupDraft:
    return await collect_group(env, env.task(index), inference or server(), n, SAMPLING)


async def test_tokens_logprobs_and_versions_are_those_of_the_engine(make: Make) -> None:
    inference = server()
    draft = await group(make(), 2, inference)
    ((prompt, n, asked),) = inference.requests
    assert (n, asked.max_tokens) == (3, 50)
    expected = await server().generate(prompt, 3)
    for session, sampled in zip(draft.sessions, expected, strict=True):
        assert session.tokens == [*prompt, *sampled.token_ids]
        assert session.loss_mask == [False] * len(prompt) + [True] * len(sampled.token_ids)
        np.testing.assert_array_equal(np.float32(session.logprobs[len(prompt) :]), sampled.logprobs)
        assert session.versions == [(0, "3-run-abcd")]
        assert session.finish_reason == "stop"
        assert [message.role for message in session.messages] == ["user", "assistant"]
    assert [session.text for session in draft.sessions] == ["answer 0", "answer 1", "answer 2"]
    assert draft.rewards == [{"environment": 0.0}, {"environment": 1.0}, {"environment": 2.0}]
    made = build_group(draft, run="r", env="e", producer="p", epoch=0, counter=0, tokenizer_hash="t")
    assert made.item == "item-2"
    assert made.policy_versions == ["3-run-abcd"]
    assert made.metadata["atropos"]["assumed"] == []


async def test_an_item_is_the_same_in_every_process_and_one_process_makes_many_groups(make: Make) -> None:
    first, second = make(seed=4), make(seed=4)
    async with first.running():
        drafts = [await group(first, index) for index in (3, 0, 3)]
        assert first._process is not None
        assert first._process.lives == 1
    other = await group(second, 3)
    assert drafts[0].sessions[0].tokens[:40] == drafts[2].sessions[0].tokens[:40] == other.sessions[0].tokens[:40]
    assert drafts[0].sessions[0].tokens[:40] != drafts[1].sessions[0].tokens[:40]


async def test_a_killed_process_costs_the_group_under_way_and_is_replaced(make: Make) -> None:
    env = make("killed once")
    async with env.running():
        with pytest.raises(InfrastructureError, match=r"killed by signal 9.*\n.*a line for the log"):
            await group(env, 1)
        draft = await group(env, 1)
        assert env._process is not None
        assert env._process.lives == 2
    assert len(draft.sessions) == 3


async def test_a_hung_process_is_named_with_its_stacks_and_replaced(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    env = make("hangs once", hang_s=0.5)
    with caplog.at_level(logging.INFO, "lachesis"):
        async with env.running():
            with pytest.raises(InfrastructureError, match=r"did not answer for 0\.5 s"):
                await group(env)
            assert len((await group(env)).sessions) == 3
    assert "did not answer for 0.5 s; where its threads are" in caplog.text
    assert "in collect_trajectories" in caplog.text
    assert "a line for the log" in caplog.text


async def test_a_process_ends_with_what_held_it(make: Make) -> None:
    env = make()
    async with env.running():
        await group(env)
        assert env._process is not None
        pid = env._process.pid
        assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


async def test_a_group_that_takes_too_long_is_given_up_and_the_process_stays(make: Make) -> None:
    env = make("waits", timeout_s=1.5)
    async with env.running():
        for _ in range(2):
            with pytest.raises(InfrastructureError, match=r"item-0: no group within 1\.5 s"):
                await group(env)
        assert env._process is not None
        assert env._process.lives == 1


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("bug", "item 0: KeyError: 'no such word'"),
        ("tokenized again", r"tokens\[0\]\[\d+\] is trained on .* did not sample"),
        ("unknown argument", "cannot be sampled with beam_width"),
    ],
)
async def test_faults_of_the_class_are_named(make: Make, how: str, reason: str) -> None:
    with pytest.raises(EnvironmentCodeError, match=reason):
        await group(make(how))


async def test_tokens_of_another_temperature_are_not_trained_on(make: Make) -> None:
    with pytest.raises(EnvironmentCodeError, match=r"sampled at temperature 0\.7, and the run trains at 1"):
        await group(make(settings={"temperature": 0.7}))


async def test_an_answer_that_the_class_cut_counts_as_cut(make: Make) -> None:
    draft = await group(make("cut"))
    assert [session.finish_reason for session in draft.sessions] == ["length"] * 3


@pytest.mark.parametrize(
    ("how", "params", "reason"),
    [
        ("setup fails", {}, "RuntimeError: no data set here"),
        ("named", {"items": 3}, "has 2 curriculum_items: set params.items to 2"),
        ("", {"settings": {"grop_size": 3}}, "WordsConfig has no grop_size"),
        ("", {"settings": {"reward_normalization": "z"}}, "settings.reward_normalization and those beside it"),
    ],
)
async def test_what_cannot_be_set_up_says_why(make: Make, how: str, params: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        await group(make(how, **params))


async def test_a_class_that_draws_at_random_is_found_out(make: Make) -> None:
    env = make("unseeded")
    await group(env)
    with pytest.raises(ConfigError, match="item 0 is another one in this process"):
        await group(env)
    fresh = make("unseeded", fresh_items=True)
    names = [(await group(fresh)).task.item for _ in range(2)]
    assert len(fresh) == 1
    assert len(set(names)) == 2


async def test_a_tokenizer_that_is_not_the_servers_is_found_out(make: Make) -> None:
    class Other(FakeInference):
        async def tokenize(self, messages: Any, *, add_generation_prompt: bool = True) -> list[int]:
            return [7]

    with pytest.raises(ConfigError, match="set params.settings.tokenizer_name to the run's model".replace(".", r"\.")):
        await group(make(), 0, Other(lambda *_: "x"))


async def test_items_with_names_are_chosen_by_them(make: Make) -> None:
    env = make("named", items=2)
    async with env.running():
        names = [(await group(env, index)).task.item for index in (1, 0)]
    assert names == ["two", "one"]


async def test_no_group_is_no_fault_and_no_reward(make: Make) -> None:
    with pytest.raises(GroupDeclinedError, match="made no group of item-0"):
        await group(make("none"))


async def test_what_is_left_over_comes_before_anything_new(make: Make) -> None:
    env = make("two groups")
    inference = server()
    async with env.running():
        drafts = [await group(env, index, inference) for index in (0, 5, 5)]
    assert [draft.task.item for draft in drafts] == ["item-0", "item-0", "item-5"]
    assert [draft.rewards[0]["environment"] for draft in drafts] == [0.0, 10.0, 0.0]
    assert len(inference.requests) == 2

    env = make("backlog")
    async with env.running():
        with pytest.raises(GroupDeclinedError):
            await group(env, 0)
        assert (await group(env, 5)).task.item == "item-0"


async def test_overrides_leave_samples_out_of_training(make: Make) -> None:
    draft = await group(make("overrides"))
    made = build_group(draft, run="r", env="e", producer="p", epoch=0, counter=0, tokenizer_hash="t")
    assert made.sequences.excluded_samples == [1]


async def test_rewards_are_normalized_as_base_env_does(make: Make) -> None:
    env = make(settings={"reward_normalization": "minmax", "reward_clip": 0.75, "reward_normalization_warmup": 4})
    async with env.running():
        first, second = await group(env), await group(env)
    assert [one["environment"] for one in first.rewards] == [0.0, 0.75, 0.75]  # warming up: only clipped
    assert [one["environment"] for one in second.rewards] == pytest.approx([0.0, 0.5, 0.75])
    assert second.metadata["atropos"]["raw_scores"] == [0.0, 1.0, 2.0]
    assert await env.score(second.task, second.sessions[2]) == 2.0


async def test_the_inference_failing_is_never_the_classs_answer(make: Make) -> None:
    def fails(prompt: str, call: int) -> str:
        raise InfrastructureError("the server is away")

    env = make()
    async with env.running():
        with pytest.raises(InfrastructureError, match="the server is away"):
            await collect_group(env, env.task(0), FakeInference(fails), 2, SAMPLING, config=quick_config())
        assert len((await group(env)).sessions) == 3


def quick_config() -> Any:
    from lachesis.pipeline.environment.config import CollectConfig

    return CollectConfig(attempts=1)


async def test_it_is_evaluated_as_any_other(make: Make) -> None:
    with anyio.fail_after(60):
        result = await evaluate(make(), server(), k=2, items=[0, 1], threshold=1.0, max_tokens=64)
    assert result.avg_at_k == 0.5
    assert result.greedy == 0.0


async def test_env_verify_says_whether_it_can_be_set_up(make: Make) -> None:
    params = {"place": f"{STUB / 'words_env.py'}:Words", "python": sys.executable}
    first, *others = await verify_environment("atropos", params)
    assert (first.verdict, first.text) == ("ok", "AtroposSource, 1000 tasks; it is set up")
    assert {one.verdict for one in others} == {"skipped"}
    failed, *_ = await verify_environment("atropos", {**params, "settings": {"how": "setup fails"}})
    assert failed.verdict == "fail"
    assert "no data set here" in failed.text


def test_its_steps_are_those_of_another_class(make: Make) -> None:
    with pytest.raises(ConfigError, match="AtroposStepEnv steps through one sample"):
        StepEnv(make(), server().tokenize)
