"""What sequences begin with is requested once, and each token has the logprob that a request of its own would give."""

from types import SimpleNamespace

import anyio
import numpy as np
import pytest
from unit.teacher.token_rows import group_of

from lachesis.pipeline.errors import InfrastructureError, UnreadableAnswerError
from lachesis.pipeline.inference.prompt_logprobs import PromptTopLogprobs
from lachesis.pipeline.teacher.requests import Teacher
from lachesis.schemas.columns import view
from lachesis.schemas.errors import DataError

K = 2
ROWS = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2, 3, 4, 7, 8], [9, 9], [1, 2, 3], [1, 2, 3, 4, 7, 8]]
"""Forks of a fork, another context, a sequence with which others begin, and one that is another's twin."""


class Server:
    """Its logprobs depend on all tokens before; `refused`: tokens of whose requests it makes nothing."""

    def __init__(self, refused=(), error=DataError):
        self.refused = {tuple(tokens) for tokens in refused}
        self.error = error
        self.requests = []

    async def current(self):
        return self

    async def prompt_tree_logprobs(self, paths, k):
        self.requests.append([(list(path.own), path.shared) for path in paths])
        await anyio.lowlevel.checkpoint()
        if self.refused & {path.tokens for path in paths}:
            raise self.error("no")
        return [right(path.tokens, k, path.shared) for path in paths]

    async def prompt_top_logprobs(self, tokens, k, start=0):
        self.requests.append((list(tokens), start))
        await anyio.lowlevel.checkpoint()
        if tuple(tokens) in self.refused:
            raise self.error("no")
        return right(tokens, k, start)


def right(tokens, k, start=0):
    places = range(start, len(tokens))
    logprobs = [-(hash(tuple(tokens[: t + 1])) % 97) / 10 - 0.1 if t else 0.0 for t in places]
    ids = [[hash((i, *tokens[:t])) % 50 if t else -1 for i in range(k)] for t in places]
    top = [[-1.0 - i if t else -np.inf for i in range(k)] for t in places]
    none = (len(places), k)
    return PromptTopLogprobs(
        np.array(logprobs, np.float32), np.array(ids, np.int32).reshape(none), np.array(top, np.float32).reshape(none)
    )


@pytest.fixture
def group(lab):
    return group_of(lab, ROWS)


async def score(server, group, **capabilities):
    teacher = Teacher(SimpleNamespace(current=server.current), "m", None, K, **capabilities)
    return await teacher.score(group)


def check(answer, group, missing=()):
    total = group.sequences.n_tokens
    logprobs = view(answer.columns["logprobs"], "float32", total, "logprobs")
    ids = view(answer.columns["topk_ids"], "int32", total, "topk_ids", K).reshape(total, K)
    cuts = group.sequences.cuts()
    assert answer.missing == list(missing)
    for i, row in enumerate(ROWS):
        mine = slice(cuts[i], cuts[i + 1])
        expected = right(row, K)
        if i in missing:
            assert not logprobs[mine].any()
            assert (ids[mine] == -1).all()
        else:
            assert logprobs[mine] == pytest.approx(expected.logprobs)
            assert (ids[mine] == expected.ids).all()


async def test_each_path_is_requested_once_and_the_teacher_reads_no_more_than_its_own_tokens(group):
    server = Server()
    answer = await score(server, group)
    check(answer, group)
    assert sorted(server.requests) == [([1, 2, 3, 4, 5], 0), ([1, 2, 3, 4, 7, 8], 4), ([1, 2, 3, 6], 3), ([9, 9], 0)]
    assert answer.requested_tokens == sum(len(tokens) for tokens, _ in server.requests)


@pytest.mark.parametrize(
    ("refused", "missing", "again"),
    [
        ([[1, 2, 3, 6]], [1], []),
        ([[1, 2, 3, 4, 5]], [0], [([1, 2, 3, 4, 7, 8], 0)]),
        ([[1, 2, 3, 4, 7, 8]], [2, 5], []),
        ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 7, 8]], [0, 2, 5], [([1, 2, 3, 6], 0)]),
        ([[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2, 3, 4, 7, 8]], [0, 1, 2, 5], [([1, 2, 3], 0)]),
    ],
)
async def test_a_refused_path_costs_its_sequences_alone(group, refused, missing, again):
    server = Server(refused)
    check(await score(server, group), group, missing)
    assert server.requests[4:] == again


async def test_a_server_that_scores_branches_has_one_request_and_each_distinct_token_once(group):
    server = Server()
    answer = await score(server, group, branches=True)
    check(answer, group)
    assert server.requests == [[([1, 2, 3, 4, 5], 0), ([7, 8], 4), ([6], 3), ([9, 9], 0)]]
    assert answer.requested_tokens == 10


@pytest.mark.parametrize("error", [DataError, UnreadableAnswerError])
async def test_where_one_request_cannot_have_all_paths_each_has_its_own(group, error):
    server = Server([[1, 2, 3, 4, 5]], error)
    teacher = Teacher(SimpleNamespace(current=server.current), "m", None, K, branches=True)
    for _ in range(3 if error is UnreadableAnswerError else 0):
        with pytest.raises(UnreadableAnswerError):
            await teacher.score(group)
    server.requests.clear()
    check(await teacher.score(group), group, [0])
    assert len(server.requests[0]) == 4, "the tree"
    assert sorted(server.requests[1:5]) == [
        ([1, 2, 3, 4, 5], 0), ([1, 2, 3, 4, 7, 8], 4), ([1, 2, 3, 6], 3), ([9, 9], 0),
    ]  # fmt: skip
    assert server.requests[5:] == [([1, 2, 3, 4, 7, 8], 0)]
    with pytest.raises(InfrastructureError):
        await score(Server([[9, 9]], InfrastructureError), group, branches=True)


async def test_an_unavailable_server_is_no_refusal_and_an_answer_without_sense_is_one_in_the_end(group):
    with pytest.raises(InfrastructureError):
        await score(Server([[9, 9]], InfrastructureError), group)
    server = Server([[1, 2, 3, 4, 5]], UnreadableAnswerError)
    teacher = Teacher(SimpleNamespace(current=server.current), "m", None, K)
    for _ in range(3):
        with pytest.raises(UnreadableAnswerError):
            await teacher.score(group)
    check(await teacher.score(group), group, [0])
