"""Finds faults of a single group from its signals, so that it is quarantined at once.

The normalizer calls this when it gives the group its verdict, so the result is in the log before a batch could take the
group, and is the same whenever the group is normalized.
"""

from lachesis.schemas.annotations import GroupScore

__all__ = ["find_group_fault"]

_MAX_CERTAIN_RUN_TOKENS = 3000
_MIN_TOKENS = 32


def find_group_fault(score: GroupScore) -> str | None:
    """Return why a group must not be trained on, None if nothing is wrong with it.

    There are four such faults:

    - The trainer cannot use the group, as the environment has found out when it stored it.
    - Repetition: 3000 tokens in a row with p > .99 (prime-rl).
    - Gibberish: rare tokens drawn against the odds, two or more and over 1 in 1000 of a sample's. prime-rl takes any
      one, but a long sample at temperature 1 draws some by chance.
    - Logprobs that are 0 for every token of a group, which stands for "not recorded": importance ratios would mean
      nothing. Positive or missing ones never get this far (`Sequences.check`).
    """
    signals = score.signals
    if signals is None:
        return None
    if signals.untrainable is not None:
        return signals.untrainable
    if signals.sure_run >= _MAX_CERTAIN_RUN_TOKENS:
        return f"repetition: {signals.sure_run} tokens in a row with p > .99"
    for count, length in zip(signals.unlikely, score.lengths, strict=False):
        if count >= 2 and count > length / 1000:
            return f"gibberish: {count} of {length} tokens are rare ones drawn against the odds"
    total = sum(score.lengths)
    if total >= _MIN_TOKENS and signals.zeros == total:
        return f"logprobs: 0 for each of {total} tokens, so none were recorded; request them from the inference server"
    return None
