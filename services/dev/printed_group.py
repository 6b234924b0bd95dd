"""Prints a group that went through the stages, by what each of them stored."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.scorer.scorer import samples_of
from lachesis.schemas import subjects
from lachesis.schemas.annotations import GroupReward, GroupScore, RewardEvent, ScoreEvent
from lachesis.schemas.codec import decode
from lachesis.schemas.ledger import LedgerEntry
from lachesis.schemas.rollout import RolloutGroup
from lachesis.services.observe.groups import left_out_samples

__all__ = ["StoredGroup", "print_group", "read_group"]

_MAX_TURNS = 32


class StoredGroup(NamedTuple):
    """A group and what the stages stored of it; None: nothing."""

    group: RolloutGroup
    score: GroupScore | None
    reward: GroupReward | None


async def read_group(bus: Bus, config: RunConfig, seq: int) -> StoredGroup:
    """Return the group at `seq` of ROLLOUTS with its scores and rewards."""
    group = decode(RolloutGroup, (await bus.get(subjects.ROLLOUTS, seq)).data)
    score, reward = None, None
    kinds: list[subjects.Kind] = ["score", "reward"]
    filters = [subjects.event(kind, config.run, config.revision) for kind in kinds]
    async with bus.read(subjects.EVENTS, filters, follow=False) as messages:
        async for message in messages:
            if message.subject.startswith("rl.score."):
                scores = decode(ScoreEvent, message.data).groups
                score = next((one for one in scores if one.group == group.id), score)
            else:
                rewards = decode(RewardEvent, message.data).groups
                reward = next((one for one in rewards if one.group == group.id), reward)
    return StoredGroup(group, score, reward)


async def print_group(console: Console, bus: Bus, config: RunConfig, entry: LedgerEntry) -> None:
    """Print the group that `entry` decides on: answers, scores, rewards, advantages and the decision."""
    ref = entry.batch.groups[0] if entry.batch is not None else None
    seq = ref.seq if ref is not None else entry.outcomes[0].seq
    found = await read_group(bus, config, seq)
    reward = found.reward
    advantages = ref.advantages if ref is not None else reward.advantages if reward is not None else None
    _print_table(console, found, advantages)
    for number, why in left_out_samples(found.group).items():
        console.print(f"sample {number} is left out: {why}")
    for i, count in enumerate(found.group.metadata.get("thought_calls", [])):
        if count:
            console.print(f"sample {i}: {count} tool calls were only thought of or shown, and not run")
    if ref is None:
        outcome = entry.outcomes[0]
        reason = f" ({outcome.reason})" if outcome.reason else ""
        mend = "try another --task, or another rater" if outcome.kind == "zero_variance" else "see above why"
        console.print(f"verdict {outcome.kind}{reason}: nothing to train on; {mend}")


def _print_table(console: Console, found: StoredGroup, advantages: Sequence[float | None] | None) -> None:
    group, score, reward = found
    samples = samples_of(group)
    columns: dict[str, Sequence[float | None]] = {}
    if score is not None:
        columns = {**score.ratings, "score": score.scores}
    if reward is not None and score is not None and reward.rewards != score.scores:
        columns["reward"] = reward.rewards
    if reward is not None and reward.shaping:
        columns["shaping"] = reward.shaping
    if advantages is not None:
        columns["advantage"] = advantages
    texts = _turn_columns(group, reward)
    table = Table(title=f"{group.env}: {group.item}", caption=samples[0].prompt, caption_justify="left")
    for name in ("completion", *columns, *texts, "tokens", "finish"):
        table.add_column(name)
    for i, sample in enumerate(samples):
        numbers = [_number(values[i]) for values in columns.values()]
        numbers += [values[i] for values in texts.values()]
        table.add_row(sample.completion, *numbers, str(sample.token_count), sample.finish_reason)
    console.print(table)


def _turn_columns(group: RolloutGroup, reward: GroupReward | None) -> dict[str, list[str]]:
    """Return the columns of a group that has rewards of turns, or branches."""
    sequences, found = group.sequences, dict[str, list[str]]()
    if sequences.branches:
        found["branches"] = [str(count) for count in sequences.branches]
    if sequences.turn_rewards is not None:
        found["turn rewards"] = [_numbers(values) for values in sequences.turn_rewards]
    if reward is not None and reward.turn_advantages:
        found["turn advantages"] = [_numbers(values) for values in reward.turn_advantages]
    return found


def _numbers(values: Sequence[float] | None) -> str:
    if values is None:
        return "missing"
    further = f" and {len(values) - _MAX_TURNS} more" if len(values) > _MAX_TURNS else ""
    return " ".join(f"{value:.3g}" for value in values[:_MAX_TURNS]) + further


def _number(value: float | None) -> str:
    return "missing" if value is None else f"{value:.3f}"
