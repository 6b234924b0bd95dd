"""Configuration of reward shaping, for a run or for one environment."""

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import force_setattr

from lachesis.pipeline.common.field_types import check_field_types
from lachesis.pipeline.tasks.thoughts import thought_opener
from lachesis.schemas.errors import ConfigError

__all__ = ["BOXED", "MAX_LENGTH_BOUNTY", "FormatMarker", "RewardConfig", "is_tag"]

BOXED = r"\boxed"
MAX_LENGTH_BOUNTY = 0.05
_TAG = re.compile(r"<[A-Za-z][\w-]{0,63}>")
_ELEMENT = re.compile(r"(<([A-Za-z][\w-]{0,63})>)(?:\.\.\.|…)?</\2>")
# A backspace is what TOML makes of "\boxed" between double quotes.
_BOX = re.compile(r"(?:\\b|\x08)oxed(?:\{(?:\.\.\.|…)?\}?)?")
_MAX_CAP = 0.5
_MAX_MARKERS = 64
_MAX_MARKER_CHARS = 256

LengthBounty = Annotated[float, Meta(ge=0, le=MAX_LENGTH_BOUNTY)]


class FormatMarker(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A form that a completion may have, and its bonus for a sample that failed."""

    marker: str
    r"""What opens a thought, "<think>" or "[THINK]" (`tasks.thoughts` has them all): opened and closed exactly once,
    with text after it. Any other tag, "<answer>": opened and closed exactly once, with text in it. Or '\boxed', also
    as '\boxed{' or '\boxed{}': the last \boxed{} after the thought is closed and not empty. Or any other text,
    "####" or "Answer:" say, of at most 256 characters: it occurs after the thought, to the letter."""
    reward: Annotated[float, Meta(gt=0)] = 0.05
    """The bonus, in units of the score. Default 0.05."""

    def __post_init__(self) -> None:
        check_field_types(self)
        if len(self.marker) > _MAX_MARKER_CHARS:
            raise ConfigError(
                f"reward_config.format_markers: {self.marker[:40]!r}... has {len(self.marker)} characters, "
                f"at most {_MAX_MARKER_CHARS} are allowed"
            )
        if not self.marker.strip():
            raise ConfigError(f"reward_config.format_markers: {self.marker!r} is no text that could be looked for")
        element = _ELEMENT.fullmatch(self.marker)
        opener = thought_opener(self.marker)
        if opener:
            force_setattr(self, "marker", opener)
        elif element is not None:
            force_setattr(self, "marker", element[1])
        elif _BOX.fullmatch(self.marker):
            force_setattr(self, "marker", BOXED)
        elif not self.marker.replace("\n", "").replace("\t", "").isprintable():
            raise ConfigError(
                f"reward_config.format_markers: {self.marker!r} holds a control character, which is what TOML makes "
                "of a backslash between double quotes; put the marker between single quotes"
            )


def is_tag(marker: str) -> bool:
    """Return whether a marker is a tag such as <think>."""
    return _TAG.fullmatch(marker) is not None


class RewardConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bonuses for samples that failed: r = score + s * min(cap, markers found + length), at most min_success - margin.

    s is 1 until the highest success rate that the environment has had is `fade_from`, falls with it to 0 at `fade_to`,
    and never rises again. A rate is known from 128 groups on; `start` is s before that. Off unless markers or a length
    bounty are set.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {"length_bounty": "length_bounty_max"}

    format_markers: Annotated[list[FormatMarker | str], Meta(max_length=_MAX_MARKERS)] = []
    """Markers as { marker = "<think>", reward = 0.05 }, or as their text alone, "<think>". Default none."""
    length_bounty_max: LengthBounty = 0.0
    """The bonus of an answer of `length_to` tokens or more, at most 0.05; nothing for one that was cut off. Length
    counts times the share of the answer's 3-grams that are distinct. Default 0."""
    length_bounty: LengthBounty | UnsetType = UNSET
    """Another name of length_bounty_max."""
    length_from: Annotated[int, Meta(ge=0)] = 0
    """Tokens up to which length earns nothing. Default 0."""
    length_to: Annotated[int, Meta(ge=1)] = 512
    """Tokens from which it earns all. Default 512."""
    cap: Annotated[float, Meta(gt=0, le=_MAX_CAP)] = 0.2
    """The largest bonus in all, in units of the score, at most 0.5. Default 0.2."""
    margin: Annotated[float, Meta(gt=0)] = 0.1
    """How far a shaped score stays below that of a success, in units of the score. Default 0.1."""
    min_success: float | None = None
    """The lowest score of a sample that succeeds. Default: the environment's success_threshold; it must be given if a
    success_rater determines success."""
    fade_from: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Success rate from which bonuses fade. Default 0.1."""
    fade_to: Annotated[float, Meta(ge=0, le=1)] = 0.3
    """Success rate from which there are none. Default 0.3."""

    def __post_init__(self) -> None:
        check_field_types(self)
        force_setattr(self, "format_markers", self.markers)
        if self.length_bounty is not UNSET:
            if self.length_bounty_max not in {0.0, self.length_bounty}:
                raise ConfigError(
                    f"reward_config: length_bounty is {self.length_bounty} and length_bounty_max "
                    f"{self.length_bounty_max}; they are one setting under two names, so give one of them"
                )
            force_setattr(self, "length_bounty_max", self.length_bounty)
            force_setattr(self, "length_bounty", UNSET)
        names = [marker.marker for marker in self.markers]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"reward_config.format_markers: {twice[0]} is there twice")
        if not self.length_from < self.length_to:
            raise ConfigError(f"reward_config.length_from is {self.length_from}, not below length_to, {self.length_to}")
        if not self.fade_from < self.fade_to:
            raise ConfigError(f"reward_config.fade_from is {self.fade_from}, not below fade_to, {self.fade_to}")

    @property
    def markers(self) -> list[FormatMarker]:
        """The markers, each with its bonus."""
        return [FormatMarker(marker=one) if isinstance(one, str) else one for one in self.format_markers]

    @property
    def on(self) -> bool:
        """Whether there is anything to be had."""
        return bool(self.format_markers) or self.length_bounty_max > 0
