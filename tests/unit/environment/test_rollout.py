"""Groups: masks token by token, versions, rewards, and what each kind of failure does."""

import contextlib
import itertools
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from lachesis import Environment, Message, Reply, Session, Task, ToolError, tool
from lachesis.pipeline.environment import rollout
from lachesis.pipeline.environment.config import CollectConfig
from lachesis.pipeline.environment.fake_inference import FakeInference
from lachesis.pipeline.environment.inference_requests import Inference, InferenceRequests
from lachesis.pipeline.environment.load import load_environment
from lachesis.pipeline.environment.rollout import build_group, collect_group
from lachesis.pipeline.errors import EnvironmentCodeError, InfrastructureError, PromptTooLongError, ServerAwayError
from lachesis.pipeline.inference.answered_sample import GeneratedSample
from lachesis.pipeline.inference.protocol import SamplingParams, StructuredOutputs, WeightVersionSpan
from lachesis.pipeline.runtime.retries import RetryWait
from lachesis.pipeline.scorer.scorer import samples_of
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.errors import ConfigError, DataError, SchemaError
from lachesis.schemas.planning_header import Plan
from lachesis.schemas.rollout import RolloutGroup

EXAMPLES = Path(__file__).parents[2] / "examples"
SAMPLING = SamplingParams(max_tokens=200, temperature=0.7)
QUICK = CollectConfig(attempts=3, backoff_s=0.001, request_timeout_s=5)


class Ask(Environment):
    """One question; subclasses vary the rest."""

    def __len__(self) -> int:
        return 1

    def task(self, index: int) -> Task:
        return Task(item="q", prompt="q", task={"answer": "yes"}, skill="s", difficulty=2.0)


async def group_of(
    env: Environment,
    inference: Inference,
    n: int = 2,
    sampling: SamplingParams = SAMPLING,
    config: CollectConfig = QUICK,
) -> RolloutGroup:
    draft = await collect_group(env, env.task(0), inference, n, sampling, config=config)
    return build_group(draft, run="r", env="e", producer="p", epoch=1, counter=2, tokenizer_hash="t")


def learned(group: RolloutGroup, index: int) -> list[str]:
    """The sequence cut where the mask changes: prompt, generated, template, generated, ..."""
    sequence = list(group.sequences)[index]
    edges = [0, *(np.flatnonzero(np.diff(sequence.loss_mask.astype(int))) + 1), len(sequence.tokens)]
    return [FakeInference.show(sequence.tokens[a:b].tolist()) for a, b in itertools.pairwise(edges)]


async def test_single_turn_group_holds_every_field() -> None:
    env = load_environment(f"{EXAMPLES}/sums.py:Sums", {"largest": 9})
    inference = FakeInference(lambda prompt, call: ["5", "6", " 5 "][call], version="7-main-ab12")
    draft = await collect_group(env, env.task(23), inference, 3, SAMPLING)
    group = build_group(
        draft, run="r", env="sums", producer="p-0", epoch=9, counter=4, tokenizer_hash="t", lease="l", metadata={"a": 1}
    )
    assert len(inference.requests) == 1, "the prompt is read once"
    assert group.sequences.rewards == {"environment": [1.0, 0.0, 1.0]}
    assert group.sequences.turn_rewards is None
    assert group.policy_versions == ["7-main-ab12"]
    assert [list(talk)[-1].content for talk in group.messages] == ["5", "6", " 5 "]
    assert group.generation["temperature"] == 0.7
    assert (group.item, group.difficulty, group.task, group.metadata) == ("2+3", 2.0, {"answer": "5"}, {"a": 1})
    assert learned(group, 1) == ["<user>What is 2+3?<end>\n<assistant>", "6<end>"]
    assert decode(RolloutGroup, encode(group)) == group
    assert (Plan.of(group).sequences, Plan.of(group).policy_step, Plan.of(group).lease) == (3, 7, "l")


