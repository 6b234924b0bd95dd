"""Our environments as reset and step: ids equal to the engine's, in any thread and process, without replay."""

import asyncio
import importlib.util
import multiprocessing
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
import numpy as np
import pytest
import torch

from lachesis import Environment, Session, StepEnv, Task
from lachesis.pipeline.inference.answered_sample import GeneratedSample
from lachesis.pipeline.inference.config import EngineConfig
from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.inference.protocol import SamplingParams, WeightVersionSpan
from lachesis.pipeline.model.policy import build_tiny_policy
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.testing import FakeInference

pytestmark = pytest.mark.outside

EXAMPLES = Path(__file__).parents[4] / "examples"
GUESSING = f"{EXAMPLES / 'guessing.py'}:Guessing"
FAKE = FakeInference(lambda prompt, call: "")


def said(text: str, finish_reason: str = "stop") -> GeneratedSample:
    ids = [5 + ord(character) for character in text] + ([0] if finish_reason == "stop" else [])
    return GeneratedSample(
        token_ids=np.array(ids, np.int32),
        logprobs=np.linspace(-2, -1, len(ids)).astype(np.float32),
        text=text,
        finish_reason=finish_reason,
        weight_versions=[WeightVersionSpan(version="0-fake-0000", start=0, end=len(ids))],
    )


