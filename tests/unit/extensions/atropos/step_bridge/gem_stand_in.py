"""A stand-in for gem-llm 0.1.0, whose import takes reasoning-gym and more: what its wrappers ask of an environment.

The names, the order of calls and the texts are gem's; `wrappers()` returns the real ones where gem can be imported.
"""

import abc
import importlib
import sys
import types
from typing import Any


class Env(abc.ABC):
    @abc.abstractmethod
    def step(self, action): ...

    @abc.abstractmethod
    def reset(self, seed=None): ...

    def sample_random_action(self):
        raise NotImplementedError

    @property
    def unwrapped(self):
        return self

    def spawn(self, same_state=False, **kwargs):
        raise NotImplementedError


class EnvWrapper(Env):
    """Takes every public attribute of the environment that it lacks."""

    def __init__(self, env):
        super().__init__()
        self.env = env
        for name in dir(env):
            if not name.startswith("_") and not hasattr(self, name):
                setattr(self, name, getattr(env, name))

    @property
    def unwrapped(self):
        return self.env.unwrapped


def line(text):
    return text + "\n" if text and not text.endswith("\n") else text


class ObservationWrapper(EnvWrapper):
    """`concat_with_action`, or `concat_chat` with a tokenizer."""

    def __init__(self, env, include_action=True, include_chat_template=True, tokenizer=None):
        super().__init__(env)
        self.include_chat_template, self.tokenizer = include_chat_template, tokenizer
        self.observations, self.actions = [], []

    def reset(self, seed=None):
        observation, info = self.env.reset(seed=seed)
        self.observations, self.actions = [observation], []
        return self.observation(info), info

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.actions.append(info.get("parsed_action", action))
        self.observations.append(observation)
        return self.observation(info), reward, terminated, truncated, info

    def observation(self, info):
        pairs = [part for pair in zip(self.observations, self.actions, strict=False) for part in pair]
        parts = [*pairs, self.observations[-1]]
        if not self.include_chat_template:
            return info.get("prefix", "") + "".join(map(line, parts)) + info.get("suffix", "")
        roles = ["assistant" if at % 2 else "user" for at in range(len(parts))]
        messages = [{"role": role, "content": part} for role, part in zip(roles, parts, strict=True)]
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


class EpisodeTrackingWrapper(EnvWrapper):
    def __init__(self, env):
        super().__init__(env)
        self.step_counter, self.cumulative_rewards = 0, 0.0

    def reset(self, seed=None):
        observation, info = self.env.reset(seed)
        self.step_counter, self.cumulative_rewards = 0, 0.0
        return observation, {**info, "step_counter": 0}

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.step_counter += 1
        self.cumulative_rewards += reward
        info["step_counter"], info["cumulative_rewards"] = self.step_counter, self.cumulative_rewards
        return observation, reward, terminated, truncated, info


def gem() -> Any:
    """Return the real gem, or a module of these; both as `gem.core`, where programs have imported it."""
    try:
        core = importlib.import_module("gem.core")
        observation = importlib.import_module("gem.wrappers.observation_wrapper").ObservationWrapper
        tracking = importlib.import_module("gem.wrappers.episode_tracking_wrapper").EpisodeTrackingWrapper
        return types.SimpleNamespace(
            Env=core.Env, ObservationWrapper=observation, EpisodeTrackingWrapper=tracking, is_real=True
        )
    except ImportError:
        core = types.ModuleType("gem.core")
        core.Env = Env  # type: ignore[attr-defined]
        sys.modules["gem.core"] = core
        return types.SimpleNamespace(
            Env=Env,
            ObservationWrapper=ObservationWrapper,
            EpisodeTrackingWrapper=EpisodeTrackingWrapper,
            is_real=False,
        )