async def test_tool_conversation_is_masked_token_by_token() -> None:
    env = load_environment(f"{EXAMPLES}/calculator.py:Products")
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 100, "b": "999"}}</tool_call>'

    def reply(prompt: str, number: int) -> str:
        return "99900" if "<tool>99900<end>" in prompt else call

    group = await group_of(env, FakeInference(reply))
    system = env.task(0).messages[0].content
    assert learned(group, 0) == [
        f"<system>{system}<end>\n<user>What is 100*999?<end>\n<assistant>",
        f"{call}<end>",
        "\n<tool>99900<end>\n<assistant>",
        "99900<end>",
    ]
    for sequence in group.sequences:
        assert (sequence.logprobs[~sequence.loss_mask] == 0).all()
        assert (sequence.logprobs[sequence.loss_mask] < 0).all()
    assert group.sequences.rewards == {"environment": [1.0, 1.0]}
    said = group.messages[0]
    assert [message.role for message in said] == ["system", "user", "assistant", "tool", "assistant"]
    assert said[2].tool_calls[0].name == "multiply"
    assert json.loads(said[2].tool_calls[0].arguments) == {"a": 100, "b": "999"}


async def test_logprobs_stand_at_the_token_they_belong_to() -> None:
    env = load_environment(f"{EXAMPLES}/guessing.py:Guessing")
    answers = {"<user>Guess my number, 0 to 99.<end>\n<assistant>": "1"}
    inference = FakeInference(lambda prompt, call: answers.get(prompt, "0"))
    group = await group_of(env, inference)
    for sequence in group.sequences:
        expected = {0: None}
        for position in np.flatnonzero(sequence.loss_mask):
            one = FakeInference(lambda prompt, call, p=position, s=sequence: FakeInference.show([int(s.tokens[p])]))
            if int(sequence.tokens[position]) > 4:  # not a special token
                (generation,) = await one.generate([1], 1)
                expected[int(position)] = generation.logprobs[0]
                assert sequence.logprobs[position] == generation.logprobs[0]
        assert len(expected) == 3


async def test_every_turn_may_count_towards_the_reward() -> None:
    env = load_environment(f"{EXAMPLES}/guessing.py:Guessing")
    guesses = ["50", "x", "0", "50", "0"]
    inference = FakeInference(lambda prompt, call: guesses[call] if call < 2 else "0")
    group = await group_of(env, inference)
    assert group.sequences.turn_rewards is None
    assert group.sequences.rewards["environment"] == pytest.approx([0.8, 0.8])
    assert "A number, please." in [message.content for talk in group.messages for message in talk]


async def test_a_turn_limit_ends_the_sample_on_a_generated_token() -> None:
    env = load_environment(f"{EXAMPLES}/guessing.py:Guessing")
    group = await group_of(env, FakeInference(lambda prompt, call: "99"))
    assert [sum(message.role == "assistant" for message in talk) for talk in group.messages] == [8, 8]
    assert all(sequence.loss_mask[-1] for sequence in group.sequences)

    env = load_environment(f"{EXAMPLES}/calculator.py:Products")
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 1, "b": 2}}</tool_call>'
    group = await group_of(env, FakeInference(lambda prompt, number: call))
    assert group.sequences.finish_reasons == ["tool", "tool"]
    assert all(talk[-1].role == "assistant" for talk in group.messages)


async def test_a_cut_turn_ends_the_sample() -> None:
    env = load_environment(f"{EXAMPLES}/guessing.py:Guessing")
    group = await group_of(env, FakeInference(lambda prompt, call: "1234567"), sampling=SamplingParams(max_tokens=3))
    assert group.sequences.finish_reasons == ["length", "length"]
    assert learned(group, 0)[1:] == ["123"]


async def test_a_full_context_ends_the_sample_and_a_prompt_that_fills_it_is_refused() -> None:
    env = load_environment(f"{EXAMPLES}/guessing.py:Guessing")
    prompt = len(FakeInference.show(await FakeInference(str).tokenize([{"role": "user", "content": "x" * 25}])))
    group = await group_of(env, FakeInference(lambda *_: "9"), config=CollectConfig(max_context=prompt + 30))
    assert set(group.sequences.finish_reasons) == {"length"}
    assert max(len(sequence.tokens) for sequence in group.sequences) <= prompt + 30
    with pytest.raises(DataError, match="leaves no room"):
        await group_of(env, FakeInference(lambda *_: "9"), config=CollectConfig(max_context=20))


