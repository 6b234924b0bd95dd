"""Rows that begin alike compute that once: gradients of a packed tree are those of each path by itself."""

import math

import numpy as np
import pytest
import torch
from contract.model_families import family_model

from lachesis.pipeline.model.packed_attention import install_packed_attention, packed_pass
from lachesis.pipeline.model.packed_rows import PackedRows, SharedStart, shared_starts
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.packed_batch import pack
from lachesis.pipeline.trainer.training_sequence import TrainingSequence

EXACT, WINDOWED = ["qwen3", "gpt2", "smollm3"], ["mistral", "olmo3", "llama4"]
SHARING = [*EXACT, "glm4_moe"]
TREE = [[0], [0, 1], [0, 2], [0, 2, 3], [0, 2, 4], [5], [0]]
"""Paths of the tree as nodes: a fork of a fork, a path that ends where others go on, and one that is another's twin."""
SIZES = [20, 9, 4, 7, 3, 11]
DISTINCT = sum(SIZES)

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own, of configurations as small as these


def paths():
    draw = np.random.default_rng(0)
    nodes = [draw.integers(3, 40, size) for size in SIZES]
    for number, node in enumerate(nodes):
        node[0] = 41 + number  # so that nothing is shared beyond a fork
    return [np.concatenate([nodes[node] for node in path]) for path in TREE]


def padded(rows):
    tokens_BT = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for row, tokens in enumerate(rows):
        tokens_BT[row, : len(tokens)] = torch.from_numpy(tokens)
    return tokens_BT


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def test_what_rows_have_in_common_is_found_and_laid_out_once():
    rows = paths()
    lengths = [len(row) for row in rows]
    shared = shared_starts(padded(rows), lengths, ["g"] * len(rows))
    assert shared == [(0, 0), (0, 20), (0, 20), (2, 24), (2, 24), (0, 0), (0, 20)]
    found = PackedRows.of(lengths, max(lengths), lambda values: values, shared)
    assert found.tokens == DISTINCT
    packed_1N = found.packed(padded(rows))
    assert torch.equal(packed_1N[0][found.place_P].view(len(rows), -1)[3, :31], torch.from_numpy(rows[3]))
    assert found.positions_1N[0, : 20 + 9].tolist() == list(range(29))
    assert found.positions_1N[0, 29:33].tolist() == [20, 21, 22, 23]
    for at_G, tokens_G in found.copies:
        assert len(set(tokens_G.tolist())) == len(tokens_G)
        assert torch.equal(found.spread_G[at_G], tokens_G)
    copies = sum(len(at_G) for at_G, _ in found.copies)
    assert copies + DISTINCT == sum(lengths)
    alone = shared_starts(padded(rows), lengths, ["", "a", "b", "c", "d", "e", "f"])
    assert alone == [SharedStart()] * len(rows), "rows of different groups share nothing"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", EXACT)
def test_gradients_of_a_tree_are_those_of_each_path_apart_at_the_cost_of_its_distinct_tokens(name, attention):
    model = family_model(name).double()
    model.set_attn_implementation(attention)
    rows, weights = paths(), torch.linspace(-1, 1, 40, dtype=torch.float64)
    expected = 0.0
    for tokens in rows:
        logprobs = model(input_ids=torch.from_numpy(tokens)[None]).logits[0, :-1].log_softmax(-1)
        chosen = logprobs.gather(1, torch.from_numpy(tokens)[1:, None])[:, 0]
        expected = expected + (chosen * weights[: len(chosen)]).sum()
    apart = gradients(model, expected)

    install_packed_attention(model, on=True)
    lengths, tokens_BT = [len(row) for row in rows], padded(rows)
    shared = shared_starts(tokens_BT, lengths, ["g"] * len(rows))
    packed = PackedRows.of(lengths, tokens_BT.shape[1], lambda values: values, shared)
    seen = []
    head = model.get_output_embeddings()
    watch = head.register_forward_hook(lambda _, given, __: seen.append(given[0].shape[-2]))
    with packed_pass(packed):
        logits = model(input_ids=packed.packed(tokens_BT), position_ids=packed.positions_1N, use_cache=False).logits[0]
    watch.remove()
    there = torch.arange(tokens_BT.shape[1] - 1) < torch.tensor(lengths)[:, None] - 1
    at = there.flatten().nonzero()[:, 0]
    logprobs = logits[packed.packed_places(at)].log_softmax(-1).gather(1, tokens_BT[:, 1:].flatten()[at][:, None])[:, 0]
    found = gradients(model, (logprobs * weights[at % (tokens_BT.shape[1] - 1)]).sum())

    assert seen == [DISTINCT]
    assert found.keys() == apart.keys()
    for weight, gradient in apart.items():
        apart_by = (found[weight] - gradient).abs().max() / gradient.abs().max()
        assert apart_by <= 1e-6, weight  # norms and rotations are float32 in some families


def a_step(name, **settings):
    model = family_model(name)
    learner = Learner(model, LearnerConfig(learning_rate=1e-3, warmup_steps=0, **settings))
    batch = pack(
        [
            TrainingSequence(
                tokens=tokens.astype(np.int32),
                loss_mask=np.arange(len(tokens)) > 10,  # of a shared token each row has a logprob of its own
                logprobs=np.full(len(tokens), -math.log(40), np.float32),
                advantage=(-1.0) ** row,
                group_id="g",
                sample=row // 2,
            )
            for row, tokens in enumerate(paths())
        ]
    )
    return learner.step(batch)


@pytest.mark.parametrize("name", SHARING + WINDOWED)
@pytest.mark.parametrize("settings", [{}, {"max_tokens_per_microbatch": 60}, {"recompute_layers": True}])
def test_a_step_on_trees_is_that_on_rows_by_themselves(name, settings):
    tree, rows = a_step(name, **settings, pack_trees=True), a_step(name, **settings)
    assert tree.packed
    assert rows.shared == 0
    tokens = sum(map(len, paths()))
    if name in WINDOWED:
        assert tree.shared == 0, "windows and chunks take one place for each token"
    elif settings.keys() != {"max_tokens_per_microbatch"}:
        assert tree.shared == pytest.approx(1 - DISTINCT / tokens)
    assert tree.loss == pytest.approx(rows.loss, rel=1e-5, abs=1e-6)
    assert tree.grad_norm == pytest.approx(rows.grad_norm, rel=1e-4)
    assert tree.entropy == pytest.approx(rows.entropy, rel=1e-5)
    assert tree.step_kl == pytest.approx(rows.step_kl, rel=1e-2, abs=1e-6)
