"""Branches of a conversation: what they share is trained once, their place decides all, misuse is named."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from unit.environment.one_task import OneTask

from lachesis import Environment, SampleEnded, Session, Task
from lachesis.pipeline.environment.config import CollectConfig
from lachesis.pipeline.environment.inference_requests import InferenceRequests
from lachesis.pipeline.environment.load import load_environment
from lachesis.pipeline.environment.rollout import build_group, collect_group
from lachesis.pipeline.errors import EnvironmentCodeError
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.rollout import RolloutGroup
from lachesis.testing import FakeInference


class Tree(OneTask):
    """A turn, two branches of which the first is forked again after a turn, and the conversation itself goes on."""

    max_turns = 8
    at_once = False

    async def rollout(self, task: Task, session: Session) -> None:
        await session.generate()
        session.state["seen"] = ["trunk"]
        first, second = session.fork(), session.fork()
        session.add("on")
        await self.run(lambda: self.branch(first, "a", forks=2), lambda: self.branch(second, "b"), session.generate)
        assert session.state == {"seen": ["trunk"]}
        session.reward_turn(0.5)

    async def branch(self, branch: Session, name: str, forks: int = 0) -> None:
        branch.add(name)
        await branch.generate()
        branch.state["seen"].append(name)
        assert branch.state["seen"] == ["trunk", *(list(name) if len(name) == 1 else [name[0], name])]
        branch.reward_turn(float(len(name)) if name == "b" else 0.25)
        further = [branch.fork() for _ in range(forks)]
        await self.run(*(lambda one=one, n=n: self.branch(one, f"{name}{n}") for n, one in enumerate(further)))

    async def run(self, *branches: Callable[..., Any]) -> None:
        async with anyio.create_task_group() as tasks:
            for one in reversed(branches) if self.at_once else branches:
                if self.at_once:
                    tasks.start_soon(one)
                else:
                    await one()


def say(prompt: str, call: int) -> str:
    """Answer with the user's messages, so that an answer says where in the tree it is."""
    return "/".join(part.partition("<end>")[0] for part in prompt.split("<user>")[1:])


async def group_of(env: Environment, reply: Callable[[str, int], str] = say, n: int = 2) -> RolloutGroup:
    made = await collect_group(env, env.task(0), FakeInference(reply), n, SamplingParams(seed=3), group="0" * 32)
    named: dict[str, Any] = {"run": "r", "env": "e", "producer": "p", "tokenizer_hash": "0" * 64}
    return decode(RolloutGroup, encode(build_group(made, epoch=1, counter=1, **named)))


def turns_of(group: RolloutGroup, sample: int) -> list[tuple[str, float, str | None]]:
    """Return the turns of a sample, by place in the group: text, reward, and the text of the turn that it continues."""
    sequences, turns = group.sequences, group.sequences.turns()
    assert sequences.turn_rewards is not None
    assert sequences.turn_parents is not None
    texts = {}
    cuts = sequences.cuts()
    for i, (sequence, of) in enumerate(zip(sequences, sequences.sample_index or [], strict=True)):
        own = turns[cuts[i] : cuts[i + 1]]
        for turn in set(own[own >= 0].tolist()) if of == sample else ():
            assert turn not in texts, "a turn is trained in one sequence alone"
            texts[turn] = FakeInference.show(sequence.tokens[own == turn].tolist()).removesuffix("<end>")
    parents = sequences.turn_parents[sample]
    rewards = sequences.turn_rewards[sample]
    return [(texts[k], rewards[k], texts.get(parents[k])) for k in range(len(rewards))]


TURNS = [
    ("?", 0.0, None),
    ("?/a", 0.25, "?"),
    ("?/a/a0", 0.25, "?/a"),
    ("?/a/a1", 0.25, "?/a"),
    ("?/b", 1.0, "?"),
    ("?/on", 0.5, "?"),
]


@pytest.mark.parametrize("at_once", [False, True])
async def test_branches_share_a_prefix_that_is_trained_once(at_once: bool) -> None:
    env = Tree()
    env.at_once = at_once
    group = await group_of(env)
    sequences = list(group.sequences)
    assert group.sequences.sample_index == [0] * 4 + [1] * 4
    assert [FakeInference.show(one.tokens.tolist()).count("<assistant>") for one in sequences[:4]] == [3, 3, 2, 2]
    assert sorted(turns_of(group, 0)) == sorted(turns_of(group, 1)) == TURNS
    assert all((np.asarray(one.logprobs)[~one.loss_mask] == 0).all() for one in sequences)