async def test_later_turns_of_a_seeded_group_do_not_share_their_draws() -> None:
    env = load_environment(f"{EXAMPLES}/guessing.py:Guessing")
    inference = FakeInference(lambda prompt, call: "1")
    await group_of(env, inference, n=3, sampling=SamplingParams(max_tokens=10, seed=5))
    again = FakeInference(lambda prompt, call: "1")
    await group_of(env, again, n=3, sampling=SamplingParams(max_tokens=10, seed=5))
    seeds = [sampling.seed for _, _, sampling in inference.requests]
    assert seeds[0] == 5
    assert len(set(seeds)) == len(seeds) == 1 + 3 * 7
    assert sorted(map(str, seeds)) == sorted(str(sampling.seed) for _, _, sampling in again.requests)


class Flaky(FakeInference):
    """Fails the requests whose numbers are given."""

    def __init__(self, failures: set[int], error: Exception) -> None:
        super().__init__(lambda prompt, call: "1")
        self.failures = failures
        self.error = error
        self.calls = 0

    async def generate(
        self, prompt_ids: object, n: int, sampling: SamplingParams | None = None
    ) -> list[GeneratedSample]:
        self.calls += 1
        if self.calls in self.failures:
            raise self.error
        return await super().generate(prompt_ids, n, sampling)  # type: ignore[arg-type]


async def test_an_infrastructure_failure_is_retried_and_leaves_no_trace() -> None:
    env = load_environment(f"{EXAMPLES}/sums.py:Sums")
    group = await group_of(env, Flaky({1, 2}, InfrastructureError("refused")))
    assert len(group.sequences) == 2
    assert group.metadata == {}


async def test_an_infrastructure_failure_in_mid_group_abandons_the_group() -> None:
    env = load_environment(f"{EXAMPLES}/guessing.py:Guessing")
    with pytest.raises(InfrastructureError, match="failed 3 times, last: refused"):
        await group_of(env, Flaky(set(range(4, 100)), InfrastructureError("refused")))


async def test_an_environment_cannot_swallow_an_infrastructure_failure() -> None:
    class Swallows(Ask):
        async def rollout(self, task: Task, session: Session) -> None:
            await session.generate()
            session.add("more")
            for _ in range(3):
                with contextlib.suppress(Exception):  # what a careless author writes
                    await session.generate()

        def reward(self, task: Task, session: Session) -> float:
            return 0.0

    with pytest.raises(InfrastructureError):
        await group_of(Swallows(), Flaky(set(range(2, 100)), InfrastructureError("refused")))


async def test_an_environment_cannot_disguise_an_infrastructure_failure() -> None:
    class Disguises(Ask):
        async def rollout(self, task: Task, session: Session) -> None:
            try:
                await session.generate()
            except InfrastructureError as error:
                raise ValueError("something else") from error

    with pytest.raises(InfrastructureError, match="refused"):
        await group_of(Disguises(), Flaky(set(range(100)), InfrastructureError("refused")))


async def test_a_slow_server_gets_more_time_and_is_an_infrastructure_failure_in_the_end() -> None:
    class Hangs(FakeInference):
        async def tokenize(self, messages: object, *, add_generation_prompt: bool = True) -> list[int]:
            await anyio.sleep_forever()
            raise AssertionError

    waits: list[RetryWait] = []
    config = CollectConfig(attempts=5, backoff_s=0.001, request_timeout_s=0.01)
    with pytest.raises(InfrastructureError, match=r"no answer within 0\.04 s"):
        await collect_group(Ask(), Ask().task(0), Hangs(str), 1, SAMPLING, config=config, report=waits.append)
    found = [re.findall(r"no answer within (\S+) s", str(wait.error)) for wait in waits]
    assert found == [["0.01"], ["0.02"], ["0.04"], ["0.04"]]


async def test_a_wait_for_the_server_is_reported_before_each_further_request() -> None:
    server = Flaky({1, 2}, InfrastructureError("refused"))
    waits: list[RetryWait] = []
    await collect_group(Ask(), Ask().task(0), server, 2, SAMPLING, config=QUICK, report=waits.append)
    assert [(str(wait.error), wait.failures) for wait in waits] == [("refused", 1), ("refused", 2)]
    assert waits[0].what.startswith("inference: ")


async def test_a_refusal_of_the_server_is_not_retried() -> None:
    server = Flaky(set(range(100)), DataError("400: too long"))
    with pytest.raises(DataError, match="too long"):
        await group_of(Ask(), server)
    assert server.calls == 1


