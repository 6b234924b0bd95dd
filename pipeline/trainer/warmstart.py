"""Supervised warm start: teach a fresh policy the format of the task, and the task itself imperfectly.

Given a policy and (prompt, answer) pairs, it trains the policy in place for a fixed number of steps on the answer's
tokens only (and the end token), and returns the loss of every step. The result is a function of (initial weights,
pairs, configuration, number of torch threads).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import torch
from torch.nn import functional

from lachesis.pipeline.model.context import context_length
from lachesis.pipeline.model.policy import PolicyModel
from lachesis.pipeline.trainer.config import WarmStartConfig
from lachesis.schemas.errors import DataError

__all__ = ["warm_start"]


def warm_start(policy: PolicyModel, pairs: Iterable[tuple[str, str]], config: WarmStartConfig) -> list[float]:
    """Train `policy.model` in place on next-token cross-entropy of the answers.

    Return the loss (nats) of each step.

    The learning rate rises linearly over a tenth of the steps and falls along a cosine to a tenth of its value.
    Raises DataError when there are no pairs or a pair does not fit into the model's context.
    """
    model = policy.model
    draw = random.Random(config.seed)
    examples = [_encode(policy, prompt, _with_slip(answer, config.slips, draw)) for prompt, answer in pairs]
    if not examples:
        raise DataError("the warm start got no (prompt, answer) pairs; the task's iterator was empty.")
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0)
    losses = []
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * _schedule(step, config.steps)
        tokens_BT, labels_BT = _collate(draw.choices(examples, k=config.batch_size), policy.tokenizer.pad_token_id or 0)
        logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits
        loss = functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=-100)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def _with_slip(answer: str, share: float, draw: random.Random) -> str:
    """With probability `share`, the answer with two neighbouring characters exchanged."""
    if draw.random() >= share or len(answer) < 2:
        return answer
    at = draw.randrange(len(answer) - 1)
    return answer[:at] + answer[at + 1] + answer[at] + answer[at + 2 :]


def _schedule(step: int, steps: int) -> float:
    rise = max(1, steps // 10)
    if step < rise:
        return (step + 1) / rise
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def _encode(policy: PolicyModel, prompt: str, answer: str) -> tuple[list[int], int]:
    """Token ids of prompt and answer, and the length of the prompt."""
    tokenizer = policy.tokenizer
    question = [{"role": "user", "content": prompt}]
    prompt_ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    answer_ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    limit = context_length(policy.model.config)
    if len(prompt_ids) + len(answer_ids) > limit:
        raise DataError(
            f"a warm-start pair has {len(prompt_ids) + len(answer_ids)} tokens, the model's context {limit}."
        )
    return [*prompt_ids, *answer_ids], len(prompt_ids)


def _collate(examples: list[tuple[list[int], int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded tokens [B,T] and labels [B,T], -100 where there is nothing to learn."""
    longest = max(len(ids) for ids, _ in examples)
    tokens_BT = torch.full((len(examples), longest), pad_id)
    labels_BT = torch.full((len(examples), longest), -100)
    for row, (ids, prompt_length) in enumerate(examples):
        tokens_BT[row, : len(ids)] = torch.tensor(ids)
        labels_BT[row, prompt_length : len(ids)] = torch.tensor(ids[prompt_length:])
    return tokens_BT, labels_BT