async def test_the_sequences_lie_by_place_whenever_they_were_generated() -> None:
    one_by_one, at_once = Tree(), Tree()
    at_once.at_once = True
    first, second = await group_of(one_by_one), await group_of(at_once)
    assert [one.tokens.tolist() for one in first.sequences] == [one.tokens.tolist() for one in second.sequences]
    assert [one.loss_mask.tolist() for one in first.sequences] == [one.loss_mask.tolist() for one in second.sequences]


async def test_the_example_credits_each_answer_to_a_plan() -> None:
    env = load_environment(f"{Path(__file__).parents[2]}/examples/branches.py:Branches")
    group = await group_of(env, lambda prompt, call: "99900" if call % 2 and "Then do it" in prompt else "plan")
    assert group.sequences.turn_parents == [[-1, 0, 0, 0]] * 2
    rewards = group.sequences.turn_rewards or []
    assert group.sequences.rewards == {"environment": [sum(turns) / 3 for turns in rewards]}
    assert {value for turns in rewards for value in turns[1:]} == {0.0, 1.0}
    assert group.sequences.branches == [3, 3]
    assert [len(talk) for talk in group.messages] == [2, 2]


async def test_each_branch_is_sampled_with_a_seed_of_its_own() -> None:
    inference = FakeInference(say)
    env = Tree()
    await collect_group(env, env.task(0), inference, 2, SamplingParams(seed=3))
    seeds = [sampling.seed for _, _, sampling in inference.requests]
    assert len(seeds) == len(set(seeds)) == 1 + 2 * 5


async def test_a_fork_without_an_answer_is_no_branch() -> None:
    class Idle(Tree):
        async def rollout(self, task: Task, session: Session) -> None:
            await session.generate()
            session.fork()
            session.reward_turn(1.0)

    group = await group_of(Idle())
    assert (group.sequences.sample_index, group.sequences.turn_parents) == (None, None)


class Bad(Tree):
    def __init__(self, wrong: Callable[[Session], Any]) -> None:
        self.wrong = wrong

    async def rollout(self, task: Task, session: Session) -> None:
        await session.generate()
        found = self.wrong(session)
        if found is not None:
            await found


async def fork_while_generating(session: Session) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session.generate)
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        session.fork()


async def generate_twice(session: Session) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session.generate)
        tasks.start_soon(session.generate)


async def too_many_turns(session: Session) -> None:
    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(beyond_the_limit, session.fork())


async def beyond_the_limit(session: Session) -> None:
    while True:
        await session.generate()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda session: [session.fork() for _ in range(1025)] and None, "has 1024 forks, .* at most 1024"),
        (lambda session: session.state.update(lock=threading.Lock()) or (session.fork() and None),
         "session.state cannot be copied: TypeError: .*copy.deepcopy"),
        (fork_while_generating, "the session generates; await its session.generate"),
        (generate_twice, "the session generates already; fork it for each branch"),
        (lambda session: beyond_the_limit(session.fork()), r"Bad.rollout: fork 0 can have .* max_turns \(8\)"),
        (too_many_turns, r"fork . can have no further turn: .* catch lachesis.SampleEnded in each"),
    ],
)  # fmt: skip
async def test_misuse_is_named(wrong: Callable[[Session], Any], named: str) -> None:
    with pytest.raises(EnvironmentCodeError, match=named):
        await group_of(Bad(wrong))


async def test_a_session_whose_turns_other_code_makes_is_not_forked() -> None:
    made = Session.of_group(Tree().task(0), 0, InferenceRequests(FakeInference(say), CollectConfig()), SamplingParams())
    with pytest.raises(EnvironmentCodeError, match=r"in a group, an agent or a StepEnv, other code makes the turns"):
        made.fork()


async def test_a_branch_that_ends_by_itself_leaves_the_others() -> None:
    async def caught(session: Session) -> None:
        async def branch(one: Session) -> None:
            try:
                await beyond_the_limit(one)
            except SampleEnded:
                one.reward_turn(1.0)

        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(branch, session.fork())

    group = await group_of(Bad(caught))
    assert [rewards.count(1.0) for rewards in group.sequences.turn_rewards or []] == [2, 2]
    assert [len(rewards) for rewards in group.sequences.turn_rewards or []] == [1 + 2 * 7] * 2
