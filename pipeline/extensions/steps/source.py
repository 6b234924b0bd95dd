"""Uses step-based text environments (of gem, Gymnasium and others) as sources of rollouts.

From a callable that makes such an environment, it makes an `Environment` in which task `i` is the episode of seed `seed
+ i`. Each sample plays an environment of its own. The reward of a sample is the sum of its steps' rewards. Only this
file guarantees that all samples of a task see the same first observation, and that an observation is text.
"""

from collections.abc import Callable
from typing import Any

import anyio.to_thread

from lachesis.pipeline.common.real_number import finite_number
from lachesis.pipeline.common.secret_texts import error_text
from lachesis.pipeline.common.user_code import load_module
from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.environment.session import Session
from lachesis.pipeline.errors import EnvironmentCodeError
from lachesis.pipeline.tasks.task import Task
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.rollout import Message

__all__ = ["GemSource", "GymnasiumSource", "StepSource"]


class StepSource(Environment):
    """Episodes of the environment that `place` makes: `module:NAME` or `path/to/file.py:NAME`, a class or a function.

    `settings` are its keyword arguments. `episodes`: the number of tasks. `max_turns`: steps of an episode at most.
    `success_threshold`: the sum of rewards from which on an episode is a success. `system`: a system message.
    `reset` runs on the event loop and must be quick. So must `step`, unless `step_in_thread` is set; do not set it for
    an environment that draws from Python's global random numbers, as gem's games do.
    Raises ConfigError if there is no such callable.
    """

    def __init__(
        self,
        place: str,
        *,
        settings: dict[str, Any] | None = None,
        episodes: int = 1000,
        seed: int = 0,
        max_turns: int = 8,
        success_threshold: float = 1.0,
        system: str | None = None,
        step_in_thread: bool = False,
    ) -> None:
        if episodes < 1 or max_turns < 1:
            raise ConfigError(f"{place}: episodes and max_turns must be at least 1")
        self.place = place
        self.max_turns = max_turns
        self.success_threshold = success_threshold
        self._settings = dict(settings or {})
        self._episodes = episodes
        self._seed = seed
        self._system = system
        self._step_in_thread = step_in_thread
        self._make = self.load()

    def load(self) -> Callable[..., Any]:
        """Return the callable that makes an environment."""
        module, _, name = self.place.rpartition(":")
        found = getattr(load_module(module, "step environment"), name, None) if module else None
        if not callable(found):
            raise ConfigError(f"step environment {self.place!r}: no such class or function; write module:NAME")
        return found  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return self._episodes

    def task(self, index: int) -> Task:
        seed = self._seed + index
        env = self._make(**self._settings)
        try:
            observation = self._reset(env, seed)
        finally:
            _close(env)
        prompt = [Message(role="user", content=observation)]
        if self._system is not None:
            prompt.insert(0, Message(role="system", content=self._system))
        return Task(item=f"seed-{seed}", prompt=prompt, task={"seed": seed})

    async def rollout(self, task: Task, session: Session) -> None:
        """Play one episode: each reply is an action, each observation the next message."""
        env = self._make(**self._settings)
        try:
            if self._reset(env, task.task["seed"]) != task.messages[-1].content:
                raise EnvironmentCodeError(
                    f"{self.place}: reset(seed={task.task['seed']}) gave two different observations, so the samples of "
                    "a group would have different tasks; draw all random numbers of reset from its seed"
                )
            session.state["return"] = 0.0
            while True:
                reply = await session.generate()
                observation, reward, ended = await self._step(env, reply.text)
                session.state["return"] += reward
                if ended or reply.finish_reason != "stop" or session.turns_left <= 0:
                    return
                session.add(self._text(observation, "step"))
        finally:
            _close(env)

    def reward(self, task: Task, session: Session) -> float:
        """Return the sum of the rewards of all steps."""
        return float(session.state["return"])

    def _reset(self, env: Any, seed: int) -> str:
        answer = env.reset(seed=seed)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise EnvironmentCodeError(f"{self.place}: reset must return (observation, info), not {_kind(answer)}")
        return self._text(answer[0], "reset")

    async def _step(self, env: Any, action: str) -> tuple[Any, float, bool]:
        async def in_thread() -> Any:
            return await anyio.to_thread.run_sync(env.step, action, abandon_on_cancel=True)

        answer = await self._timed(in_thread()) if self._step_in_thread else env.step(action)
        if not isinstance(answer, tuple) or len(answer) != 5:
            raise EnvironmentCodeError(
                f"{self.place}: step must return (observation, reward, terminated, truncated, info), not "
                f"{_kind(answer)}"
            )
        observation, reward, terminated, truncated, _ = answer
        try:
            number = finite_number(reward)
        except ValueError as error:
            raise EnvironmentCodeError(
                f"{self.place}: step gave the reward {error}; a reward is a finite number"
            ) from error
        return observation, number, bool(terminated or truncated)

    def _text(self, observation: Any, method: str) -> str:
        if not isinstance(observation, str):
            raise EnvironmentCodeError(
                f"{self.place}: {method} gave an observation of type {type(observation).__name__}; only text can be "
                "put to a model: wrap the environment in one that describes the observation as a str"
            )
        return observation


class GemSource(StepSource):
    """Episodes of an environment that gem knows by the id `place`, `game:GuessTheNumber-v0-easy` say."""

    def load(self) -> Callable[..., Any]:
        """Return the callable that makes an environment. Raises ConfigError if gem is missing or lacks the id."""
        return _registered("gem", "gem-llm", self.place, {})


class GymnasiumSource(StepSource):
    """Episodes of an environment that is registered with Gymnasium, by its id (`module:Name-v0`, say) as `place`.

    Actions are text: its action space has to be `gymnasium.spaces.Text`, or the environment has to parse text.
    """

    def load(self) -> Callable[..., Any]:
        """Return the callable that makes an environment.

        Raises ConfigError if Gymnasium is missing or lacks the id.
        """
        return _registered("gymnasium", "gymnasium", self.place, {"disable_env_checker": True})


def _registered(module: str, package: str, name: str, fixed: dict[str, Any]) -> Callable[..., Any]:
    try:
        library = load_module(module, "step environment")
    except ConfigError as error:
        raise ConfigError(f"environments of kind {module} need the package {package}: pip install {package}") from error

    def make(**settings: Any) -> Any:
        try:
            return library.make(name, **fixed, **settings)
        except Exception as error:
            raise EnvironmentCodeError(f"{module}.make({name!r}): {error_text(error)}") from error

    return make


def _close(env: Any) -> None:
    close = getattr(env, "close", None)  # gem's have none
    if close is not None:
        close()


def _kind(answer: Any) -> str:
    return f"a tuple of {len(answer)}" if isinstance(answer, tuple) else type(answer).__name__