async def test_a_bug_leaves_its_sample_out_and_on_record() -> None:
    class Buggy(Ask):
        def reward(self, task: Task, session: Session) -> float:
            return 1 / (session.text != "boom")

    group = await group_of(Buggy(), FakeInference(lambda prompt, call: "boom" if call == 1 else "fine"), n=3)
    assert group.sequences.rewards == {"environment": [1.0, 1.0]}
    (failed,) = group.metadata["failed_samples"]
    assert failed["sample"] == 1
    assert failed["text"] == "boom"
    assert failed["error"].startswith("ZeroDivisionError: ")
    assert "test_rollout.py" in failed["error"]
    assert decode(RolloutGroup, encode(group)) == group


async def test_a_single_sample_left_is_no_group() -> None:
    class Buggy(Ask):
        def reward(self, task: Task, session: Session) -> float:
            return 1 / (session.sample == 2)

    with pytest.raises(EnvironmentCodeError, match="failed on 2 of 3 samples"):
        await group_of(Buggy(), FakeInference(lambda *_: "x"), n=3)


async def test_bugs_in_all_samples_raise() -> None:
    class Buggy(Ask):
        def respond(self, task: Task, session: Session, reply: Reply) -> list[str]:
            raise KeyError("answr")

    with pytest.raises(EnvironmentCodeError, match="Buggy failed on 3 of 3 samples of item 'q': KeyError") as caught:
        await group_of(Buggy(), FakeInference(lambda *_: "x"), n=3)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", [1.0]])
async def test_a_reward_that_is_no_number_is_a_bug(value: object) -> None:
    class Wrong(Ask):
        def reward(self, task: Task, session: Session) -> object:  # type: ignore[override]
            return value

    with pytest.raises(EnvironmentCodeError, match="finite number or None"):
        await group_of(Wrong(), FakeInference(lambda *_: "x"))


async def test_missing_rewards_stay_missing() -> None:
    class Partly(Ask):
        async def reward(self, task: Task, session: Session) -> dict[str, float | None]:
            return {"a": 1.0} if session.sample else {"b": None}

    group = await group_of(Partly(), FakeInference(lambda *_: "x"))
    assert group.sequences.rewards == {"b": [None, None], "a": [None, 1.0]}


async def test_turns_have_the_rewards_that_they_were_given_and_those_without_have_0() -> None:
    class Turns(Ask):
        async def rollout(self, task: Task, session: Session) -> None:
            for turn in range(2 + session.sample):
                await session.generate()
                if turn == 1:
                    session.reward_turn(0.5)
                    session.reward_turn(np.float32(0.25))  # type: ignore[arg-type]
                session.add("go on")
            session.reward_turn(-1, turn=0)

    group = await group_of(Turns(), FakeInference(lambda *_: "x"))
    assert (group.sequences.turn_rewards, group.sequences.turn_order) == ([[-1.0, 0.75], [-1.0, 0.75, 0.0]], None)
    assert [set(group.sequences.turns()[: len(group.sequences.mask)])] == [{-1, 0, 1, 2}]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda session: session.reward_turn(float("nan")), "reward_turn: .*finite number"),
        (lambda session: session.reward_turn(1.0, turn=1), r"reward_turn\(1, 1\): the model has answered 1 times"),
    ],
)
async def test_a_reward_that_no_turn_can_have_is_a_bug(call: Callable[[Session], None], named: str) -> None:
    class Wrong(Ask):
        async def rollout(self, task: Task, session: Session) -> None:
            await session.generate()
            call(session)

    with pytest.raises(EnvironmentCodeError, match=named):
        await group_of(Wrong(), FakeInference(lambda *_: "x"))


async def test_a_hook_that_does_not_exist_is_named() -> None:
    class Hook(Ask):
        def turn_reward(self, task: Task, session: Session, reply: Reply) -> float:
            return 1.0

    with pytest.raises(ConfigError, match=r"Hook\.turn_reward: there is no such hook; call session\.reward_turn"):
        await group_of(Hook(), FakeInference(lambda *_: "x"))


async def test_a_rollout_that_never_generates_is_a_bug() -> None:
    class Silent(Ask):
        async def rollout(self, task: Task, session: Session) -> None:
            session.add("hello?")

    with pytest.raises(EnvironmentCodeError, match="before the model said anything"):
        await group_of(Silent(), FakeInference(lambda *_: "x"))


