"""Step-based environments as sources of rollouts: turns, tokens, masks and rewards, and errors that say how to mend."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lachesis.pipeline.environment.load import load_environment
from lachesis.pipeline.environment.rollout import collect_group
from lachesis.pipeline.errors import EnvironmentCodeError
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.schemas.errors import ConfigError
from lachesis.testing import FakeInference, evaluate

GAME = f"{Path(__file__).parents[3] / 'examples' / 'step_game.py'}:CountDown"


def count(prompt: str, call: int) -> str:
    """The right next number: the last one said less one, or the one in the first observation."""
    said = [part.split("<end>")[0] for part in prompt.split("<assistant>")[1:-1]]
    return str(int(said[-1]) - 1) if said else prompt.split("from ")[1].split(".", maxsplit=1)[0]


def learned(session) -> str:
    return FakeInference.show([t for t, mask in zip(session.tokens, session.loss_mask, strict=True) if mask])


async def test_an_episode_is_a_sample_with_only_the_models_tokens_in_the_mask() -> None:
    env = load_environment("steps", {"place": GAME, "settings": {"largest": 3}, "episodes": 4, "seed": 7})
    task = env.task(2)
    assert task == env.task(2)
    start = int(task.messages[-1].content.removeprefix("Count down from ").rstrip("."))
    draft = await collect_group(env, task, FakeInference(count), 2, SamplingParams())
    for session in draft.sessions:
        assert learned(session) == "".join(f"{n}<end>" for n in range(start, -1, -1))
        assert [m.content for m in session.messages if m.role == "user"][1:] == ["go on"] * start
        assert session.loss_mask[-1]
    assert draft.rewards == [{"environment": 1.0}] * 2
    assert (await evaluate(env, FakeInference(count), items=[0, 1])).avg_at_k == 1.0


async def test_turn_limit_and_wrong_answers_end_an_episode() -> None:
    env = load_environment("steps", {"place": GAME, "max_turns": 1, "step_in_thread": True})
    draft = await collect_group(env, env.task(0), FakeInference(count), 1, SamplingParams())
    assert len(draft.sessions[0].replies) == 1
    assert draft.rewards == [{"environment": 0.0}]


class Bad:
    def __init__(self, what: str) -> None:
        self.what = what
        self.resets = 0

    def reset(self, seed=None):
        Bad.total = getattr(Bad, "total", 0) + 1
        return {"array": ([1], {}), "alone": "text", "unsteady": (str(Bad.total), {})}.get(self.what, ("a", {}))

    def step(self, action):
        return {"four": ("a", 1.0, True, {}), "nan": ("a", float("nan"), True, False, {})}[self.what]


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("array", "type list; only text"),
        ("alone", "must return (observation, info), not str"),
        ("unsteady", "two different observations"),
        ("four", "not a tuple of 4"),
        ("nan", "a finite number"),
    ],
)
async def test_errors_say_how_to_mend(what: str, text: str) -> None:
    env = load_environment("steps", {"place": f"{__file__}:Bad", "settings": {"what": what}})
    with pytest.raises(EnvironmentCodeError) as caught:
        await collect_group(env, env.task(0), FakeInference(lambda *_: "x"), 1, SamplingParams())
    assert text in str(caught.value)


@pytest.mark.parametrize("kind", ["gem", "gymnasium"])
async def test_registered_environments(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(kind) is None:
        with pytest.raises(ConfigError, match=r"need the package (gem-llm|gymnasium): pip install"):
            load_environment(kind, {"place": "Some-v0"})
    game = load_environment("steps", {"place": GAME})
    made = []

    def make(name, **settings):
        made.append(name)
        return game.load()(largest=settings["largest"])

    monkeypatch.setitem(sys.modules, kind, SimpleNamespace(make=make))
    env = load_environment(kind, {"place": "Count-v0", "settings": {"largest": 2}})
    assert (await evaluate(env, FakeInference(count), items=[0])).avg_at_k == 1.0
    assert set(made) == {"Count-v0"}


def test_a_missing_class_is_named() -> None:
    with pytest.raises(ConfigError, match="no such class or function"):
        load_environment("steps", {"place": "json:Nothing"})
