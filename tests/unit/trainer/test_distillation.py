"""On-policy distillation in one process: sampled by the student, scored by a better teacher, trained on that alone."""

import numpy as np
import pytest
import torch

from lachesis.pipeline.inference.engines.reference.prompt_scoring import PromptScorer
from lachesis.pipeline.inference.prompt_tree import PromptPath
from lachesis.pipeline.model.policy import build_tiny_policy
from lachesis.pipeline.trainer.config import LearnerConfig, LossConfig, WarmStartConfig
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.packed_batch import pack
from lachesis.pipeline.trainer.training_sequence import TrainingSequence
from lachesis.pipeline.trainer.warmstart import warm_start

PAIRS = [(word, word[::-1]) for word in ("ab", "cd", "ba", "dc", "ac", "db", "bd", "ca")]
STEPS, K, NEW_TOKENS = 50, 6, 3


def a_policy(seed, steps):
    policy = build_tiny_policy(seed, width=32, layers=1, heads=2, max_length=16)
    warm_start(policy, PAIRS, WarmStartConfig(seed=seed, steps=steps, batch_size=8, slips=0.0, learning_rate=1e-2))
    return policy


def prompts_of(policy):
    ask = policy.tokenizer.apply_chat_template
    return torch.tensor([ask([{"role": "user", "content": word}], return_dict=False) for word, _ in PAIRS])


@torch.no_grad()
def sample(policy, generator):
    """Tokens [B,T] of the student's own answers, and their logprobs [B, new]."""
    tokens, logprobs = prompts_of(policy), []
    for _ in range(NEW_TOKENS):
        all_BV = policy.model(input_ids=tokens).logits[:, -1].log_softmax(-1)
        drawn = torch.multinomial(all_BV.exp(), 1, generator=generator)
        logprobs.append(all_BV.gather(1, drawn))
        tokens = torch.cat([tokens, drawn], 1)
    return tokens, torch.cat(logprobs, 1)


def scored(student, teacher, generator):
    tokens, logprobs = sample(student, generator)
    length, prompt = tokens.shape[1], tokens.shape[1] - NEW_TOKENS
    with torch.no_grad():
        paths = [PromptPath(tuple(row)) for row in tokens.tolist()]
        answers = PromptScorer(teacher.model, max_tokens=8192).score(paths, [K] * len(paths))
    sequences = []
    for row, (answer, _), sampled in zip(tokens.tolist(), answers, logprobs.numpy(), strict=True):
        ids, topk = np.full((length, K), -1, np.int32), np.full((length, K + 1), -np.inf, np.float32)
        own = np.zeros(length, np.float32)
        for t in range(1, length):
            own[t] = answer[t][str(row[t])].logprob
            best = sorted(answer[t].items(), key=lambda entry: -entry[1].logprob)[:K]
            ids[t], topk[t, :K] = [int(i) for i, _ in best], [entry.logprob for _, entry in best]
            topk[t, K] = np.log(max(1e-6, 1 - np.exp(topk[t, :K].astype(float)).sum()))
        sequences.append(
            TrainingSequence(
                tokens=np.array(row, np.int32), loss_mask=np.arange(length) >= prompt,
                logprobs=np.concatenate([np.zeros(prompt, np.float32), sampled]), advantage=0.0,
                teacher_logprobs=own, teacher_topk=(ids, topk),
            )
        )  # fmt: skip
    return pack(sequences)


@torch.no_grad()
def exact_kl(student, teacher):
    """KL(student || teacher) over the whole vocabulary, mean over the tokens of right answers, in float64."""
    encode = student.tokenizer.encode
    said = torch.tensor([encode(answer, add_special_tokens=False) for _, answer in PAIRS])
    tokens = torch.cat([prompts_of(student), said], 1)
    one, other = (p.model(input_ids=tokens).logits.double()[:, -3:].log_softmax(-1) for p in (student, teacher))
    return (one.exp() * (one - other)).sum(-1).mean().item()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_the_students_kl_to_the_teacher_falls(kind):
    teacher, student, control = a_policy(1, 60), a_policy(0, 20), a_policy(0, 20)
    found = {}
    for name, policy, coef, count in (("distilled", student, 1.0, STEPS), ("control", control, 0.0, 2)):
        loss = LossConfig(teacher_coef=coef, teacher_kl=kind)
        learner = Learner(policy.model, LearnerConfig(learning_rate=1e-2, warmup_steps=0, max_step_kl=None, loss=loss))
        before, generator = exact_kl(policy, teacher), torch.Generator().manual_seed(0)
        steps = [learner.step(scored(policy, teacher, generator)) for _ in range(count)]
        found[name] = before, exact_kl(policy, teacher), steps
    before, after, steps = found["distilled"]
    assert after < 0.5 * before
    assert steps[-1].teacher_kl_topk < 0.5 * steps[0].teacher_kl_topk
    assert found["control"][1] == pytest.approx(before, rel=1e-6), "without the teacher nothing is learned here"