async def test_a_rollout_that_changes_the_prompt_is_tokenised_on_its_own() -> None:
    class Hints(Ask):
        async def rollout(self, task: Task, session: Session) -> None:
            session.add(f"hint {session.sample}")
            await session.generate()

    group = await group_of(Hints(), FakeInference(lambda *_: "x"))
    assert learned(group, 1) == ["<user>q<end>\n<user>hint 1<end>\n<assistant>", "x<end>"]


async def test_a_loop_without_end_is_stopped_by_the_turn_limit() -> None:
    class Endless(Ask):
        max_turns = 3

        async def rollout(self, task: Task, session: Session) -> None:
            while True:
                await session.generate()
                session.add("go on")

    group = await group_of(Endless(), FakeInference(lambda *_: "x"))
    assert learned(group, 0)[1::2] == ["x<end>"] * 3


async def test_a_loop_without_end_is_stopped_by_a_cut_turn() -> None:
    class Endless(Ask):
        async def rollout(self, task: Task, session: Session) -> None:
            while True:
                await session.generate()
                session.add("go on")

    replies = ["a", "much too long", "b"]
    group = await group_of(
        Endless(), FakeInference(lambda _, call: replies[call]), n=1, sampling=SamplingParams(max_tokens=4)
    )
    assert learned(group, 0)[1::2] == ["a<end>", "much"]


async def test_a_conversation_that_outgrows_the_server_ends_there_and_stands() -> None:
    class Short(FakeInference):
        async def tokenize(self, messages: object, **given: object) -> list[int]:
            if len(str(messages)) > 1000:
                raise PromptTooLongError("the text has more characters than a context holds")
            return await super().tokenize(messages, **given)  # type: ignore[arg-type]

    class Flood(Ask):
        async def rollout(self, task: Task, session: Session) -> None:
            while True:
                await session.generate()
                session.add("x" * 2000)

    group = await group_of(Flood(), Short(lambda *_: "a"))
    assert learned(group, 0)[1::2] == ["a<end>"]
    assert group.sequences.finish_reasons == ["length", "length"]


class Tools(Ask):
    @tool
    async def wait(self) -> str:
        """Wait for ever."""
        await anyio.sleep_forever()
        raise AssertionError

    @tool
    def refuse(self) -> str:
        """Refuse."""
        raise ToolError("not today")

    @tool
    def down(self) -> str:
        """Fail as a dependency that is down."""
        raise InfrastructureError("search is down")


class Hurried(Tools):
    """Its limit only ends a tool that waits for ever, so that a busy machine changes nothing."""

    tool_timeout_s = 0.02


def calling(name: str) -> FakeInference:
    return FakeInference(
        lambda prompt, call: "done" if "<tool>" in prompt else f'<tool_call>{{"name": "{name}", "arguments": {{}}}}'
    )


async def test_a_slow_tool_and_a_refusing_tool_are_answered_in_words() -> None:
    group = await group_of(Hurried(), calling("wait"))
    assert group.messages[0][2].content == "error: wait did not finish within 0.02 s"
    group = await group_of(Tools(), calling("refuse"))
    assert group.messages[0][2].content == "error: not today"
    group = await group_of(Tools(), calling("wate"))
    assert "did you mean 'wait'?" in group.messages[0][2].content


async def test_a_tool_whose_dependency_is_down_abandons_the_group() -> None:
    with pytest.raises(InfrastructureError, match="search is down"):
        await group_of(Tools(), calling("down"))


async def test_respond_and_rollout_have_time_limits() -> None:
    class Stuck(Ask):
        turn_timeout_s = 0.03
        tool_timeout_s = 0.01

        async def respond(self, task: Task, session: Session, reply: Reply) -> list[Message]:
            await anyio.sleep_forever()
            return []

    with pytest.raises(InfrastructureError, match=r"respond took longer than 0\.03 s"):
        await group_of(Stuck(), FakeInference(lambda *_: "x"))

    Stuck.turn_timeout_s, Stuck.rollout_timeout_s = 60, 0.03
    with pytest.raises(InfrastructureError, match=r"a sample took longer than 0\.03 s"):
        await group_of(Stuck(), FakeInference(lambda *_: "x"))

    Stuck.tool_timeout_s = 60
    with pytest.raises(ConfigError, match="tool_timeout_s"):
        await group_of(Stuck(), FakeInference(lambda *_: "x"))


