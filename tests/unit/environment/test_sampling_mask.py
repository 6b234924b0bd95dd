"""What top_p left becomes a column of the group; what was sampled otherwise than the trainer computes is refused."""

from contextlib import nullcontext

import msgspec
import numpy as np
import pytest

from lachesis.pipeline.common.sampling_agreement import sampling_difference
from lachesis.pipeline.common.trainability import TrainerLimits, TrainerReads, why_untrainable
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.environment.fake_inference import FakeInference
from lachesis.pipeline.environment.group_environment import GeneratedGroup, GroupEnvironment
from lachesis.pipeline.environment.rollout import build_group, collect_group
from lachesis.pipeline.environment.session import Session
from lachesis.pipeline.errors import EnvironmentCodeError
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.inference.sampling_mask import decode_mask, encode_mask
from lachesis.pipeline.tasks.task import Task
from lachesis.schemas.columns import view
from lachesis.schemas.errors import ConfigError, DataError

NUCLEUS = SamplingParams(max_tokens=9, top_p=0.9, sampling_mask=True)


class TwoTurns(Environment):
    def __len__(self):
        return 1

    def task(self, index):
        return Task(item="i", prompt="say")

    async def rollout(self, task, session):
        await session.generate()
        session.add("again")
        await session.generate()

    def reward(self, task, session):
        return 1.0


class Recording(FakeInference):
    """A server that left the sampled token and the one after it, but all where the token is the last of a turn."""

    async def generate(self, prompt_ids, n, sampling=None):
        found = await super().generate(prompt_ids, n, sampling)
        if not sampling.sampling_mask:
            return found
        rows = [[np.array([t, t + 1], np.int32) for t in one.token_ids[:-1].tolist()] for one in found]
        nothing = np.zeros(0, np.int32)
        return [
            msgspec.structs.replace(one, sampling_mask=[*of_one, nothing])
            for one, of_one in zip(found, rows, strict=True)
        ]


def built(draft):
    return build_group(draft, run="r", env="e", producer="p", epoch=1, counter=1, tokenizer_hash="t")


async def test_the_mask_of_each_turn_stands_at_its_tokens():
    env, server = TwoTurns(), Recording(lambda prompt, call: "yes")
    group = built(await collect_group(env, env.task(0), server, 2, NUCLEUS))
    sequences = group.sequences
    column = sequences.columns["sampling_mask"]
    rows = view(column.data, column.dtype, sequences.n_tokens, "x", column.width)
    tokens = view(sequences.tokens, "int32", sequences.n_tokens, "x")
    masked = (rows >= 0).any(axis=1)
    assert masked.sum() == 2 * 2 * 3, "three tokens of each turn, not its end"
    assert not masked[~sequences.mask].any()
    assert rows[masked].tolist() == [[token, token + 1] for token in tokens[masked].tolist()]
    assert group.generation["top_p"] == 0.9


async def test_no_mask_is_asked_for_where_nothing_is_left_out():
    env, server = TwoTurns(), Recording(lambda prompt, call: "yes")
    group = built(await collect_group(env, env.task(0), server, 2, msgspec.structs.replace(NUCLEUS, top_p=1.0)))
    assert "sampling_mask" not in group.sequences.columns
    assert not any(sampling.sampling_mask for _, _, sampling in server.requests)


async def test_a_server_that_records_none_is_named():
    env = TwoTurns()
    with pytest.raises(DataError, match=r"does not say which tokens top_p left.*set top_p = 1"):
        await collect_group(env, env.task(0), FakeInference(lambda prompt, call: "yes"), 2, NUCLEUS)


def test_the_mask_comes_back_from_the_wire():
    tokens, rows = np.array([5, 7, 9], np.int32), [[5, 6], [], [9]]
    assert [row.tolist() for row in decode_mask(encode_mask(rows), tokens)] == rows
    assert decode_mask(encode_mask([]), np.zeros(0, np.int32)) == []
    for text, other in (
        (encode_mask([[6], [], [9]]), "which its row excludes"),
        (encode_mask([[5]]), "are no rows of 3 tokens"),
        (encode_mask([[5, -1], [], [9]]), "below 0"),
        ("@", "."),
    ):
        with pytest.raises(ValueError, match=other):
            decode_mask(text, tokens)


class Group(GroupEnvironment):
    """Samples twice, and trains on one of the two."""

    def __init__(self, trained, other):
        self.trained, self.other = trained, other

    def __len__(self):
        return 1

    def task(self, index):
        return Task(item="i", prompt="say")

    def running(self):
        return nullcontext()

    async def generate_group(self, task, requests, n, sampling):
        prompt = await requests.tokenize(task.messages)
        turns = []
        for asked in (self.trained, self.other):
            params = msgspec.structs.replace(sampling, **asked)
            (generation,) = await requests.generate(prompt, 1, params)
            turns.append(await requests.finish(prompt, generation, params))
        session = Session.of_group(task, 0, requests, sampling)
        session.tokens = [*prompt, *turns[0].token_ids]
        session.loss_mask = [False] * len(prompt) + [True] * len(turns[0].token_ids)
        session.logprobs = [0.0] * len(prompt) + turns[0].logprobs
        session.versions = [(0, turns[0].versions[0][1])]
        return GeneratedGroup(task=task, sessions=[session], rewards=[{"environment": 1.0}])


