"""Brings every rank to where rank 0 is: model, weights, AdamW's state, position in the ledger.

Rank 0 alone reads the model and the checkpoint, so the others need no folder, and the number of ranks may change
between two lives of a trainer. Guarantees that all ranks begin with the same bits and the same settings.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lachesis.pipeline.common.trainability import TrainerLimits
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.model.policy import PolicyModel
from lachesis.pipeline.model.tensors import vocabulary_of
from lachesis.pipeline.trainer.adapters import with_adapters
from lachesis.pipeline.trainer.collectives import Ranks
from lachesis.pipeline.trainer.config import TrainingConfig
from lachesis.pipeline.trainer.inputs.model_inputs import load_inputs
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.sequences import trainer_limits
from lachesis.pipeline.trainer.sharded_policy import ShardedPolicy, shard_like

__all__ = ["RankStart", "join_as_follower", "join_as_leader", "rank_start"]

_ENTRIES = ("step", "exp_avg", "exp_avg_sq")


class RankStart(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's initial state, as rank 0 sends it."""

    run: str
    training: TrainingConfig
    model: str
    """The model's configuration as JSON, as transformers write it."""
    attention: str
    seed: int
    tensors: str
    """SHA-256 over names and shapes of the model's parameters and buffers."""
    steps: int
    entries: int
    digest: str
    """Position in the ledger."""
    microbatch_tokens: int
    """Most padded tokens of a micro-batch, which may be fewer than the settings allow: see `StepFit`."""
    pad_id: int
    tokenizer_hash: str
    vocabulary: int | None
    has_moments: bool
    has_reference: bool

    @property
    def position(self) -> LedgerPosition:
        return LedgerPosition(self.entries, self.digest)

    @property
    def limits(self) -> TrainerLimits:
        return trainer_limits(self.tokenizer_hash, self.vocabulary, self.training.reads, self.training.learner)

    @property
    def shuffle_seed(self) -> int | None:
        return self.seed if self.training.shuffle_advantages else None


def rank_start(
    policy: PolicyModel, learner: Learner, position: LedgerPosition, *, run: str, training: TrainingConfig, seed: int
) -> RankStart:
    """Return the initial state of the other ranks: that of `policy` and `learner`."""
    config = policy.model.config
    return RankStart(
        run=run,
        training=training.without_extensions(),
        model=config.to_json_string(use_diff=False),
        attention=config._attn_implementation,  # noqa: SLF001 - the one in force, which the file does not hold
        seed=seed,
        tensors=_tensors_digest(policy.model),
        steps=learner.steps,
        microbatch_tokens=learner.fit.tokens,
        entries=position.entries,
        digest=position.digest,
        pad_id=policy.tokenizer.pad_token_id or 0,
        tokenizer_hash=policy.tokenizer_hash,
        vocabulary=vocabulary_of(policy.model),
        has_moments=bool(learner.optimizer.state),
        has_reference=learner.reference is not None,
    )


def join_as_leader(
    policy: PolicyModel, learner: Learner, start: RankStart, ranks: Ranks, device: torch.device
) -> Learner:
    """Send `learner`'s state to the other ranks, and return rank 0's learner. A collective."""
    moments = (
        {name: dict(learner.optimizer.state[each]) for name, each in _trained(policy.model)}
        if start.has_moments
        else {}
    )
    for entries in moments.values():
        entries["step"] = entries["step"].cpu()  # where the others take it
    return _join(policy.model, learner.reference, moments, start, ranks=ranks, device=device)


def join_as_follower(start: RankStart, ranks: Ranks, device: torch.device) -> Learner:
    """Take over rank 0's state, and return the learner of this rank. A collective.

    Raises `StartupError` when this installation makes another model of the same configuration.
    """
    model = _empty_model(start)
    reference = _empty_model(start, lora=False).to(device).requires_grad_(False) if start.has_reference else None
    if _tensors_digest(model) != start.tensors:
        raise StartupError(
            "this rank's transformers make other tensors of the model's configuration than those of rank 0: install "
            "the same versions on all machines"
        )
    if start.training.sharding == "none":
        model.to(device)
    moments = {}
    if start.has_moments:
        moments = {
            name: {entry: torch.zeros(()) if entry == "step" else torch.zeros_like(each) for entry in _ENTRIES}
            for name, each in _trained(model)
        }
    learner = _join(model, reference, moments, start, ranks=ranks, device=device)
    policy = PolicyModel(learner.model, None, start.tokenizer_hash)
    learner.inputs = load_inputs(start.training.inputs, policy, learner.trained)
    return learner


def _join(
    model: Any,
    reference: Any,
    moments: dict[str, dict[str, torch.Tensor]],
    start: RankStart,
    *,
    ranks: Ranks,
    device: torch.device,
) -> Learner:
    for tensor in (*_tensors(model), *(_tensors(reference) if reference is not None else ())):
        ranks.broadcast(tensor)
    for entries in moments.values():
        for entry in _ENTRIES:
            ranks.broadcast(entries[entry])
    sharded = None
    if start.training.sharding == "full":
        own = copy.deepcopy(model) if ranks.rank == 0 else model  # rank 0 keeps one whole, to publish and to save
        sharded = ShardedPolicy(own, start.training.learner, ranks, device)
    learner = Learner(
        model, start.training.learner, steps=start.steps, reference=reference, ranks=ranks, sharded=sharded
    )
    learner.fit = learner.fit.beginning_with(start.microbatch_tokens, device.type)
    for name, parameter in _trained(learner.trained):
        if name in moments:
            learner.optimizer.state[parameter] = {
                entry: value if entry == "step" else shard_like(value, parameter)
                for entry, value in moments[name].items()
            }
    return learner


def _empty_model(start: RankStart, *, lora: bool = True) -> Any:
    config = AutoConfig.for_model(**json.loads(start.model))
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=start.attention, trust_remote_code=False
    ).eval()
    adapters = start.training.lora if lora else None
    return model if adapters is None else with_adapters(model, adapters, start.seed)


def _tensors(model: Any) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _trained(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def _tensors_digest(model: Any) -> str:
    named = [*model.named_parameters(), *model.named_buffers()]
    return hashlib.sha256(json.dumps([[name, list(tensor.shape)] for name, tensor in named]).encode()).hexdigest()