class Aborting(FakeInference):
    """Hands out two tokens a request and then aborts, under a new version each time, as a paused server does."""

    def __init__(self, text: str, per_request: int = 2) -> None:
        super().__init__(lambda prompt, call: text[len(prompt.rpartition("<assistant>")[2]) :])
        self.per_request = per_request

    async def generate(
        self, prompt_ids: object, n: int, sampling: SamplingParams | None = None
    ) -> list[GeneratedSample]:
        self.version = f"{len(self.requests)}-main-00"
        whole = await super().generate(prompt_ids, n, sampling)  # type: ignore[arg-type]
        k = self.per_request
        return [
            one
            if len(one.token_ids) <= k and k
            else GeneratedSample(
                token_ids=one.token_ids[:k],
                logprobs=one.logprobs[:k],
                text=one.text[:k],
                finish_reason="abort",
                weight_versions=[WeightVersionSpan(version=self.version, start=0, end=k)] if k else [],
            )
            for one in whole
        ]


async def test_an_aborted_sample_goes_on_from_its_own_tokens() -> None:
    group = await group_of(Ask(), Aborting("abcde"), n=1)
    assert learned(group, 0) == ["<user>q<end>\n<assistant>", "abcde<end>"]
    assert group.messages[0][-1].content == "abcde"
    assert group.policy_versions == ["0-main-00", "1-main-00", "2-main-00"]
    prompt = len("?q??") + 1
    assert [(span.start, span.version) for span in group.sequences.version_spans] == [
        (0, 0),
        (prompt + 2, 1),
        (prompt + 4, 2),
    ]


async def test_an_aborted_sample_keeps_to_its_token_limit() -> None:
    group = await group_of(Ask(), Aborting("abcdefgh"), n=2, sampling=SamplingParams(max_tokens=4))
    assert learned(group, 1)[1] == "abcd"
    assert group.sequences.finish_reasons == ["length", "length"]
    group = await group_of(Ask(), Aborting("abcdefgh", per_request=3), n=1, sampling=SamplingParams(max_tokens=4))
    assert learned(group, 0)[1] == "abcd"


async def test_an_aborted_sample_whose_text_must_match_something_begins_again() -> None:
    """The engine would read a continuation as if the form began there."""

    class AbortedOnce(Aborting):
        async def generate(self, prompt_ids: object, n: int, sampling: SamplingParams | None = None) -> Any:
            assert sampling is not None
            self.per_request = 99 if self.requests else 2
            return await super().generate(prompt_ids, n, msgspec.structs.replace(sampling, structured_outputs=None))

    inference = AbortedOnce("abcde")
    requests = InferenceRequests(inference, CollectConfig())
    sampling = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputs(json={}))
    (first,) = await requests.generate([3], 1, sampling)
    turn = await requests.finish([3], first, sampling)
    assert (turn.text, turn.versions, turn.is_constrained) == ("abcde", [(0, "1-main-00")], True)
    assert [prompt for prompt, _, _ in inference.requests] == [[3], [3]]


async def test_a_server_that_only_aborts_is_an_infrastructure_failure() -> None:
    with pytest.raises(InfrastructureError, match="3 times in a row without a new token"):
        await group_of(Ask(), Aborting("abc", per_request=0))


async def test_a_weight_version_that_is_no_policy_version_is_refused() -> None:
    with pytest.raises(SchemaError, match="default"):
        await group_of(Ask(), FakeInference(lambda *_: "x", version="default"))


async def test_versions_that_change_between_turns_are_recorded_where_they_change() -> None:
    class Two(Ask):
        def respond(self, task: Task, session: Session, reply: Reply) -> list[str]:
            inference.version = "2-main-bb"
            return ["more"] if session.turns_left == self.max_turns - 1 else []

    inference = FakeInference(lambda *_: "x", version="1-main-aa")
    group = await group_of(Two(), inference, n=1)
    (sequence,) = group.sequences
    second = int(np.flatnonzero(np.diff(sequence.loss_mask.astype(int)) == 1)[1]) + 1
    assert [(span.start, group.policy_versions[span.version]) for span in group.sequences.version_spans] == [
        (0, "1-main-aa"),
        (second, "2-main-bb"),
    ]


