"""Offers any environment as `reset` and `step`, in the form of gem and Gymnasium.

Actions are an engine's samples, or text. It returns observations, and the training sequence with the engine's own token
ids and logprobs. An injected inference answers the rollout's generation request with the action; the rollout's
coroutine then waits at its next request, so nothing is ever replayed. Only this file guarantees that the rollout runs
only inside `reset` and `step`, on an event loop of its own in the caller's thread: no thread and no signal handler.
"""

import asyncio
import contextlib
import math
import random
import weakref
from collections.abc import Mapping
from typing import Any

from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.environment.group_environment import GroupEnvironment
from lachesis.pipeline.environment.load import load_environment
from lachesis.pipeline.environment.session import SampleEnded, Session, SharedFirstTurn
from lachesis.pipeline.extensions.atropos.step_bridge.injected import (
    EpisodeLoop,
    InjectedActions,
    Tokenize,
    episode_index,
    of_the_engine,
    refuse_running_loop,
)
from lachesis.pipeline.extensions.atropos.step_bridge.text import Action, ChatTemplate, random_action, register_with_gem
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["StepEnv"]


class StepEnv:
    """One episode at a time of `environment`: an instance, or the name that a configuration would give it.

    `params` are its parameters if it is a name. `tokenize` belongs to the engine that samples the actions: a function,
    async or not, of messages and `add_generation_prompt`.
    `max_steps`: actions of an episode at most; by default and at most the environment's `max_turns`. `seed`: the
    task of the first `reset` that is given none.

    An action is the engine's sample for `info["prompt_ids"]`, as a `GeneratedSample` or as its text with the sample
    beside it (`SampledText`); or plain text, whose tokens are made by the engine's chat template and have no logprobs
    (NaN).

    `reset` and `step` return an `info` with `messages` (the conversation), `prompt_ids` (what the engine shall
    continue, None at the end), and `tokens`, `loss_mask` and `logprobs` (the training sequence so far); that of `step`
    also `parsed_action`, the action's text. The reward is
    0.0 before the last step, and then `environment.score`, or NaN if that gives none.
    """

    def __init__(
        self,
        environment: str | Environment,
        tokenize: Tokenize,
        *,
        params: Mapping[str, Any] | None = None,
        max_steps: int | None = None,
        seed: int = 0,
    ) -> None:
        if max_steps is not None and max_steps < 1:
            raise ConfigError(f"max_steps is {max_steps}, and must be at least 1")
        self.environment = load_environment(environment, params) if isinstance(environment, str) else environment
        if isinstance(self.environment, GroupEnvironment):
            raise ConfigError(
                f"{type(self.environment).__name__} makes whole groups by its own code; AtroposStepEnv steps through "
                "one sample of it"
            )
        turns = self.environment.max_turns
        self.max_steps = turns if max_steps is None else min(max_steps, turns)
        self._tokenize = of_the_engine("tokenize", tokenize, "add_generation_prompt")
        self._template = ChatTemplate(self._tokenize)
        self._next_index = seed
        self._shown = 0
        self._observation = ""
        self._draw = random.Random(seed)
        self._loop: EpisodeLoop | None = None
        self._closing: weakref.finalize[..., Any] | None = None
        self._rollout: asyncio.Task[None] | None = None
        self._session: Session | None = None
        self._actions: InjectedActions | None = None
        register_with_gem(StepEnv)

    @property
    def unwrapped(self) -> "StepEnv":
        return self

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode: task `seed` modulo the number of tasks, `options["index"]`, or else the next one.

        Raises what the environment raises; RuntimeError in a thread whose event loop is running.
        """
        refuse_running_loop()
        register_with_gem(StepEnv)
        self._end_episode()
        count = len(self.environment)
        index = episode_index(seed, options, self._next_index, count)
        self._next_index = index + 1
        task = self.environment.task(index)
        self._actions = InjectedActions(self._tokenize)
        requests = self._actions.requests()
        sampling = SamplingParams()
        opening = SharedFirstTurn(requests, task.messages, [0], sampling)
        self._session = Session(
            task, 0, opening=opening, requests=requests, sampling=sampling, max_turns=self.max_steps, may_fork=False
        )
        self._shown = 0
        if self._loop is None:
            self._loop = EpisodeLoop()
            self._closing = weakref.finalize(self, self._loop.close)
        self._rollout = self._loop.start(self._play(self._session))
        if self._run_to_boundary():
            raise DataError(f"{type(self.environment).__name__}: the rollout ended before it requested an answer")
        return self._observe(self._session), self._info(self._session, self._actions)

    def step(self, action: Action) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer with what the engine sampled for `info["prompt_ids"]`, its stop token included, or with text.

        Return (observation, reward, terminated, truncated, info). `truncated`: the action was cut, or `max_steps` was
        reached. Raises RuntimeError without a `reset` in this process, and what the environment raises.
        """
        refuse_running_loop()
        session, actions = self._session, self._actions
        if session is None or actions is None or self._loop is None or self._loop.is_inherited:
            raise RuntimeError("call reset() first: no episode is under way in this process")
        sample = self._run(self._template.sample(action))
        actions.answer(sample)
        if not self._run_to_boundary():
            info = {**self._info(session, actions), "parsed_action": sample.text}
            return self._observe(session), 0.0, False, False, info
        try:
            score = self._run(self.environment.score(session.task, session))
        finally:
            self._end_episode()
        observation, info = self._observe(session), {**self._info(session, None), "parsed_action": sample.text}
        truncated = session.finish_reason == "length" or session.turns_left <= 0
        return observation, math.nan if score is None else score, not truncated, truncated, info

    def sample_random_action(self) -> str:
        """Return a word of the last observation, or a number. Any text is an action."""
        return random_action(self._observation, self._draw)

    def spawn(self, same_state: bool = False, **changes: Any) -> "StepEnv":
        """Return another one of the same environment; `changes` replace arguments of the constructor."""
        if same_state:
            raise NotImplementedError("a rollout under way cannot be copied: reset the new one to the same seed")
        arguments: dict[str, Any] = {
            "environment": self.environment,
            "tokenize": self._tokenize,
            "max_steps": self.max_steps,
        }
        return StepEnv(**arguments | changes)

    def close(self) -> None:
        """End the episode under way, if any, and what the environment started for it.

        Raises RuntimeError in a thread whose event loop is running.
        """
        refuse_running_loop()
        self._end_episode()
        self._loop = None
        if self._closing is not None:
            self._closing()

    def _end_episode(self) -> None:
        rollout = self._rollout
        self._rollout = self._session = self._actions = None
        if self._loop is None:
            return
        if self._loop.is_inherited:  # this process makes its own
            self._loop = None
        elif rollout is not None:
            rollout.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                self._loop.run(rollout)

    async def _play(self, session: Session) -> None:
        with contextlib.suppress(SampleEnded):
            await self.environment.rollout(session.task, session)
        if session.failure is not None:
            raise session.failure

    def _run_to_boundary(self) -> bool:
        """Let the rollout run to its next generation request; return whether it ended instead."""
        rollout, actions = self._rollout, self._actions
        assert rollout is not None  # noqa: S101 - both are set while an episode is under way
        assert actions is not None  # noqa: S101
        asked = actions.asked

        async def wait() -> None:
            request = asyncio.ensure_future(asked.wait())
            await asyncio.wait({rollout, request}, return_when=asyncio.FIRST_COMPLETED)
            request.cancel()

        self._run(wait())
        if not rollout.done():
            return False
        try:
            rollout.result()
        except BaseException:
            self._end_episode()
            raise
        return True

    def _run(self, work: Any) -> Any:
        assert self._loop is not None  # noqa: S101
        return self._loop.run(work)

    def _observe(self, session: Session) -> str:
        new = session.messages[self._shown :]
        self._shown = len(session.messages)
        self._observation = "\n".join(message.content for message in new if message.role != "assistant")
        return self._observation

    @staticmethod
    def _info(session: Session, actions: InjectedActions | None) -> dict[str, Any]:
        return {
            "item": session.task.item,
            "messages": list(session.messages),
            "prompt_ids": None if actions is None else list(actions.prompt_ids),
            "tokens": list(session.tokens),
            "loss_mask": list(session.loss_mask),
            "logprobs": list(session.logprobs),
        }
