"""One rank of a small trainer, as a process: trains its shares of some batches, and writes what came of it.

    python one_rank.py RANK RANKS FOLDER CASES

CASES is JSON, by name: `learner` (settings), `sharding`, `lora`, and batches of groups (number, lengths, advantage):
those that rank 0 trains `before` the others join, and those that all do. Rank 0 writes into FOLDER.
"""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from lachesis.pipeline.config.run import TrainingConfig
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.model.policy import build_tiny_policy
from lachesis.pipeline.model.tensors import policy_tensors
from lachesis.pipeline.training.adapters import with_adapters
from lachesis.pipeline.training.learner import Learner, train_soundly
from lachesis.pipeline.training.ranks.collectives import ALONE, Ranks
from lachesis.pipeline.training.ranks.gather import gather_optimizer, gather_weights, optimizer_state
from lachesis.pipeline.training.ranks.join import join_as_follower, join_as_leader, rank_start
from lachesis.pipeline.training.ranks.place import RankPlace
from lachesis.pipeline.training.ranks.process_group import meet, open_process_group
from lachesis.pipeline.training.sequences import TrainableBatch
from lachesis.pipeline.training.training_sequence import TrainingSequence
from lachesis.schemas.errors import DataError
from lachesis.schemas.ledger import GroupRef

CPU = torch.device("cpu")


def sequences_of(group: int, lengths: list[int], advantage: float) -> list[TrainingSequence]:
    """Random sequences of one group."""
    draw = np.random.default_rng(group)
    return [
        TrainingSequence(
            tokens=draw.integers(5, 100, length).astype(np.int32),
            loss_mask=np.arange(length) >= 2,
            logprobs=-draw.uniform(3.5, 5.5, length).astype(np.float32),
            advantage=advantage * (-1.0) ** row,
            group_id=f"{group:032x}",
        )
        for row, length in enumerate(lengths)
    ]


def main(rank: int, ranks: int, folder: Path, cases: dict[str, Any]) -> None:
    """Train all cases."""
    torch.set_num_threads(1)
    group = ALONE
    if ranks > 1:
        place = RankPlace(rank, rank, ranks, f"file://{folder}/store", started=True)
        group = open_process_group(meet(place, 120), place, CPU, 120)
    for name, given in cases.items():
        train_case(given, group, folder / name)


def train_case(given: dict[str, Any], group: Ranks, result: Path) -> None:
    """Train, and let rank 0 write weights, optimizer and metrics."""
    training = msgspec.convert({k: given[k] for k in ("learner", "sharding", "lora") if k in given}, TrainingConfig)
    policy = build_tiny_policy(0, width=32, layers=2, max_length=48)
    if training.lora is not None:
        policy = policy._replace(model=with_adapters(policy.model, training.lora, 0))
    reference = None
    if training.learner.loss.kl_coef and training.lora is None:
        reference = build_tiny_policy(1, width=32, layers=2, max_length=48).model.requires_grad_(False)
    learner = Learner(policy.model, training.learner, reference=reference)
    for batch in given.get("before", []):  # rank 0 resumes, so its moments have to reach the others
        _train(learner, batch, ALONE)
    if group.size > 1:
        start = rank_start(policy, learner, LedgerPosition(), run="r", training=training, seed=0)
        if group.rank == 0:
            learner = join_as_leader(policy, learner, start, group, CPU)
        else:
            start = msgspec.json.decode(msgspec.json.encode(start), type=type(start))
            learner = join_as_follower(start, group, CPU)
    found = [_train(learner, batch, group) for batch in given["batches"]]
    gather_weights(learner)
    gather_optimizer(learner)
    if group.rank == 0:
        tensors = {f"weights/{name}": tensor for name, tensor in policy_tensors(policy.model).items()}
        for name, entries in optimizer_state(learner).items():
            tensors |= {f"{entry}/{name}": value for entry, value in entries.items()}
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, f"{result}.safetensors")
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
        selected, metrics, _ = train_soundly(learner, TrainableBatch(refs, sequences, {}), 0)
    except DataError as error:
        learner.steps += 1
        return str(error)
    return {**msgspec.to_builtins(metrics), "seconds": 0.0, "dropped": sorted(selected.dropped)}


def _mine(place: int, group: Ranks) -> bool:
    return group.size == 1 or min(place, 1) == group.rank  # rank 0 has the first group, rank 1 all others, others none


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
