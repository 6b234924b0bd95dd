"""Offers an Atropos environment as `reset` and `step`, in the form of gem and Gymnasium.

An episode is one sample of a group. Actions are an engine's samples, or text. Observations have no chat template of the
engine, and the training sequence has the engine's own token ids and logprobs. The class runs in a process of its own,
and its generation request is answered with the action; its `collect_trajectories` then waits at the next request, so
nothing is replayed. Only this file guarantees that the process outlives the episodes but not `close`, and that a forked
worker never touches its parent's process.
"""

import asyncio
import contextlib
import math
import os
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from lachesis.pipeline.environment.group_environment import GeneratedGroup
from lachesis.pipeline.environment.session import Session
from lachesis.pipeline.errors import GroupDeclinedError
from lachesis.pipeline.extensions.atropos.native.source import AtroposSource
from lachesis.pipeline.extensions.atropos.step_bridge.injected import (
    INHERITED,
    NO_TIMEOUT_S,
    Detokenize,
    InjectedActions,
    Tokenize,
    episode_index,
    of_the_engine,
    refuse_running_loop,
)
from lachesis.pipeline.extensions.atropos.step_bridge.text import Action, ChatTemplate, random_action, register_with_gem
from lachesis.pipeline.inference.answered_sample import GeneratedSample
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.tasks.task import Task
from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["AtroposStepEnv"]


class _Turn(NamedTuple):
    prompt_ids: list[int]
    action: GeneratedSample


