"""The groups that the benchmarks publish: random tokens with logprobs, masks and texts."""

import numpy as np

from lachesis.schemas.columns import as_bytes
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.rollout import Message, RolloutGroup, Sequences, VersionSpan

__all__ = ["VOCABULARY", "make_group", "make_words"]

PROMPT, VOCABULARY = 200, 150_000


def make_words(draw: np.random.Generator) -> list[str]:
    """Return words of random letters."""
    return ["".join(chr(97 + letter) for letter in draw.integers(0, 26, n)) for n in draw.integers(2, 9, 3000)]


def make_group(
    draw: np.random.Generator, words: list[str], n: int, *, samples: int, tokens: int, run: str, env: str
) -> RolloutGroup:
    """Return a group of `samples` answers of `tokens` random tokens, with five words of text for eight tokens."""
    prompt = min(PROMPT, tokens // 4)
    mask = np.arange(samples * tokens) % tokens >= prompt
    texts = [" ".join(draw.choice(words, tokens * 5 // 8)) for _ in range(samples)]
    return RolloutGroup(
        id=new_group_id(), run=run, env=env, item=str(n), producer="bench", epoch=1, counter=n,
        policy_versions=["0-first-ab"], tokenizer_hash="t", started_ns=1,
        messages=[[Message(role="user", content="?"), Message(role="assistant", content=text)] for text in texts],
        sequences=Sequences(
            offsets=as_bytes(np.arange(samples + 1) * tokens, "int32"),
            tokens=as_bytes(draw.integers(0, VOCABULARY, len(mask)), "int32"),
            loss_mask=pack_mask(mask),
            logprobs=as_bytes(np.where(mask, -draw.exponential(1.0, len(mask)), 0.0), "float32"),
            finish_reasons=["stop"] * samples,
            version_spans=[VersionSpan(i, 0, 0) for i in range(samples)],
        ),
    )  # fmt: skip
