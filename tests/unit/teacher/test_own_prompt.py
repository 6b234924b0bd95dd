"""A teacher that reads the answer in its own prompt: against transformers, its refusals, and what is recorded of it."""

from types import SimpleNamespace

import numpy as np
import pytest
from contract.inference_servers import KEY
from unit.teacher.served_policy import policy, url
from unit.teacher.token_rows import group_of

from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig
from lachesis.pipeline.model.logprobs import token_logprobs
from lachesis.pipeline.teacher.prompt import PromptTemplate
from lachesis.pipeline.teacher.requests import Teacher
from lachesis.schemas.columns import view
from lachesis.schemas.rollout import Message

torch = pytest.importorskip("torch")

__all__ = ["policy", "url"]  # the fixtures

pytestmark = pytest.mark.outside
TEMPLATE = PromptTemplate("{question} It is {answer}.")
TASK = {"answer": "{4}"}


def rendered(policy, text):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": text}]
    return policy.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def a_group(lab, policy):
    """One sample of a single turn, one of two; a third turns out to have another prompt than its messages say."""
    prompt = rendered(policy, "2+2?")
    encode = policy.tokenizer.encode
    said = encode("four", add_special_tokens=False), encode("well, 4", add_special_tokens=False)
    between = encode("sure?", add_special_tokens=False)
    rows = [[*prompt, *said[0]], [*prompt, *said[1], *between, *said[0]], [prompt[0], *prompt, *said[0]]]
    masks = [
        [False] * len(prompt) + [True] * len(said[0]),
        [False] * len(prompt) + [True] * len(said[1]) + [False] * len(between) + [True] * len(said[0]),
        [False] * (len(prompt) + 1) + [True] * len(said[0]),
    ]
    opening = [Message(role="system", content="s"), Message(role="user", content="2+2?")]
    answer = Message(role="assistant", content="four")
    talks = [[*opening, answer], [*opening, answer, Message(role="user", content="sure?"), answer], [*opening, answer]]
    return group_of(lab, rows, masks).replace(messages=talks, task=TASK), rows, masks, prompt


async def score(url, group, *, top_k=0, prompt=TEMPLATE, branches=True):
    async with InferenceClient(ClientConfig(url=url), token=KEY) as client:

        async def current():
            return client

        return await Teacher(SimpleNamespace(current=current), "m", None, top_k, prompt, branches=branches).score(group)


@pytest.mark.parametrize("branches", [True, False])
async def test_sampled_tokens_have_the_logprobs_of_transformers_after_the_prompt_with_the_answer(
    lab, policy, url, branches
):
    group, rows, masks, prompt = a_group(lab, policy)
    own = rendered(policy, "2+2? It is {4}.")
    answer = await score(url, group, top_k=3, branches=branches)
    assert answer.missing == [2]
    assert "sequence 2: its first tokens are not what the chat template makes" in answer.reason
    assert (answer.prompt_digest, answer.weights) == (TEMPLATE.digest, ["default"])
    total = group.sequences.n_tokens
    found, at = view(answer.columns["logprobs"], "float32", total, "logprobs"), 0
    likeliest = view(answer.columns["topk_ids"], "int32", total, "topk_ids", 3).reshape(-1, 3)
    for row, mask in zip(rows[:2], masks[:2], strict=True):
        tokens = [*own, *row[len(prompt) :]]
        with torch.no_grad():
            expected = token_logprobs(policy.model, torch.tensor([tokens]), 1.0)[0][0].numpy()
            best = policy.model(input_ids=torch.tensor([tokens])).logits[0].argmax(-1).numpy()
        mine, sampled = slice(at, at + len(row)), np.array(mask)
        assert found[mine][sampled] == pytest.approx(expected[len(own) :][sampled[len(prompt) :]], abs=1e-5)
        assert (likeliest[mine][sampled][:, 0] == best[len(own) - 1 : -1][sampled[len(prompt) :]]).all()
        assert not found[mine][: len(prompt)].any()
        at += len(row)
    plain = await score(url, group, prompt=None)
    assert (plain.missing, plain.prompt_digest) == ([], None)
    others = view(plain.columns["logprobs"], "float32", total, "logprobs")
    assert np.abs(others - found)[: len(rows[0])][np.array(masks[0])].max() > 1e-2


async def test_a_task_without_the_field_and_a_prompt_that_is_too_long_leave_the_group_without_a_teacher(
    lab, policy, url
):
    group, *_ = a_group(lab, policy)
    answer = await score(url, group.replace(task={}))
    assert answer.missing == [0, 1, 2]
    assert "the task has no 'answer'" in answer.reason
    answer = await score(url, group.replace(task={"answer": "4" * 400}))
    assert answer.missing == [0, 1, 2]
    group_without = group.replace(messages=[])
    assert (await score(url, group_without)).missing == [0, 1, 2]
