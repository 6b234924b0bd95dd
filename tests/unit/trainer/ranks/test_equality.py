"""Several ranks train as one does: weights, optimizer, metrics and decisions, within rounding."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "one_rank.py"
FIRST = [[0, [19, 12, 16], 0.5], [1, [9, 6], 1.0], [2, [11, 5, 7, 8], 0.7]]
SECOND = [[3, [17, 17], 0.4], [4, [6, 9, 30], 0.9]]
ONE_GROUP = [[5, [14, 9, 7], 0.8]]  # others have nothing to train
UNSOUND = [[6, [9, 12], 1.0], [7, [8, 8], 3e38], [8, [12, 5], 0.5]]  # its loss overflows
RATE = {"learning_rate": 1e-3, "warmup_steps": 0}
SMALL = {**RATE, "max_tokens_per_microbatch": 40}


def train(folder, ranks, cases):
    """Train the cases in as many processes as there are ranks."""
    arguments = [str(ranks), str(folder), json.dumps(cases)]
    processes = []
    for rank in range(ranks):
        with (folder / f"{rank}").open("wb") as log:
            processes.append(subprocess.Popen([sys.executable, str(SCRIPT), str(rank), *arguments], stderr=log))
    for rank, process in enumerate(processes):
        assert process.wait() == 0, (folder / f"{rank}").read_text()
    return folder


def found_in(folder, name):
    """Weights, moments and metrics of a case."""
    return load_file(folder / f"{name}.safetensors"), json.loads((folder / f"{name}.json").read_text())


CASES = {
    "data parallel": {"learner": RATE, "before": [SECOND], "batches": [FIRST, ONE_GROUP, SECOND]},
    "sharded": {"learner": SMALL, "sharding": "full", "before": [SECOND], "batches": [FIRST, ONE_GROUP, SECOND]},
    "sharded, a group left out": {
        "learner": {**SMALL, "recompute_layers": True, "loss": {"aggregation": "sequence_mean", "kl_coef": 0.1}},
        "sharding": "full",
        "batches": [FIRST, UNSOUND, SECOND],
    },
    "a group left out": {
        "learner": {**RATE, "loss": {"aggregation": "constant_length", "kl_coef": 0.1}},
        "batches": [FIRST, UNSOUND, SECOND],
    },
    "adapters": {"learner": RATE, "lora": {"rank": 4}, "batches": [FIRST, SECOND]},
    "routed": {
        "learner": RATE,
        "inputs": [{"input": "routed_experts"}],
        "before": [SECOND],
        "batches": [FIRST, ONE_GROUP],
    },
    "routed, sharded": {
        "learner": {**SMALL, "recompute_layers": True},
        "inputs": [{"input": "routed_experts"}],
        "sharding": "full",
        "batches": [FIRST, ONE_GROUP, SECOND],
    },
    "out of memory": {"learner": RATE, "memory_of_last_rank": 30, "batches": [FIRST, ONE_GROUP, SECOND]},
    "no memory at all": {
        "learner": {**RATE, "recompute_layers": False},
        "memory_of_last_rank": 7,
        "batches": [FIRST],
    },
    "shortened": {
        "learner": {**RATE, "learning_rate": 0.05, "max_step_kl": 0.01, "on_large_step": "shorten"},
        "sharding": "full",
        "batches": [FIRST, SECOND],
    },
    "refused": {
        "learner": {**RATE, "learning_rate": 0.05, "max_step_kl": 0.01, "on_large_step": "refuse"},
        "sharding": "full",
        "batches": [FIRST],
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Results by number of ranks."""
    cases = dict(CASES)
    if find_spec("peft") is None:
        del cases["adapters"]
    found = {ranks: tmp_path_factory.mktemp(f"ranks-{ranks}") for ranks in (1, 2, 3)}
    train(found[1], 1, {name: {**case, "sharding": "none"} for name, case in cases.items()})
    train(found[2], 2, cases)
    train(found[3], 3, {name: cases[name] for name in ("data parallel", "sharded")})
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one(name, folders):
    if name == "adapters":
        pytest.importorskip("peft")
    alone, told = found_in(folders[1], name)
    both, told_by_both = found_in(folders[2], name)
    _assert_close(both, alone)
    assert len(told) == len(told_by_both) == len(CASES[name]["batches"])
    for one, two in zip(told, told_by_both, strict=True):
        if isinstance(one, str):
            assert one.split("KL")[0].split("tokens")[-1] == two.split("KL")[0].split("tokens")[-1]
            continue
        assert one["dropped"] == two["dropped"]
        assert one["step_share"] == two["step_share"]
        exact = {"step", "sequences", "tokens", "trainable_tokens"}
        assert {key: one[key] for key in exact} == {key: two[key] for key in exact}
        for key, value in one.items():
            if isinstance(value, float) and key != "padding":
                assert two[key] == pytest.approx(value, rel=2e-3, abs=1e-5), key


def test_two_ranks_decide_as_one(folders):
    assert found_in(folders[2], "a group left out")[1][1]["dropped"] == [7]
    assert found_in(folders[2], "sharded, a group left out")[1][1]["dropped"] == [7]
    assert any(step["step_share"] < 1 for step in found_in(folders[2], "shortened")[1])
    assert "undone" in found_in(folders[2], "refused")[1][0]
    divided = [step["microbatch_tokens"] for step in found_in(folders[2], "out of memory")[1]]
    assert divided[0] <= 30
    assert divided == divided[:1] * 3
    assert "one sequence of 13 tokens alone" in found_in(folders[2], "no memory at all")[1][0]


@pytest.mark.parametrize("name", ["data parallel", "sharded"])
def test_three_ranks_equal_one_where_the_third_has_nothing(name, folders):
    _assert_close(found_in(folders[3], name)[0], found_in(folders[1], name)[0])


def _assert_close(found, expected):
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        # AdamW divides by the root of the second moment, so rounding may turn where a gradient is nearly 0
        torch.testing.assert_close(found[key], tensor, rtol=2e-3, atol=2e-5, msg=lambda text, key=key: f"{key}: {text}")
