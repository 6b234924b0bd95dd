"""Configuration of reward shaping, for a run or for one environment."""

import re
from typing import Annotated

from msgspec import Meta, Struct

from lachesis.schemas.errors import ConfigError

__all__ = ["BOXED", "LARGEST_LENGTH_BOUNTY", "FormatMarker", "RewardConfig"]

BOXED = r"\boxed"
_TAG = re.compile(r"<[A-Za-z][\w-]{0,63}>")
LARGEST_LENGTH_BOUNTY = 0.05
_LARGEST_CAP = 0.5


class FormatMarker(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a completion may have, and what that is worth to a sample that failed."""

    marker: str
    r"""A tag, "<think>": opened and closed exactly once, in this order; after </think> there must be text, other tags
    must hold some. Or "\\boxed": the last \boxed{} after </think> is closed and not empty."""
    reward: Annotated[float, Meta(gt=0)]
    """The bonus, in units of the score."""

    def __post_init__(self) -> None:
        if self.marker != BOXED and not _TAG.fullmatch(self.marker):
            raise ConfigError(f'reward_config.format_markers: {self.marker!r:.80} is neither "\\\\boxed" nor "<tag>"')


class RewardConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bonuses for samples that failed: r = score + s * min(cap, markers found + length), at most min_success - margin.

    s is 1 until the highest success rate that the environment has had is `fade_from`, falls with it to 0 at `fade_to`,
    and never rises again. Off unless markers or a length bounty are set.
    """

    format_markers: list[FormatMarker] = []
    """Markers as { marker = "<think>", reward = 0.05 }. Default none."""
    length_bounty_max: Annotated[float, Meta(ge=0, le=LARGEST_LENGTH_BOUNTY)] = 0.0
    """The bonus of an answer of `length_to` tokens or more, at most 0.05; nothing for one that was cut off. Length
    counts times the share of the answer's 3-grams that are distinct. Default 0."""
    length_from: Annotated[int, Meta(ge=0)] = 0
    """Tokens up to which length earns nothing. Default 0."""
    length_to: Annotated[int, Meta(ge=1)] = 512
    """Tokens from which it earns all. Default 512."""
    cap: Annotated[float, Meta(gt=0, le=_LARGEST_CAP)] = 0.2
    """The largest bonus in all, in units of the score, at most 0.5. Default 0.2."""
    margin: Annotated[float, Meta(gt=0)] = 0.1
    """How far a shaped score stays below that of a success, in units of the score. Default 0.1."""
    min_success: float | None = None
    """The lowest score of a sample that succeeds. Default: the environment's success_threshold; it must be given where
    a success_rater tells who succeeds."""
    fade_from: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Success rate from which bonuses fade. Default 0.1."""
    fade_to: Annotated[float, Meta(ge=0, le=1)] = 0.3
    """Success rate from which there are none. Default 0.3."""

    def __post_init__(self) -> None:
        names = [marker.marker for marker in self.format_markers]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"reward_config.format_markers: {twice[0]} is there twice")
        if not self.length_from < self.length_to:
            raise ConfigError(f"reward_config.length_from is {self.length_from}, not below length_to, {self.length_to}")
        if not self.fade_from < self.fade_to:
            raise ConfigError(f"reward_config.fade_from is {self.fade_from}, not below fade_to, {self.fade_to}")

    @property
    def on(self) -> bool:
        """Whether there is anything to be had."""
        return bool(self.format_markers) or self.length_bounty_max > 0