def test_the_loop_of_the_page_plays_an_episode() -> None:
    spec = importlib.util.spec_from_file_location("step_bridge", EXAMPLES / "step_bridge.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    env = StepEnv("spell_backward", FAKE.tokenize, params={"size": 4, "own_reward": True})
    word = env.environment.task(1).task["answer"]

    def engine(prompt_ids: list[int]) -> tuple[Any, Any, str]:
        given = said(word)
        return given.token_ids, given.logprobs, given.text

    assert module.play(env, engine, 1) == 1.0


def play(environment: str, params: dict[str, Any]) -> int:
    """Play one episode with a real engine, compare ids and logprobs of every action, and return the actions."""
    torch.set_num_threads(1)
    policy = build_tiny_policy(0, width=32, layers=1, max_length=512)
    eos = policy.tokenizer.eos_token_id
    stops = list(range(eos, len(policy.tokenizer), 3))  # a random model would seldom stop by itself

    async def tokenize(messages: Any, *, add_generation_prompt: bool = True) -> list[int]:
        ids = policy.tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
        return list(ids["input_ids"] if hasattr(ids, "keys") else ids)

    env = StepEnv(environment, tokenize, params=params, max_steps=4)
    with Engine(policy.model, eos_token_id=eos, weight_version="0-main-00", config=EngineConfig()) as engine:
        _, info = env.reset(seed=3)
        ended, actions = False, []
        while not ended:
            before = info
            sampling = SamplingParams(max_tokens=24, seed=len(actions), stop_token_ids=stops)
            action = sample(engine, policy, info["prompt_ids"], sampling)
            actions.append(action)
            _, _, terminated, truncated, info = env.step(action)
            ended = terminated or truncated
            own = slice(len(before["prompt_ids"]), len(before["prompt_ids"]) + len(action.token_ids))
            assert info["tokens"][: own.start] == before["prompt_ids"]
            assert info["tokens"][own] == action.token_ids.tolist()
            assert info["logprobs"][own] == action.logprobs.tolist()
            assert all(info["loss_mask"][own])
    assert sum(info["loss_mask"]) == sum(len(action.token_ids) for action in actions)
    return len(actions)


def sample(engine: Engine, policy: Any, prompt_ids: list[int], sampling: SamplingParams) -> GeneratedSample:
    (result,) = engine.submit(prompt_ids, sampling).result(60).samples
    ids = np.array(result.token_ids, np.int32)
    return GeneratedSample(
        token_ids=ids,
        logprobs=np.array(result.logprobs, np.float32),
        text=policy.tokenizer.decode(result.token_ids),
        finish_reason=result.finish_reason,
        weight_versions=[WeightVersionSpan(version="0-main-00", start=0, end=len(ids))],
    )


def play_on(env: StepEnv, results: Any) -> None:
    try:
        env.step(said("5"))
    except RuntimeError as error:
        refused = str(error)[:10]
    env.reset(seed=5)
    results.put((refused, env.step(said("5"))[2]))


def work(results: Any) -> None:
    try:
        results.put(play(GUESSING, {}))
    except BaseException as error:
        results.put(repr(error))
        raise


@pytest.mark.slow
def test_ids_are_the_engines_in_the_main_thread_and_for_a_builtin() -> None:
    assert play(GUESSING, {}) > 1
    assert play("reasoning_gym", {"dataset": "leg_counting", "size": 9, "own_reward": True}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["thread", "spawn", "fork"])
def test_ids_are_the_engines_in_workers(kind: str) -> None:
    if kind == "thread":
        results: Any = queue.Queue()
        worker: Any = threading.Thread(target=work, args=(results,))
    else:
        context: Any = multiprocessing.get_context(kind)
        results = context.Queue()
        worker = context.Process(target=work, args=(results,))
    worker.start()
    actions = results.get(timeout=200)
    worker.join()
    assert isinstance(actions, int), actions
    assert actions > 1


def test_an_environment_that_raters_judge_is_named() -> None:
    env = StepEnv("spell_backward", FAKE.tokenize)
    env.reset()
    with pytest.raises(ConfigError, match="0 rewards"):
        env.step(said("a"))


@pytest.mark.slow
def test_it_imports_without_the_packages_it_does_not_need() -> None:
    names = ["datasets", "tqdm", "gem", "gymnasium", "torch", "transformers"]
    code = f"import sys; sys.modules.update(dict.fromkeys({names})); from lachesis import StepEnv; print(StepEnv)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_forked_worker_resets_what_its_parent_began() -> None:
    env = StepEnv(GUESSING, FAKE.tokenize)
    env.reset(seed=5)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    worker = context.Process(target=play_on, args=(env, results))
    worker.start()
    assert results.get(timeout=60) == ("call reset", True)
    worker.join()
    assert env.step(said("5"))[2]


def test_limits_and_misuse() -> None:
    env = StepEnv(GUESSING, FAKE.tokenize, max_steps=1)
    with pytest.raises(RuntimeError, match="call reset"):
        env.step(said("1"))
    env.reset(options={"index": 1})
    with pytest.raises(DataError, match="GeneratedSample"):
        env.step(1)  # type: ignore[arg-type]
    assert env.step(said("2"))[2:4] == (False, True)
    again = env.spawn(max_steps=3)
    again.reset(seed=1)
    assert again.step(said("2", "length"))[2:4] == (False, True)
    again.close()


def test_an_episode_stops_at_each_request_without_threads_or_signal_handlers() -> None:
    env = StepEnv(GUESSING, FAKE.tokenize)
    before = signal.getsignal(signal.SIGINT)
    threads = threading.active_count()
    observation, _ = env.reset(seed=42)
    assert observation == "Guess my number, 0 to 99."
    steps = [env.step(said(text)) for text in ("50", "x", "42")]
    assert [step[:4] for step in steps[:2]] == [("lower", 0.0, False, False), ("A number, please.", 0.0, False, False)]
    assert steps[2][0] == ""
    assert steps[2][1] == pytest.approx(0.7)
    assert steps[2][2:4] == (True, False)
    last = steps[2][4]
    learned = [t for t, mask in zip(last["tokens"], last["loss_mask"], strict=True) if mask]
    assert FakeInference.show(learned) == "50<end>x<end>42<end>"
    assert last["prompt_ids"] is None
    assert (signal.getsignal(signal.SIGINT), threading.active_count()) == (before, threads)


async def test_in_a_running_event_loop_it_says_to_use_a_thread() -> None:
    env = StepEnv(GUESSING, FAKE.tokenize)
    with pytest.raises(RuntimeError, match="call it in another thread"):
        env.reset()
    await anyio.to_thread.run_sync(env.reset)
    with pytest.raises(RuntimeError, match="call it in another thread"):
        env.step(said("1"))
    _, _, terminated, _, _ = await anyio.to_thread.run_sync(env.step, said("0"))
    assert terminated


class Remembering(Environment):
    """Its score says whether a task that an earlier episode began still runs."""

    def __init__(self) -> None:
        self.begun: asyncio.Task[Any] | None = None

    def __len__(self) -> int:
        return 1

    def task(self, index: int) -> Task:
        return Task(item="one", prompt="?", task={})

    async def score(self, task: Task, session: Session) -> float:
        held = self.begun is not None and not self.begun.done()
        self.begun = self.begun or asyncio.ensure_future(asyncio.Event().wait())
        return float(held and self.begun.get_loop() is asyncio.get_running_loop())


def test_what_an_environment_started_lives_through_its_episodes_until_close() -> None:
    env = StepEnv(Remembering(), FAKE.tokenize)
    rewards = []
    for _ in range(3):
        env.reset()
        rewards.append(env.step(said("a"))[1])
    env.close()
    env.close()
    assert rewards == [0.0, 1.0, 1.0]
    assert env.environment.begun.cancelled()  # type: ignore[attr-defined]
    env.environment.begun = None  # type: ignore[attr-defined]
    env.reset()
    assert env.step(said("a"))[1] == 0.0


def test_an_engine_may_be_of_plain_functions_and_give_lists() -> None:
    def tokenize(messages: Any, *, add_generation_prompt: bool = True) -> list[int]:
        return [1, 2, 3] if add_generation_prompt else [1, 2, 3, *messages[-1]["content"].encode(), 0]

    env = StepEnv(GUESSING, tokenize)
    _, info = env.reset(seed=42)
    assert info["prompt_ids"] == [1, 2, 3]
    given = said("42")
    listed = msgspec.structs.replace(given, token_ids=given.token_ids.tolist(), logprobs=given.logprobs.tolist())
    info = env.step(listed)[4]
    assert info["tokens"] == [1, 2, 3, *given.token_ids]
    env.reset(seed=42)
    assert env.step("42")[1:3] == (0.9, True)


@pytest.mark.parametrize("change", [{"logprobs": [-0.1]}, {"token_ids": None}, {"token_ids": ["a", "b", "c"]}])
def test_a_sample_without_its_rows_is_refused(change: dict[str, Any]) -> None:
    env = StepEnv(GUESSING, FAKE.tokenize)
    env.reset()
    with pytest.raises(DataError, match="the sample of an action has"):
        env.step(msgspec.structs.replace(said("42"), **change))


@pytest.mark.parametrize("tokenize", [lambda messages: [1], lambda: [1], None, "model"])
def test_a_tokenizer_of_another_form_is_refused_at_once(tokenize: Any) -> None:
    with pytest.raises(ConfigError, match=r"tokenize\(messages, \*, add_generation_prompt=True\)"):
        StepEnv(GUESSING, tokenize)


@pytest.mark.parametrize("given", [{"seed": "x"}, {"seed": 1.5}, {"options": {"index": "x"}}])
def test_a_seed_is_a_whole_number(given: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="give a whole number"):
        StepEnv(GUESSING, FAKE.tokenize).reset(**given)
