"""A tree of prompts: every distinct beginning is on one path, and what a path shares is on the path before it."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.inference.prompt_tree import prompt_tree

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), max_size=8)


def beginnings(prompts):
    return {prompt[:n] for prompt in prompts for n in range(1, len(prompt) + 1)}


@given(PROMPTS)
def test_the_paths_own_tokens_are_each_distinct_beginning_once(prompts):
    paths = prompt_tree(prompts)
    own = [path.tokens[:n] for path in paths for n in range(path.shared + 1, len(path.tokens) + 1)]
    assert len(own) == len(set(own))
    assert set(own) == beginnings(prompts)
    for before, path in pairwise(paths):
        assert path.tokens[: path.shared] == before.tokens[: path.shared]
        assert path.own == path.tokens[path.shared :]
    for prompt in prompts:  # the first path that is not before it begins with it
        path = next(path for path in paths if path.tokens >= prompt)
        assert path.tokens[: len(prompt)] == prompt


def test_a_prompt_that_another_begins_with_is_no_path_of_its_own():
    paths = prompt_tree([(1, 2), (1, 2, 3, 4), (1, 2, 3, 5), (1,), (1, 2)])
    assert [(path.tokens, path.shared) for path in paths] == [((1, 2, 3, 4), 0), ((1, 2, 3, 5), 3)]
