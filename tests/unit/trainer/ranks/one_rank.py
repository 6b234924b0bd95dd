"""One rank of a small trainer, as a process: trains its shares of some batches, and writes what came of it.

    python one_rank.py RANK RANKS FOLDER CASES

CASES is JSON, by name: `learner` (settings), `sharding`, `lora`, `inputs`, `device` ("cpu" without; the first case's is
that of all), `memory_of_last_rank` (padded tokens of a pass), and batches of groups (number, lengths, advantage): those
that rank 0 trains `before` the others join, and those that all do. Ranks on a GPU share it. Rank 0 writes into FOLDER.
With `inputs` the model is a mixture of experts, and each token has recorded ones.
"""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from lachesis.pipeline.config.run import TrainingConfig
from lachesis.pipeline.errors import OutOfMemoryError
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.model.device import prepare_device
from lachesis.pipeline.model.policy import PolicyModel, build_tiny_policy
from lachesis.pipeline.model.tensors import policy_tensors
from lachesis.pipeline.trainer.adapters import with_adapters
from lachesis.pipeline.trainer.collectives import ALONE, Ranks
from lachesis.pipeline.trainer.finite_step import step_on_finite_groups
from lachesis.pipeline.trainer.gather import gather_optimizer, gather_weights, optimizer_state
from lachesis.pipeline.trainer.inputs.model_inputs import load_inputs
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.ranks.join import join_as_follower, join_as_leader, rank_start
from lachesis.pipeline.trainer.ranks.place import RankPlace
from lachesis.pipeline.trainer.ranks.process_group import meet, open_process_group
from lachesis.pipeline.trainer.sequences import TrainableBatch
from lachesis.pipeline.trainer.training_sequence import TrainingSequence
from lachesis.schemas.errors import DataError
from lachesis.schemas.ledger import GroupRef

LAYERS, EXPERTS, K = 2, 4, 2


def mixture_of_experts(policy: PolicyModel) -> PolicyModel:
    """The same with a mixture-of-experts model."""
    config = Qwen3MoeConfig(
        vocab_size=len(policy.tokenizer), hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
        num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=EXPERTS,
        num_experts_per_tok=K, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return policy._replace(model=Qwen3MoeForCausalLM(config).eval())


def experts_of(group: int, row: int, length: int) -> NDArray[np.int64]:
    """Random experts of a sequence, [T, layers, k]."""
    draw = np.random.default_rng([group, row])
    chosen = [draw.permutation(EXPERTS)[:K] for _ in range(length * LAYERS)]
    return np.stack(chosen).reshape(length, LAYERS, K)


def limit_memory(model: Any, tokens: int | None) -> None:
    """Let passes over more than so many padded tokens run out of memory."""

    def check(_: Any, args: tuple[torch.Tensor]) -> None:
        if tokens is not None and torch.is_grad_enabled() and args[0].shape[:2].numel() > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    if tokens is not None:
        model.model.layers[0].register_forward_pre_hook(check)


def sequences_of(group: int, lengths: list[int], advantage: float) -> list[TrainingSequence]:
    """Random sequences of one group."""
    draw = np.random.default_rng(group)
    return [
        TrainingSequence(
            tokens=draw.integers(5, 100, length).astype(np.int32),
            loss_mask=np.arange(length) >= 2,
            logprobs=-draw.uniform(3.5, 5.5, length).astype(np.float32),
            advantage=advantage * (-1.0) ** row,
            prepared=(experts_of(group, row, length),),
            group_id=f"{group:032x}",
        )
        for row, length in enumerate(lengths)
    ]


def main(rank: int, ranks: int, folder: Path, cases: dict[str, Any]) -> None:
    """Train all cases."""
    device = prepare_device(next(iter(cases.values())).get("device", "cpu"), 1)
    group = ALONE
    if ranks > 1:
        place = RankPlace(rank, rank, ranks, f"file://{folder}/store", started=True)
        group = open_process_group(meet(place, 120), place, device, 120, "gloo")
    for name, given in cases.items():
        train_case(given, group, folder / name, device)


def train_case(given: dict[str, Any], group: Ranks, result: Path, device: torch.device) -> None:
    """Train, and let rank 0 write weights, optimizer and metrics."""
    training = msgspec.convert(
        {k: given[k] for k in ("learner", "sharding", "lora", "inputs") if k in given}, TrainingConfig
    )
    policy = build_tiny_policy(0, width=32, layers=2, max_length=48)
    if training.inputs:
        policy = mixture_of_experts(policy)
    if training.lora is not None:
        policy = policy._replace(model=with_adapters(policy.model, training.lora, 0))
    reference = None
    if training.learner.loss.kl_coef and training.lora is None:
        reference = build_tiny_policy(1, width=32, layers=2, max_length=48).model.requires_grad_(False)
    policy.model.to(device)
    learner = Learner(policy.model, training.learner, reference=reference)
    learner.inputs = load_inputs(training.inputs, policy, learner.trained)
    for batch in given.get("before", []):  # rank 0 resumes, so its moments have to reach the others
        _train(learner, batch, ALONE)
    if group.size > 1:
        start = rank_start(policy, learner, LedgerPosition(), run="r", training=training, seed=0)
        if group.rank == 0:
            learner = join_as_leader(policy, learner, start, group, device)
            learner.inputs = load_inputs(training.inputs, policy, learner.trained)
        else:
            start = msgspec.json.decode(msgspec.json.encode(start), type=type(start))
            learner = join_as_follower(start, group, device)
    if group.rank == group.size - 1:
        limit_memory(learner.model, given.get("memory_of_last_rank"))
    found = [_train(learner, batch, group) for batch in given["batches"]]
    gather_weights(learner)
    gather_optimizer(learner)
    if group.rank == 0:
        tensors = {f"weights/{name}": tensor for name, tensor in policy_tensors(policy.model).items()}
        for name, entries in optimizer_state(learner).items():
            tensors |= {f"{entry}/{name}": value for entry, value in entries.items()}
        save_file(
            {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}, f"{result}.safetensors"
        )
        Path(f"{result}.json").write_text(json.dumps(found))


def _train(learner: Learner, batch: Any, group: Ranks) -> Any:
    refs = [
        GroupRef(
            group=f"{at:032x}",
            seq=at,
            env="e",
            sequences=len(lengths),
            tokens=sum(lengths),
            policy_step=0,
            advantages=[],
        )
        for at, lengths, _ in batch
    ]
    own = [(at, lengths, advantage) for place, (at, lengths, advantage) in enumerate(batch) if _mine(place, group)]
    sequences = [each for item in own for each in sequences_of(*item)]
    try:
        selected, metrics, _ = step_on_finite_groups(learner, TrainableBatch(refs, sequences, {}), 0)
    except (DataError, OutOfMemoryError) as error:
        learner.steps += 1
        return str(error)
    return {**msgspec.to_builtins(metrics), "seconds": 0.0, "dropped": sorted(selected.dropped)}


def _mine(place: int, group: Ranks) -> bool:
    return group.size == 1 or min(place, 1) == group.rank  # rank 0 has the first group, rank 1 all others, others none


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
