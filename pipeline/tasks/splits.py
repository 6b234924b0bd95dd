"""Parts the tasks of one pool by their prompts: trained on, held out, and for the warm start. Pure."""

from typing import Literal

from lachesis.pipeline.tasks.task import prompt_hash

__all__ = ["Split", "canonical_prompt", "split_of"]

Split = Literal["train", "held_out", "warm_start"]

_HELD_OUT_SHARE = 0.2
_WARM_START_SHARE = 0.2


def split_of(prompt: str) -> Split:
    """Return the split a prompt belongs to.

    Case and white space do not count: "The" is not a held-out form of "the".
    """
    place = int(prompt_hash(canonical_prompt(prompt))[:16], 16) / 2**64
    if place < _HELD_OUT_SHARE:
        return "held_out"
    return "warm_start" if place < _HELD_OUT_SHARE + _WARM_START_SHARE else "train"


def canonical_prompt(prompt: str) -> str:
    """Return what prompts that count as the same one have in common."""
    return " ".join(prompt.casefold().split())
