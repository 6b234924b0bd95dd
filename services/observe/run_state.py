"""The state of a run, and the fields of it that each command prints. Pure: no bus.

There is one struct, `RunState`. Several readers fill it: `runs.py` from the run's folder, `live_run_state.py` from its
server, `overview.py` from the heartbeats of the last seconds, `summary.py` from the figures of every step, the demo's
`observed.py` from everything that the run sends. Each sets what its source says and leaves the rest at "not known". A
view selects its fields by a tuple such as `STATUS_FIELDS`.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal

import msgspec

from lachesis.pipeline.notices.changes import PastNotice
from lachesis.schemas.notices import Notice
from lachesis.schemas.promotion import PromotionOutcome
from lachesis.services.observe.bottleneck import Bottleneck
from lachesis.services.observe.evaluations import EvaluationStatus, evaluation_rows_of_figures
from lachesis.services.observe.lost_generation import LostGeneration
from lachesis.services.observe.rewards import EnvRewards, rewards_of
from lachesis.services.observe.services import Quantiles, ServiceStatus
from lachesis.services.observe.window import StageRow

__all__ = [
    "DEMO_FIELDS",
    "FOLDER_FIELDS",
    "LIVE_STATES",
    "RESULT_FIELDS",
    "STATUS_FIELDS",
    "SUMMARY_FIELDS",
    "TOP_FIELDS",
    "EnvRates",
    "LedgerStatus",
    "PolicyStatus",
    "RunState",
    "RunTotals",
    "SlowRollout",
    "StateName",
    "StreamStatus",
    "TrainerStatus",
    "fields_of_step",
    "project",
]

StateName = Literal[
    "starting", "running", "stopping", "restarting", "finished", "stopped", "failed", "interrupted", "half deleted",
    "elsewhere", "unknown",
]  # fmt: skip
LIVE_STATES: frozenset[StateName] = frozenset({"starting", "running", "stopping", "restarting"})


class StreamStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One stream or bucket; `bytes` of its `max_bytes` budget are taken."""

    name: str
    messages: int
    bytes: int
    max_bytes: int
    first: int
    last: int
    replicas: int


class LedgerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ledger stands: `outcomes` counts groups by what became of them, `age_s` is since its last entry.

    `promoted` is the newest promotion, None: the run's configuration scores rollouts.
    """

    index: int
    batches: int
    watermark: int
    outcomes: dict[str, int]
    age_s: float
    promoted: PromotionOutcome | None = None


class PolicyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The newest published weights."""

    version: str
    step: int
    age_s: float


class TrainerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer has made durable."""

    step: int
    batches: int
    voids: int
    """Batches since the report before of which nothing was trained."""
    dropped: int
    """Groups since the report before that could not be used, in batches that were trained without them."""
    policy_version: str
    checkpoint: str
    age_s: float


class SlowRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout that was long under way, seconds from its task to the optimizer step; `url` where Jaeger shows it."""

    group: str
    seconds: float
    url: str | None = None


