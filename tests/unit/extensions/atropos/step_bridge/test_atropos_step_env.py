"""Environments of Atropos as reset and step; atroposlib is a stand-in, the class' process is real."""

import math
import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from unit.extensions.atropos.step_bridge.test_step_env import said

from lachesis import AtroposStepEnv
from lachesis.pipeline.errors import EnvironmentCodeError, InfrastructureError
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.testing import FakeInference

pytestmark = pytest.mark.outside

STUB = Path(__file__).parents[1] / "native" / "stub"
FAKE = FakeInference(lambda prompt, call: "")
Make = Callable[..., AtroposStepEnv]


def made_env(flag: Path, how: str = "turns", max_steps: int | None = None, **params: Any) -> AtroposStepEnv:
    settings = {"how": how, "flag": str(flag)}
    return AtroposStepEnv(
        f"{STUB / 'words_env.py'}:Words",
        FAKE.tokenize,
        FAKE.detokenize,
        params={"python": sys.executable, "settings": settings, **params},
        max_steps=max_steps,
    )


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Make]:
    monkeypatch.setenv("PYTHONPATH", str(STUB))
    made: list[AtroposStepEnv] = []

    def make_env(how: str = "turns", **arguments: Any) -> AtroposStepEnv:
        made.append(made_env(tmp_path / "flag", how, **arguments))
        return made[-1]

    yield make_env
    for env in made:
        env.close()


def child_of(env: AtroposStepEnv) -> int:
    assert env.environment._process is not None
    pid = env.environment._process.pid
    assert pid is not None
    return pid


def play(env: AtroposStepEnv, answers: list[str]) -> float:
    """Play one episode of turns, and compare ids and logprobs of every action."""
    observation, info = env.reset(seed=2)
    first, sampled, reward = observation, [], 0.0
    for number, text in enumerate(answers):
        prompt_ids, action = info["prompt_ids"], said(text)
        sampled.append(action)
        observation, reward, terminated, truncated, info = env.step(action)
        start, end = len(prompt_ids), len(prompt_ids) + len(action.token_ids)
        assert info["tokens"][:start] == prompt_ids
        assert info["tokens"][start:end] == action.token_ids.tolist()
        np.testing.assert_array_equal(np.float32(info["logprobs"][start:end]), action.logprobs)
        assert all(info["loss_mask"][start:end])
        assert terminated == (number == len(answers) - 1)
        assert not truncated
        if not terminated:
            assert reward == 0.0
            assert f"and {number}?" in observation
            assert text not in observation, "what was said is no observation"
    assert "<user>" not in first, "the template is no part of an observation"
    assert sum(info["loss_mask"]) == sum(len(action.token_ids) for action in sampled)
    assert [message.content for message in info["messages"] if message.role == "assistant"] == answers
    return reward


def test_an_episode_has_the_engines_ids_and_stops_at_each_request_without_replay(make: Make) -> None:
    env = make()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)}
    assert play(env, ["yes", "no", "yes"]) == 2.0
    pid = child_of(env)
    assert play(env, ["no", "no", "yes"]) == 1.0
    assert child_of(env) == pid, "one process has all episodes"
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    env.close()
    assert not psutil.pid_exists(pid)


def work(flag: Path, results: Any) -> None:
    try:
        env = made_env(flag)
        results.put(play(env, ["yes", "no", "yes"]))
        env.close()
    except BaseException as error:
        results.put(repr(error))
        raise


@pytest.mark.slow
@pytest.mark.usefixtures("make")
@pytest.mark.parametrize("kind", ["thread", "spawn", "fork"])
def test_ids_are_the_engines_in_workers(kind: str, tmp_path: Path) -> None:
    if kind == "thread":
        results: Any = queue.Queue()
        worker: Any = threading.Thread(target=work, args=(tmp_path / "flag", results))
    else:
        context: Any = multiprocessing.get_context(kind)
        results = context.Queue()
        worker = context.Process(target=work, args=(tmp_path / "flag", results))
    worker.start()
    assert results.get(timeout=100) == 2.0
    worker.join()


def go_on(env: AtroposStepEnv, results: Any) -> None:
    try:
        env.step(said("yes"))
    except RuntimeError as error:
        refused = str(error)[:10]
    results.put((refused, play(env, ["yes", "yes", "yes"])))
    env.close()


def test_a_forked_worker_resets_what_its_parent_began_and_leaves_it_whole(make: Make) -> None:
    env = make()
    env.reset(seed=2)
    env.step(said("yes"))
    pid = child_of(env)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    worker = context.Process(target=go_on, args=(env, results))
    worker.start()
    assert results.get(timeout=100) == ("call reset", 3.0)
    worker.join()
    env.step(said("no"))
    assert env.step(said("no"))[1] == 1.0
    assert child_of(env) == pid


def test_limits_and_misuse(make: Make) -> None:
    env = make(max_steps=2)
    with pytest.raises(RuntimeError, match="call reset"):
        env.step(said("yes"))
    env.reset(seed=2)
    with pytest.raises(DataError, match="not aborted"):
        env.step(said("yes", "abort"))
    assert env.step(said("yes"))[2:4] == (False, False)
    _, reward, terminated, truncated, info = env.step(said("yes"))
    assert math.isnan(reward)
    assert (terminated, truncated, info["prompt_ids"]) == (False, True, None)
    with pytest.raises(ConfigError, match="at least 1"):
        make(max_steps=0)
    with pytest.raises(NotImplementedError, match="same seed"):
        env.spawn(same_state=True)
    other = env.spawn()
    try:
        assert other.reset(seed=2)[0] == env.reset(seed=2)[0]
    finally:
        other.close()


def test_what_the_class_asks_for_and_how_an_episode_ends(make: Make) -> None:
    env = make("")
    _, info = env.reset(seed=0)
    assert info["sampling"]["max_tokens"] == 50
    assert env.step(said("cut", "length"))[1:4] == (0.0, False, True)
    env = make("two groups")
    env.reset(seed=0)
    assert env.step(said("a"))[1] == 0.0
    _, info = env.reset(seed=1)
    assert info["item"] == "item-1", "the second group of the first call is dropped"


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [("bug", EnvironmentCodeError, "no such word"), ("setup fails", ConfigError, "no data set here"),
     ("none", DataError, "no group of item-0"), ("killed once", InfrastructureError, "killed by signal 9")],
)  # fmt: skip
def test_what_fails_is_raised_by_reset(make: Make, how: str, error: type[Exception], words: str) -> None:
    env = make(how)
    with pytest.raises(error, match=words):
        env.reset(seed=0)
    if how == "killed once":
        env.reset(seed=0)
        assert env.step(said("a"))[2]


def test_a_long_pause_between_steps_is_no_hang(make: Make) -> None:
    """The loop stands still between two steps: an answer that came meanwhile counts."""
    env = make(hang_s=0.2)
    _, info = env.reset(seed=2)
    pid = child_of(env)
    for number in range(3):
        deadline = threading.Event()
        deadline.wait(0.5)
        info = env.step(said("yes"))[4]
        assert number == 2 or child_of(env) == pid
    assert os.path.exists(f"/proc/{pid}")  # noqa: PTH110
    assert info["prompt_ids"] is None
