"""Defines the policy `rl`: the settings and values that users of Atropos' agent tools know."""

from typing import Any

import msgspec

from lachesis.pipeline.config.policy import ConfigPolicy, FieldRule

__all__ = ["RL"]


def _locked(value: Any = msgspec.UNSET) -> FieldRule:
    return FieldRule(locked=True, value=value)


RL = ConfigPolicy(
    preset="rl",
    others="free",
    fields={
        "model": _locked(),
        "gateway.host": _locked(),
        "gateway.port": _locked(),
        "environments.*.longest_tokens": _locked(8192),
        "environments.*.concurrency": _locked(2048),
        "training.steps": _locked(2500),
        "training.lora.rank": _locked(32),
        "training.learner.learning_rate": _locked(4e-5),
        "training.learner.max_tokens_per_microbatch": _locked(9000),
        "environments.*.samples": FieldRule(value=16),
        "batching.batch_size": FieldRule(value=128),
    },
    names={
        "tokenizer_name": "model",
        "rollout_server_url": "gateway.port",
        "max_token_length": "environments.*.longest_tokens",
        "max_num_workers": "environments.*.concurrency",
        "total_steps": "training.steps",
        "lora_rank": "training.lora.rank",
        "learning_rate": "training.learner.learning_rate",
        "max_token_trainer_length": "training.learner.max_tokens_per_microbatch",
        "group_size": "environments.*.samples",
        "batch_size": "batching.batch_size",
        "steps_per_eval": "evaluate.every_steps",
        "use_wandb": "training.wandb.project",
        "wandb_project": "training.wandb.project",
        "wandb_name": "run",
    },
)
