"""Configuration of the health checks."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from lachesis.pipeline.common.field_types import check_field_types
from lachesis.pipeline.common.paths import FilePath
from lachesis.schemas.errors import ConfigError

__all__ = ["HealthConfig"]


class HealthConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which checks judge the event streams, and what may follow. The thresholds stand with each check."""

    enabled: bool = True
    """Whether the run has a health service. Default true."""
    window: Annotated[int, Meta(ge=16, le=4096)] = 64
    """Groups of one environment that are checked together. A window in which the policy collapses ends early. Default
    64."""
    act: Literal["warn", "quarantine", "halt"] = "halt"
    """The worst that a check may do by itself; warn: nothing but alerts. Default halt."""
    halts: tuple[str, ...] = ("nonfinite", "advantages", "rollout_training", "step_size")
    """Checks that may stop dispatch at once. By default those by whose finding what would be trained on is broken,
    whatever the task: NaN, advantages beyond their bounds, tokens of another policy, or steps so large that the tokens
    are of another policy by the time they are trained. saturation, zero_variance, truncated and entropy find runs that
    are done, stuck or wasteful as well as broken ones, so they warn or inform unless they are named here. A quarantine
    that lasts halts in any case, for nothing of what is generated is trained then."""
    off: list[str] = []
    """Checks that do not judge, by name (`lachesis health` shows them). `ledger` verifies the ledger of the run instead
    of an environment: its chain, its outcomes, and that the server can read all of it. Default none."""
    excerpts: bool = True
    """Whether scores carry how one group in four begins and ends, question and answers, 128 characters each end, for
    the checks phrases and language, whose alerts quote words of them. False: scores and alerts quote no question and
    no answer, save in what raters raise, and these two checks do not judge. Rollouts hold their texts as before.
    Default true."""
    score_low: float = 0.0
    """The lowest score there is, for the saturation check. Default 0."""
    score_high: float = 1.0
    """The highest score there is. Default 1."""
    webhook_file: FilePath | None = None
    """File that holds the URL to which changes of alerts are posted as JSON: what begins, grows or ends, and what is
    kept from training. Who knows that URL can write there, so it is in no setting. Default None: nowhere."""
    webhook_from: Literal["inform", "warn", "quarantine", "halt"] = "quarantine"
    """The least severity that is posted, and sent to the trackers of `training`. A healthy run may be warned of
    now and then. Default quarantine."""

    def __post_init__(self) -> None:
        check_field_types(self)
        if not self.score_low < self.score_high:
            raise ConfigError(f"health.score_low is {self.score_low}; it must be below score_high, {self.score_high}")