class AtroposStepEnv:
    """One episode at a time of the `BaseEnv` class at `place`: `module:CLASS` or `path/to/file.py:CLASS`.

    `tokenize` and `detokenize` belong to the engine that samples the actions. `params` are those of a configuration's
    environment of kind "atropos": `python`, `settings`, `items`, `seed`. `max_steps`: maximum number of actions of an
    episode; by default as many as the class requests. `sampling`: parameters for those that the class does not set.
    `seed`: the item of the first `reset` that is given none.

    An action is the engine's sample for `info["prompt_ids"]`, as a `GeneratedSample` or as its text with the sample
    beside it (`SampledText`); or plain text, whose tokens are made by the engine's chat template and have no logprobs
    (NaN; the class is given 1.0, Atropos' mark of tokens that were not sampled).

    `reset` and `step` return an `info` with `prompt_ids` (what the engine shall continue, None at the end), `sampling`
    (the parameters of the class: temperature, max_tokens, stop), and `tokens`, `loss_mask` and `logprobs` (the sequence
    so far; at the end what the class made of it), and at the end `messages`; that of `step` also has `parsed_action`,
    the action's text. The reward is 0.0 before the last step, and then the class' score, or NaN where it gave none.
    """

    def __init__(
        self,
        place: str,
        tokenize: Tokenize,
        detokenize: Detokenize,
        *,
        params: Mapping[str, Any] | None = None,
        max_steps: int | None = None,
        sampling: SamplingParams | None = None,
        seed: int = 0,
    ) -> None:
        if max_steps is not None and max_steps < 1:
            raise ConfigError(f"max_steps is {max_steps}, and must be at least 1")
        self.max_steps = max_steps
        self._arguments: dict[str, Any] = {"timeout_s": NO_TIMEOUT_S, **(params or {}), "place": place}
        self.environment = AtroposSource(**self._arguments)
        self._tokenize = of_the_engine("tokenize", tokenize, "add_generation_prompt")
        self._detokenize = of_the_engine("detokenize", detokenize)
        self._sampling = sampling or SamplingParams()
        self._template = ChatTemplate(self._tokenize, self._detokenize)
        self._next_index = seed
        self._observation = ""
        self._draw = random.Random(seed)
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process: asyncio.Task[None] | None = None
        self._rollout: asyncio.Task[GeneratedGroup] | None = None
        self._actions: InjectedActions | None = None
        self._task: Task | None = None
        self._turns: list[_Turn] = []
        register_with_gem(AtroposStepEnv)

    @property
    def unwrapped(self) -> "AtroposStepEnv":
        return self

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode: item `seed` modulo the number of items, `options["index"]`, or else the next one.

        The first one starts the class' process. Raises what the environment raises; RuntimeError in a thread whose
        event loop is running.
        """
        refuse_running_loop()
        register_with_gem(AtroposStepEnv)
        self._end_episode()
        if self._loop is None:
            self._pid = os.getpid()
            self._loop = asyncio.new_event_loop()
            self._process = self._loop.create_task(self._hold_process())
        index = episode_index(seed, options, self._next_index, len(self.environment))
        self._next_index = index + 1
        self._task = self.environment.task(index)
        self._turns = []
        self._actions = InjectedActions(self._tokenize)
        made = self.environment.generate_group(self._task, self._actions.requests(), 1, self._sampling)
        self._rollout = self._loop.create_task(made)
        if self._run_to_boundary(self._actions):
            group = self._result()
            raise DataError(
                f"{self.environment.place} made "
                f"{'no group' if group is None else 'a group'} of {self._task.item} without asking for an answer"
            )
        return self._new_text(self._actions.prompt_ids), self._info(self._actions)

    def step(self, action: Action) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer with what the engine sampled for `info["prompt_ids"]`, its stop token included, or with text.

        Return (observation, reward, terminated, truncated, info). `truncated`: `max_steps` was reached, or the last
        action was cut. Raises RuntimeError without a `reset` in this process, and what the environment raises.
        """
        refuse_running_loop()
        actions, loop = self._actions, self._loop
        if actions is None or loop is None or self._pid != os.getpid():
            raise RuntimeError("call reset() first: no episode is under way in this process")
        sample = loop.run_until_complete(self._template.sample(action))
        observation, reward, terminated, truncated, info = self._step(actions, sample)
        return observation, reward, terminated, truncated, {**info, "parsed_action": sample.text}

    def _step(self, actions: InjectedActions, sample: GeneratedSample) -> tuple[str, float, bool, bool, dict[str, Any]]:
        actions.answer(sample)
        self._turns.append(_Turn(actions.prompt_ids, sample))
        if not self._run_to_boundary(actions):
            observation, info = self._new_text(actions.prompt_ids), self._info(actions)
            if self.max_steps is not None and len(self._turns) >= self.max_steps:
                self._end_episode()
                return observation, math.nan, False, True, {**info, "prompt_ids": None}
            return observation, 0.0, False, False, info
        group = self._result()
        if group is None:
            return "", math.nan, True, False, {**self._info(actions), "prompt_ids": None}
        session = group.sessions[0]
        truncated = session.finish_reason == "length"
        return "", float(session.state["score"]), not truncated, truncated, self._final_info(group.task, session)

    def sample_random_action(self) -> str:
        """Return a word of the last observation, or a number. Any text is an action."""
        return random_action(self._observation, self._draw)

    def spawn(self, same_state: bool = False, **changes: Any) -> "AtroposStepEnv":
        """Return another one of the same class, with a process of its own; `changes` replace arguments."""
        if same_state:
            raise NotImplementedError("a rollout under way cannot be copied: reset the new one to the same seed")
        params = {key: value for key, value in self._arguments.items() if key != "place"}
        arguments: dict[str, Any] = {
            "place": self.environment.place,
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
            "params": params,
            "max_steps": self.max_steps,
            "sampling": self._sampling,
        }
        return AtroposStepEnv(**arguments | changes)

    def close(self) -> None:
        """End the episode under way and the class' process.

        Raises RuntimeError in a thread whose event loop is running.
        """
        refuse_running_loop()
        self._end_episode()
        loop, process = self._loop, self._process
        self._loop = self._process = None
        if loop is None or process is None:
            return
        process.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            loop.run_until_complete(process)
        loop.close()

    def _end_episode(self) -> None:
        rollout = self._rollout
        self._rollout = self._actions = None
        if self._loop is None:
            return
        if self._pid != os.getpid():  # the parent's: this process starts its own
            INHERITED.append((self._loop, self._process, rollout, self.environment))
            self._loop = self._process = None
            self.environment = AtroposSource(**self._arguments)
            return
        if rollout is not None:
            rollout.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                self._loop.run_until_complete(rollout)
        self.environment.discard_spare_groups()

    async def _hold_process(self) -> None:
        async with self.environment.running():
            await asyncio.Event().wait()

    def _run_to_boundary(self, actions: InjectedActions) -> bool:
        """Let the rollout run to its next generation request; return whether it ended instead."""
        loop, process, rollout = self._loop, self._process, self._rollout
        assert loop is not None  # noqa: S101 - all are set while an episode is under way
        assert process is not None  # noqa: S101
        assert rollout is not None  # noqa: S101

        async def wait() -> None:
            request = asyncio.ensure_future(actions.asked.wait())
            await asyncio.wait({rollout, process, request}, return_when=asyncio.FIRST_COMPLETED)
            request.cancel()

        loop.run_until_complete(wait())
        if process.done():
            self.close()
            process.result()
        return rollout.done()

    def _result(self) -> GeneratedGroup | None:
        """Return the group of the rollout that has ended; None: the class dropped it."""
        assert self._rollout is not None  # noqa: S101 - it has ended
        try:
            return self._rollout.result()
        except GroupDeclinedError:
            return None
        finally:
            self._end_episode()

    def _sequence(self, ids: list[int]) -> tuple[list[int], list[bool], list[float]]:
        """Return the tokens `ids` with the mask and the logprobs of the actions that stand in them."""
        mask, logprobs = [False] * len(ids), [0.0] * len(ids)
        for turn in self._turns:
            start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.action.token_ids)
            if ids[:end] == [*turn.prompt_ids, *turn.action.token_ids.tolist()]:
                mask[start:end] = [True] * (end - start)
                logprobs[start:end] = turn.action.logprobs.tolist()
        return ids, mask, logprobs

    def _new_text(self, prompt_ids: list[int]) -> str:
        """Return the texts of a prompt's messages, without those that the turn before had; at first of all."""
        assert self._loop is not None  # noqa: S101
        self._observation = self._loop.run_until_complete(self._observed(prompt_ids))
        return self._observation

    async def _observed(self, prompt_ids: list[int]) -> str:
        if self._turns:
            before = self._turns[-1]
            said = before.action.token_ids.tolist()
            seen = [*before.prompt_ids, *said]
            if prompt_ids[: len(seen)] == seen:
                return await self._template.next_observation(await self._detokenize(prompt_ids[len(seen) :]), said)
        return await self._template.first_observation(await self._detokenize(prompt_ids))

    def _info(self, actions: InjectedActions) -> dict[str, Any]:
        assert self._task is not None  # noqa: S101
        tokens, mask, logprobs = self._sequence(list(actions.prompt_ids))
        return {
            "item": self._task.item,
            "messages": [],
            "prompt_ids": list(actions.prompt_ids),
            "sampling": msgspec.structs.asdict(actions.sampling),
            "tokens": tokens,
            "loss_mask": mask,
            "logprobs": logprobs,
        }

    @staticmethod
    def _final_info(task: Task, session: Session) -> dict[str, Any]:
        return {
            "item": task.item,
            "messages": list(session.messages),
            "prompt_ids": None,
            "tokens": list(session.tokens),
            "loss_mask": list(session.loss_mask),
            "logprobs": list(session.logprobs),
        }
