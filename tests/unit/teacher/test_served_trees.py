"""A teacher by the reference server: one request for a tree of sequences, and what one for each sequence would give."""

from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from contract.inference_servers import KEY
from unit.teacher.served_policy import policy, url
from unit.teacher.token_rows import group_of

from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig
from lachesis.pipeline.inference.prompt_tree import prompt_tree
from lachesis.pipeline.teacher.requests import Teacher
from lachesis.schemas.columns import view
from lachesis.schemas.errors import DataError

__all__ = ["policy", "url"]  # the fixtures

pytestmark = pytest.mark.outside
K = 4


def conversation():
    """A conversation with two forks and a sub-agent, and a second sample of the same prompt."""
    draw = np.random.default_rng(0)

    def tokens(count):
        return draw.integers(5, 100, count).tolist()

    opening, main = tokens(40), tokens(120)
    return [
        [*opening, *main[:50], *tokens(20)],
        [*opening, *main[:90], *tokens(15)],
        tokens(30),
        [*opening, *main],
        [*opening, *tokens(60)],
    ]


async def test_a_tree_in_one_request_has_the_logprobs_and_the_likeliest_tokens_of_a_request_for_each_sequence(lab, url):
    rows, calls = conversation(), []
    group, total = group_of(lab, rows), sum(map(len, rows))
    async with InferenceClient(ClientConfig(url=url), token=KEY, requested=calls.append) as client:

        async def current():
            return client

        assert (await client.probe()).branches
        apart = [await client.prompt_top_logprobs(row, K) for row in rows]
        for branches, requests in ((True, 1), (False, 5)):
            calls.clear()
            teacher = Teacher(SimpleNamespace(current=current), "m", None, K, branches=branches)
            answer = await teacher.score(group)
            assert (answer.missing, answer.weights, len(calls)) == ([], ["default"], requests)
            logprobs = view(answer.columns["logprobs"], "float32", total, "logprobs")
            assert logprobs == pytest.approx(np.concatenate([one.logprobs for one in apart]), abs=1e-5)
            ids = view(answer.columns["topk_ids"], "int32", total, "topk_ids", K).reshape(total, K)
            assert (ids == np.concatenate([one.ids for one in apart])).all()
            top = view(answer.columns["topk_logprobs"], "float16", total, "topk_logprobs", K).reshape(total, K)
            assert np.allclose(top, np.concatenate([one.top for one in apart]).astype(np.float16), atol=2e-2)


async def test_a_path_beyond_the_context_is_refused_with_its_tree_and_then_alone(lab, url):
    rows = conversation()
    rows[3] = [*rows[3], *rows[3]]
    async with InferenceClient(ClientConfig(url=url), token=KEY) as client:

        async def current():
            return client

        with pytest.raises(DataError, match="context of 256 tokens"):
            await client.prompt_tree_logprobs(prompt_tree(map(tuple, rows)), 0)
        answer = await Teacher(SimpleNamespace(current=current), "m", None, branches=True).score(group_of(lab, rows))
    assert answer.missing == [3]
    assert "256" in answer.reason


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"branches": [{"shared": 3, "token_ids": [7]}]}, "branches[0] shares 3 tokens of a prompt of 2"),
        ({"sampling_params": {"max_tokens": 1}}, "branches: they are for prompt_logprobs"),
        ({"branches": [{"shared": 1, "token_ids": [7]}] * 257}, "<= 256"),
        ({"branches": [{"shared": 1, "token_ids": []}]}, ">= 1"),
        ({"branches": [{"shared": 1, "token_ids": [9999]}]}, "vocabulary"),
    ],
)
async def test_branches_that_make_no_sense_are_refused_by_name(url, changes, text):
    body = {
        "token_ids": [5, 6],
        "branches": [{"shared": 1, "token_ids": [7]}],
        "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0},
    }
    async with httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {KEY}"}) as http:
        right = (await http.post("/inference/v1/generate", json=body)).json()
        assert [len(one) for one in right["branch_logprobs"]] == [1]
        answer = await http.post("/inference/v1/generate", json=body | changes)
    assert answer.status_code == 400
    assert text in answer.text