class EnvRates(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out rates of an environment: of the first policy in the figures, the last and the best."""

    first: float
    last: float
    best: float


class RunTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Figures over all steps of a run. `reward_first` and `reward_last`: means over the first and the last tenth of the
    steps; staleness in optimizer steps; `held_out`: rates by environment.
    """

    sequences: int = 0
    tokens: int = 0
    reward_first: float | None = None
    reward_last: float | None = None
    staleness_mean: float | None = None
    staleness_max: float | None = None
    held_out: dict[str, EnvRates] = {}


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """How a run stands, as far as the source of this state says; None, or an empty list: not known, or none yet.

    Of its processes. supervisor: pid, while it runs here; `ready` of its `processes` are. started_ns: Unix time of its
    last start. pids: by process, None for one that does not run. trackers: where each has the figures.

    Of its training. step: optimizer steps taken of `steps`. reward, rewards (by environment), evaluations (the newest
    of each environment), staleness (optimizer steps between policy and training: mean, largest) and `e2e_p99_s`
    (seconds from task to step) are of the newest step; end_to_end: the same time, lately. quarantined, halted:
    environments that a health check has stopped. outcomes: groups by what became of them since the run began.
    lost_generation: what kills have cost. totals: over all steps.

    problems: why something is not known, or why the run failed. notices: what stands in the way of a run that goes on,
    or harms it; of one that has ended without a batch, why. warnings: held-out rates that fell.

    By its server. ended: nothing of the run goes on, and its services are `ended`, not `silent`. finished: all of its
    steps are taken and durable. streams None: not known. inference: URL of the server of each role.

    Over the last `window_s` seconds. s_per_step: seconds from one step to the next. staleness_bound: the most allowed.
    groups_per_s: groups batched; tokens_per_s: tokens trained on. reward_trend: growth of the reward per step since
    `top` reads, reward_curve: by step. outstanding and capacity: sequences under way, and the most that leases allow.

    Of its last start, once it has ended. first_step: where it began. wall_s: seconds in all, `to_first_step_s` to the
    end of its first step. past_notices: what stood in the way. cpu_s: processor time by service, seconds, where it is
    measured.
    """

    run: str
    state: StateName = "unknown"
    folder: str = ""
    config: str | None = None
    mode: str | None = None
    environments: list[str] = []
    supervisor: int | None = None
    ready: int | None = None
    processes: int | None = None
    started_ns: int | None = None
    pids: dict[str, int | None] = {}
    logs: str | None = None
    trackers: dict[str, str] = {}

    step: int | None = None
    steps: int | None = None
    reward: float | None = None
    rewards: dict[str, EnvRewards] = {}
    evaluations: list[EvaluationStatus] = []
    staleness: float | None = None
    staleness_max: float | None = None
    e2e_p99_s: float | None = None
    end_to_end: Quantiles = Quantiles()
    quarantined: list[str] = []
    halted: list[str] = []
    outcomes: dict[str, int] = {}
    lost_generation: LostGeneration | None = None
    totals: RunTotals = RunTotals()

    problems: list[str] = []
    notices: list[Notice] = []
    warnings: list[str] = []

    ended: bool = False
    finished: bool = False
    server: str = ""
    server_version: str = ""
    streams: list[StreamStatus] | None = None
    services: list[ServiceStatus] = []
    ledger: LedgerStatus | None = None
    policy: PolicyStatus | None = None
    trainer: TrainerStatus | None = None
    inference: dict[str, str] = {}

    window_s: float = 0.0
    s_per_step: float | None = None
    staleness_bound: float | None = None
    groups_per_s: float | None = None
    tokens_per_s: float | None = None
    reward_trend: float | None = None
    reward_curve: list[float] = []
    outstanding: float | None = None
    capacity: float | None = None
    bottleneck: Bottleneck | None = None
    stages: list[StageRow] = []
    slow: list[SlowRollout] = []

    first_step: int | None = None
    wall_s: float | None = None
    to_first_step_s: float | None = None
    restarts: dict[str, int] = {}
    cpu_s: dict[str, float] = {}
    places: dict[str, str] = {}
    past_notices: list[PastNotice] = []

    @property
    def is_live(self) -> bool:
        """Whether a supervisor or what starts it again is at work."""
        return self.state in LIVE_STATES

    @property
    def problem(self) -> str | None:
        """The first of the problems, None where there is none."""
        return next(iter(self.problems), None)


# the fields of each view in the order in which it prints them: NAME, or NAME=PLACE where the state has it elsewhere
FOLDER_FIELDS = (
    "run", "folder", "state", "problem", "config", "mode", "environments", "supervisor", "ready", "processes",
    "started_ns", "step", "steps", "reward", "rewards", "evaluations", "staleness", "quarantined", "halted",
    "end_to_end_p99_s=end_to_end.p99", "pids", "logs", "trackers", "notices", "outcomes",
)  # fmt: skip
STATUS_FIELDS = (
    "run", "ended", "finished", "step", "steps", "server", "server_version", "problems", "streams", "services",
    "ledger", "lost_generation", "policy", "trainer", "inference", "evaluations", "reward", "rewards", "warnings",
    "notices",
)  # fmt: skip
TOP_FIELDS = (
    "run", "window_s", "step", "s_per_step", "staleness", "staleness_max", "staleness_bound", "groups_per_s",
    "tokens_per_s", "e2e_p99_s", "reward", "reward_trend", "rewards=reward_curve", "outstanding", "capacity",
    "outcomes", "lost_generation", "bottleneck", "stages", "slow", "evaluations", "env_rewards=rewards", "ended",
    "notices", "warnings",
)  # fmt: skip
_TOTALS = ("reward_first=totals.reward_first", "reward_last=totals.reward_last")
SUMMARY_FIELDS = (
    "run", "state", "reason=problem", "first_step", "step", "steps", "wall_s", "to_first_step_s",
    "sequences=totals.sequences", "tokens=totals.tokens", "outcomes", *_TOTALS, "rewards",
    "staleness_mean=totals.staleness_mean", "staleness_max=totals.staleness_max", "end_to_end", "evaluations",
    "restarts", "places", "notices=past_notices",
)  # fmt: skip
DEMO_FIELDS = (*SUMMARY_FIELDS, "groups_per_s", "tokens_per_s", "services", "cpu_s")
RESULT_FIELDS = (
    "run", "folder", "state", "reason=problem", "step", "steps", "sequences=totals.sequences", "tokens=totals.tokens",
    *_TOTALS, "evaluations=totals.held_out", "staleness_mean=totals.staleness_mean",
    "end_to_end_p99_s=end_to_end.p99",
)  # fmt: skip


def project(state: RunState, fields: Sequence[str]) -> dict[str, Any]:
    """Return the fields of one view by the names under which it prints them."""
    named = (field.partition("=") for field in fields)
    return {name: attrgetter(place or name)(state) for name, _, place in named}


def fields_of_step(figures: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields of a state that the figures of its newest step say; None where they do not."""
    step = figures.get("train/step")
    return {
        "step": None if step is None else int(step),
        "reward": figures.get("reward/mean"),
        "rewards": rewards_of(figures),
        "evaluations": evaluation_rows_of_figures(figures),
        "staleness": figures.get("staleness/mean"),
        "staleness_max": figures.get("staleness/max"),
        "e2e_p99_s": figures.get("latency/e2e/p99"),
        "end_to_end": Quantiles(*(figures.get(f"latency/e2e/rolling_{label}") for label in ("p50", "p95", "p99"))),
        "quarantined": _environments(figures, "quarantined"),
        "halted": _environments(figures, "halted"),
    }


def _environments(figures: Mapping[str, float], standing: str) -> list[str]:
    """Return the environments that the health checks have left in a standing."""
    names = (name.split("/") for name, value in figures.items() if value)
    return sorted(name[1] for name in names if len(name) == 3 and name[0] == "health" and name[2] == standing)
