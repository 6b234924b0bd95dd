"""Experts that a server recorded become a column of the group, a row a token, also over several turns."""

import base64
import io

import msgspec
import numpy as np
import pytest

from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.environment.fake_inference import FakeInference
from lachesis.pipeline.environment.inference_requests import joined_experts
from lachesis.pipeline.environment.rollout import build_group, collect_group
from lachesis.pipeline.errors import UnreadableAnswerError
from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig
from lachesis.pipeline.inference.protocol import Choice, LogprobEntry, Logprobs, SamplingParams, WeightVersionSpan
from lachesis.pipeline.tasks.task import Task
from lachesis.schemas.columns import view

pytestmark = pytest.mark.outside

WIDTH = 4


class TwoTurns(Environment):
    def __len__(self):
        return 1

    def task(self, index):
        return Task(item="i", prompt="say")

    async def rollout(self, task, session):
        await session.generate()
        session.add("user", "again")
        await session.generate()

    def reward(self, task, session):
        return 1.0


class Recording(FakeInference):
    """A server that records: row t of its nth answer is [n, t, n, t], but none for the last token."""

    async def generate(self, prompt_ids, n, sampling=None):
        number, found = len(self.requests), []
        for one in await super().generate(prompt_ids, n, sampling):
            rows = len(prompt_ids) + len(one.token_ids) - 1
            experts = np.stack([np.full(rows, number), np.arange(rows)] * 2, axis=1).astype(np.int16)
            found.append(msgspec.structs.replace(one, routed_experts=experts))
        return found


async def test_each_token_has_the_experts_of_the_request_that_first_processed_it():
    env, server = TwoTurns(), Recording(lambda prompt, call: "yes")
    draft = await collect_group(env, env.task(0), server, 1, SamplingParams(max_tokens=9))
    group = build_group(draft, run="r", env="e", producer="p", epoch=1, counter=1, tokenizer_hash="t")
    column = group.sequences.columns["routed_experts"]
    rows = view(column.data, column.dtype, group.sequences.n_tokens, "x", column.width)
    first_turn = int(np.flatnonzero(np.diff(group.sequences.mask.astype(int)) == -1)[0]) + 1  # tokens up to its end
    assert rows[:, 1].tolist() == [*range(len(rows) - 1), -1]
    assert set(rows[: first_turn - 1, 0]) == {0}
    assert set(rows[first_turn - 1 : -1, 0]) == {1}  # its last token was processed by the second request
    assert rows[-1].tolist() == [-1] * WIDTH


def test_two_models_in_one_sequence_are_refused():
    with pytest.raises(UnreadableAnswerError, match="6 a token after 4 in the same sequence"):
        joined_experts(np.zeros((3, 4), np.int16), np.zeros((5, 6), np.int16))
    assert joined_experts(None, None) is None


def encoded(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def generation(routed):
    client = InferenceClient(ClientConfig(url="http://127.0.0.1:1"))
    content = [LogprobEntry(token="token_id:5", logprob=-1.0)]
    return client._generation(Choice(index=0, token_ids=[5], text="x", logprobs=Logprobs(content=content),
                                     weight_versions=[WeightVersionSpan(version="0-a-b", start=0, end=1)],
                                     routed_experts=routed))  # fmt: skip


@pytest.mark.slow
async def test_what_vllm_answers_is_read_and_what_is_no_such_array_is_refused():
    found = generation(encoded(np.arange(12, dtype=np.uint8).reshape(3, 2, 2))).routed_experts
    assert found.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert generation(None).routed_experts is None
    by_column = np.asfortranarray(np.arange(24).reshape(4, 3, 2))
    assert generation(encoded(by_column)).routed_experts.tolist() == by_column.reshape(4, 6).tolist()
    assert generation(encoded(np.zeros((0, 3, 2), np.int16))).routed_experts.shape == (0, 6)
    pickled = io.BytesIO()
    np.save(pickled, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    whole = base64.b64decode(encoded(np.zeros((9, 2, 2), np.int16)))
    for data in (b"no file", pickled.getvalue(), whole[:-1], whole[:40], whole.replace(b"(9,", b"(9000000000000,")):
        with pytest.raises(UnreadableAnswerError, match="routed_experts that cannot be read"):
            generation(base64.b64encode(data).decode())
    for array in (np.zeros((3, 4), np.int16), np.zeros((3, 2, 2))):
        with pytest.raises(UnreadableAnswerError, match="where integers by token, layer and place are needed"):
            generation(encoded(array))
    for expert in (-1, 40_000):
        with pytest.raises(UnreadableAnswerError, match="none of 0 to 32767"):
            generation(encoded(np.full((1, 1, 1), expert)))
    with pytest.raises(UnreadableAnswerError, match="cannot be read"):
        generation("@")