class Losing(FakeInference):
    """Fails the requests numbered in `failing`, with all their attempts; the first is the opening of all samples."""

    def __init__(self, failing: dict[int, Exception]) -> None:
        super().__init__(lambda prompt, call: "more")
        self.failing = failing
        self.asked: list[tuple[int, int | None]] = []
        self._failed: dict[tuple[int, ...], Exception] = {}

    async def generate(
        self, prompt_ids: object, n: int, sampling: SamplingParams | None = None
    ) -> list[GeneratedSample]:
        key = (*prompt_ids, -1, (sampling.seed or 0) if sampling else 0)  # type: ignore[misc]
        if key not in self._failed:
            if len(self.asked) in self.failing:
                self._failed[key] = self.failing[len(self.asked)]
            self.asked.append((n, sampling.seed if sampling else None))
        if key in self._failed:
            raise self._failed[key]
        return await super().generate(prompt_ids, n, sampling)  # type: ignore[arg-type]


class TwoTurns(Ask):
    async def rollout(self, task: Task, session: Session) -> None:
        await session.generate()
        session.add("go on")
        await session.generate()

    def reward(self, task: Task, session: Session) -> float:
        return float(session.sample)


AWAY = ServerAwayError("connection refused")
SEEDED = SamplingParams(max_tokens=200, seed=7)


async def test_a_lost_sample_is_generated_again() -> None:
    inference = Losing({2: AWAY})  # the opening of four, then the second turn of the second sample
    group = await group_of(TwoTurns(), inference, n=4, sampling=SEEDED)
    assert group.sequences.rewards["environment"] == [0.0, 1.0, 2.0, 3.0]
    assert group.metadata["lost_samples"] == {"refilled": [1], "left_out": []}
    assert [n for n, _ in inference.asked] == [4, 1, 1, 1, 1, 1, 1]  # with its own opening, of one
    assert len({seed for _, seed in inference.asked}) == 7  # and no draw of before


async def test_a_group_may_go_on_without_a_lost_sample() -> None:
    config = msgspec.structs.replace(QUICK, lost_samples="drop", fewest_samples=3)
    group = await group_of(TwoTurns(), Losing({2: AWAY}), n=4, sampling=SEEDED, config=config)
    assert group.sequences.rewards["environment"] == [0.0, 2.0, 3.0]
    assert group.metadata["lost_samples"] == {"refilled": [], "left_out": [1]}
    with pytest.raises(InfrastructureError, match="connection refused"):
        await group_of(TwoTurns(), Losing({2: AWAY, 3: AWAY}), n=4, sampling=SEEDED, config=config)


async def test_a_group_may_be_abandoned_for_a_lost_sample() -> None:
    config = msgspec.structs.replace(QUICK, lost_samples="abandon")
    with pytest.raises(InfrastructureError, match="connection refused"):
        await group_of(TwoTurns(), Losing({2: AWAY}), n=4, sampling=SEEDED, config=config)


async def test_lost_samples_are_not_refilled_for_ever_nor_where_nobody_came_through() -> None:
    late = {number: AWAY for number in range(2, 100) if number > 4}
    inference = Losing({2: AWAY, **late})
    with pytest.raises(ServerAwayError):
        await group_of(TwoTurns(), inference, n=4, sampling=SEEDED)
    assert len(inference.asked) == 7  # two openings more
    inference = Losing(dict.fromkeys(range(100), AWAY))
    with pytest.raises(ServerAwayError):
        await group_of(TwoTurns(), inference, n=4, sampling=SEEDED)
    assert len(inference.asked) == 1


@pytest.mark.parametrize("lost", ["refill", "drop"])
@pytest.mark.parametrize("error", [InfrastructureError("500"), TimeoutError("slow"), DataError("the context is full")])
async def test_what_the_answer_may_have_caused_gives_up_the_whole_group(error: Exception, lost: str) -> None:
    """Else answers that the server cannot take, or that take long, would be sorted out."""
    config = msgspec.structs.replace(QUICK, lost_samples=lost)
    inference = Losing({2: error})
    with pytest.raises((InfrastructureError, DataError)):
        await group_of(TwoTurns(), inference, n=4, sampling=SEEDED, config=config)
    assert len(inference.asked) <= 5