@pytest.mark.parametrize(
    ("asked", "said"),
    [({"temperature": 0.5}, "sampled at temperature 0.5"), ({"top_p": 0.9}, "sampled with top_p 0.9")],
)
async def test_a_group_environment_is_not_trained_on_what_it_sampled_otherwise(asked, said):
    def server():
        return FakeInference(lambda prompt, call: f"answer {call}")

    env = Group({}, asked)
    await collect_group(env, env.task(0), server(), 1, SamplingParams())  # a judge, say: it is not trained on
    env = Group(asked, {})
    with pytest.raises(EnvironmentCodeError, match=f"Group: sample 0 is trained on tokens that were {said}"):
        await collect_group(env, env.task(0), server(), 1, SamplingParams())


@pytest.mark.parametrize(
    ("generation", "masked", "said"),
    [
        ({"temperature": 0.7}, False, "temperature 0.7, where training.learner.temperature is 1"),
        ({"temperature": 0.0}, True, "temperature 0,"),
        ({"top_p": 0.5}, False, "top_p 0.5.*sampling_mask"),
        ({"top_k": 20}, False, "top_k 20"),
        ({"min_p": 0.05}, False, "min_p 0.05"),
        ({"repetition_penalty": 1.1}, True, "repetition_penalty 1.1"),
        ({"presence_penalty": 0.5}, True, "presence_penalty 0.5"),
        ({"logit_bias": {"5": -100}}, True, "logit_bias"),
        ({"top_p": 0.5, "top_k": 20, "min_p": 0.1}, True, None),
        ({"temperature": 1, "top_p": 1.0, "top_k": -1, "min_p": 0, "repetition_penalty": 1.0}, False, None),
        ({"top_p": None, "temperature": "hot", "logit_bias": {}, "n": 8}, False, None),
    ],
)
def test_what_a_trainer_does_not_compute_is_named(generation, masked, said):
    found = sampling_difference(generation, 1.0, masked=masked)
    if said is None:
        assert found is None
    else:
        with pytest.raises(AssertionError, match=said):
            raise AssertionError(found)


async def test_a_group_that_was_sampled_otherwise_costs_itself_alone():
    env, server = TwoTurns(), Recording(lambda prompt, call: "yes")
    group = built(await collect_group(env, env.task(0), server, 2, NUCLEUS))
    reads = TrainerReads(frozenset({"sampling_mask"}))
    assert why_untrainable(group, TrainerLimits(reads=reads, temperature=1.0)) is None
    assert "temperature 1, where" in str(why_untrainable(group, TrainerLimits(reads=reads, temperature=3.0)))
    bare = msgspec.structs.replace(group, sequences=msgspec.structs.replace(group.sequences, columns={}))
    assert "sampled with top_p 0.9" in str(why_untrainable(bare, TrainerLimits(reads=reads, temperature=1.0)))
    assert why_untrainable(bare, TrainerLimits(reads=reads)) is None, "whose trainer's temperature is not known"


MASK = {"training": {"inputs": [{"input": "sampling_mask"}]}}


@pytest.mark.extension
@pytest.mark.parametrize(
    ("env", "further", "said"),
    [
        ({"temperature": 0.7}, {}, r"environments.e: sampled at temperature 0.7"),
        ({}, {"training": {"learner": {"temperature": 3.0}}}, r"training.learner.temperature is 3"),
        ({"top_p": 0.9}, {}, r"environments.e.top_p is 0.9.*sampling_mask.* and environments.e.column_bytes = 4096"),
        (
            {"top_p": 0.9},
            {"training": {"learner": {"loss": {"teacher_kl": "reverse"}}}},
            r"sampling_mask.*teacher_kl = .*column_bytes",
        ),
        ({"top_p": 0.9}, {"inference": {"policy": {"kind": "vllm"}}}, "vllm does not say"),
        ({"top_p": 0.9}, {"training": {"backend": "tinker"}}, "tinker trains on all tokens"),
        ({"top_p": 0.9}, MASK, r"environments.e.column_bytes"),
        ({"top_p": 0.9, "column_bytes": 4096}, MASK | {"inference": {"policy": {"kind": "vllm"}}}, "vllm does not say"),
        ({"temperature": 0.7}, {"training": {"backend": "tinker"}}, r"temperature 0.7"),
        ({"top_p": 0.9, "column_bytes": 4096}, MASK, None),
        ({"temperature": 0.7}, {"training": {"learner": {"temperature": 0.7}}}, None),
        ({"temperature": 0.7, "top_p": 0.9}, {"mode": "observe"}, None),
        ({"temperature": 0.7, "kind": "gateway"}, {}, None),
        ({}, {"evaluation": {"v": {"kind": "k", "temperature": 0.2, "top_p": 0.9}}}, None),
    ],
)
def test_a_run_that_samples_otherwise_than_it_trains_is_refused_at_the_start(env, further, said):
    data = {"environments": {"e": {"kind": "spell_backward"} | env}} | further
    if said is None:
        msgspec.convert(data, run_config_type())
    else:
        with pytest.raises((ConfigError, msgspec.ValidationError), match=said):
            msgspec.convert(data, run_config_type())
