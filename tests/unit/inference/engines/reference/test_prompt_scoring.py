"""Prompts that begin alike: their logprobs are those of plain passes, and each distinct token is computed once."""

from dataclasses import replace

import pytest
import torch

from lachesis.pipeline.inference.engines.reference import prompt_scoring
from lachesis.pipeline.inference.engines.reference.prompt_scoring import PromptScorer
from lachesis.pipeline.inference.prompt_tree import PromptPath, prompt_tree
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.model.packed_rows import PackedRows
from lachesis.schemas.errors import DataError

WAIT = 20
K = 3
FORKS = [[1, *range(30, 60)], [1, *range(30, 50), 7, 8], [1, *range(30, 50), 7, 9, 10, 11], [1, 5], [4, 4, 4]]
DISTINCT = 31 + 2 + 3 + 1 + 3


@pytest.fixture
def paths():
    return prompt_tree(map(tuple, FORKS))


@pytest.fixture
def computed(policy):
    """Tokens that each pass of the policy's layers computes."""
    counts = []
    embedding = policy.model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda _, given: counts.append(given[0].numel()))
    return counts


def check(model, path, scores):
    with torch.no_grad():
        logprobs_TV = model(torch.tensor([path.tokens])).logits[0].log_softmax(-1)
    first = path.shared
    assert len(scores) == len(path.own)
    for place, entry in enumerate(scores, first):
        if place == 0:
            assert entry is None
            continue
        token, row_V = path.tokens[place], logprobs_TV[place - 1]
        order = row_V.argsort(descending=True).tolist()
        assert entry[str(token)].logprob == pytest.approx(row_V[token].item(), abs=1e-5)
        assert entry[str(token)].rank == order.index(token) + 1
        assert set(entry) == {str(one) for one in [*order[:K], token]}


def scorer(policy, **settings):
    with torch.inference_mode():
        return PromptScorer(policy.model, **{"max_tokens": 8192} | settings)


def score(scorer, paths):
    with torch.inference_mode():
        return scorer.score(paths, [K] * len(paths))


@pytest.mark.parametrize("elements", [1, 2**26])
def test_each_distinct_token_is_computed_once_and_has_the_logprob_of_a_plain_pass(
    policy, paths, computed, monkeypatch, elements
):
    monkeypatch.setattr(prompt_scoring, "SCORING_ELEMENTS", elements)
    by = scorer(policy)
    computed.clear()
    found = score(by, paths)
    assert computed == [DISTINCT]
    for path, (scores, next_logits) in zip(paths, found, strict=True):
        check(policy.model, path, scores)
        with torch.no_grad():
            expected = policy.model(torch.tensor([path.tokens])).logits[0, -1]
        assert next_logits.numpy() == pytest.approx(expected.numpy(), abs=1e-4)


def test_a_pass_has_no_more_tokens_than_it_may_and_begins_with_a_whole_path(policy, paths, computed):
    by = scorer(policy, max_tokens=34)
    computed.clear()
    found = score(by, paths)
    assert len(computed) > 1
    assert max(computed) <= 34
    for path, (scores, _) in zip(paths, found, strict=True):
        check(policy.model, path, scores)


@pytest.mark.parametrize("how", ["apart", "another result", "fails"])
def test_where_tokens_cannot_be_shared_each_path_is_a_row(policy, paths, computed, monkeypatch, how):
    make = PackedRows.of

    def broken(*given):
        if how == "fails":
            raise ValueError("no")
        rows = make(*given)
        return replace(rows, positions_1N=torch.zeros_like(rows.positions_1N))

    if how != "apart":
        monkeypatch.setattr(PackedRows, "of", broken)
    by = scorer(policy, apart=how == "apart")
    computed.clear()
    found = score(by, paths)
    assert sum(computed) >= sum(map(len, FORKS))
    for path, (scores, _) in zip(paths, found, strict=True):
        check(policy.model, path, scores)


def test_a_request_with_branches_reads_them_and_its_prompt_once_and_samples_one_token(
    start_engine, policy, paths, computed
):
    first, *branches = paths
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=K)
    with start_engine() as engine:
        engine.submit([1, 2], params).result(WAIT)  # the scorer's own comparison
        computed.clear()
        result = engine.submit(list(first.tokens), params, branches=branches).result(WAIT)
        assert computed == [DISTINCT]
        with pytest.raises(DataError, match="context of 96"):
            engine.submit([1], params, branches=[PromptPath((1,) * 97, 1)])
    for path, scores in zip(paths, [result.prompt_logprobs, *result.branch_logprobs], strict=True):
        check(policy.model, path, scores)
    with torch.no_grad():
        likeliest = policy.model(torch.tensor([first.tokens])).logits[0, -1].argmax().item()
    assert [(one.token_ids, one.finish_reason) for one in result.samples] == [([likeliest], "length")]