async def test_a_tool_that_is_away_gives_up_the_whole_group() -> None:
    class Search(TwoTurns):
        async def respond(self, task: Task, session: Session, reply: Reply) -> list[str]:
            raise ServerAwayError("no search for this query")

        async def rollout(self, task: Task, session: Session) -> None:
            reply = await session.generate()
            if session.sample == 1:
                await self.respond(task, session, reply)

    with pytest.raises(ServerAwayError, match="this query"):
        await group_of(Search(), FakeInference(lambda *_: "x"), n=3)


async def test_an_environment_whose_judge_is_away_waits() -> None:
    class Judged(Ask):
        def reward(self, task: Task, session: Session) -> float:
            if session.sample == 1:
                raise ConnectionRefusedError("judge")
            return 1.0

    with pytest.raises(InfrastructureError, match=r"Judged\.reward: ConnectionRefusedError: judge"):
        await group_of(Judged(), FakeInference(lambda *_: "x"), n=3)


class Thinking(FakeInference):
    """Its chat template ends with `opening`. `asked` counts the tails of prompts that it had to spell."""

    def __init__(self, opening: str) -> None:
        super().__init__(lambda prompt, call: "so</think>yes")
        self.opening = opening
        self.asked = 0

    async def tokenize(self, messages, *, add_generation_prompt=True):
        ids = await super().tokenize(messages, add_generation_prompt=add_generation_prompt)
        return [*ids, *(ord(c) + 5 for c in self.opening)]

    async def detokenize(self, token_ids):
        self.asked += 1
        return await super().detokenize(token_ids)


@pytest.mark.parametrize(
    ("opening", "noted"),
    [("<think>", "<think>"), ("<think>\n", "<think>"), ("[THINK]", "[THINK]"), ("", None),
     ("<think>\n\n</think>\n", None), ("<b>", None)],
)  # fmt: skip
async def test_what_the_template_opens_is_noted_once_and_read_by_raters(opening: str, noted: str | None) -> None:
    inference = Thinking(opening)
    group = await group_of(Ask(), inference)
    asked = inference.asked
    assert group.metadata.get("prompt_opens") == noted
    await group_of(Ask(), inference)
    assert inference.asked == asked, "the end of a prompt is spelled once"
    samples = samples_of(decode(RolloutGroup, encode(group)))
    assert [sample.text for sample in samples] == [(noted or "") + "so</think>yes"] * 2


class Unmarked(FakeInference):
    """Its markers of calls are special tokens, which the text does not show."""

    async def generate(self, prompt_ids, n, sampling=None):
        found = await super().generate(prompt_ids, n, sampling)
        bare = [one.text.replace("[TOOL_CALLS]", "").replace("[ARGS]", "") for one in found]
        return [msgspec.structs.replace(one, text=text) for one, text in zip(found, bare, strict=True)]


@pytest.mark.parametrize(
    "marked", ['[TOOL_CALLS][{"name": "double", "arguments": {"a": 2}}]', '[TOOL_CALLS]double[ARGS]{"a": 2}']
)
async def test_special_tokens_that_the_text_does_not_show_mark_calls(marked: str) -> None:
    class Doubles(Ask):
        max_turns = 2

        @tool
        def double(self, a: int) -> int:
            """Return 2a."""
            return 2 * a

    group = await group_of(Doubles(), Unmarked(lambda prompt, call: "four" if "<tool>4" in prompt else marked), n=1)
    assert learned(group, 0)[1:] == [f"{marked}<end>", "\n<tool>4<end>\n<assistant>", "four<end>"]


async def test_a_rollout_that_cannot_be_cancelled_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "_CANCELLED_S", 0.05)
    released = threading.Event()

    class Hangs(Ask):
        rollout_timeout_s = 0.05

        async def rollout(self, task: Task, session: Session) -> None:
            await anyio.to_thread.run_sync(released.wait)

    reported: list[str] = []

    def report(text: str) -> None:
        reported.append(text)
        released.set()

    with anyio.fail_after(30), pytest.raises(EnvironmentCodeError):
        await collect_group(
            Hangs(),
            Hangs().task(0),
            FakeInference(lambda prompt, call: "x"),
            2,
            SAMPLING,
            config=QUICK,
            report_stuck=report,
        )
    assert len(reported) == 1
    assert "a rollout of Hangs, item 'q', cannot be cancelled after its 0.05 s" in reported[0]
