"""Derives the notices of a run that trains nothing although its services send heartbeats. Pure."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from lachesis.pipeline.notices.facts import HeardProcess, Moment
from lachesis.schemas.control import Heartbeat
from lachesis.schemas.notices import Notice

__all__ = ["StepProgress", "fruitless_warning"]

_USUAL_STEPS = 5.0
"""A run stands still if it takes no step for this many times as long as a step usually takes."""
_MIN_STANDSTILL_S = 60.0
"""Seconds without a step before which no run stands still, however short its steps are."""
_FIRST_STEP_S = 300.0
"""The same before the first step, when it is not known how long a step usually takes."""
_KEPT_STEPS = 32
_MIN_GROUPS = 20
"""With fewer groups than this, there is no warning about their outcomes."""
_FRUITLESS = ("zero_variance", "unscorable", "untrainable", "quarantined", "dead", "oversized")
"""Outcomes that more groups will not change. Stale groups come and go, for example after a restart."""
_MENDS = {
    "zero_variance": "the answers of a group all get the same reward: look at task and raters with `lachesis dev ENV`",
    "unscorable": "no answer got a score: look at the raters with `lachesis dev ENV`",
    "untrainable": "`lachesis rollouts --state untrainable` shows why",
    "quarantined": "`lachesis health` says why, `lachesis resume ENV` lets it go on",
    "dead": "`lachesis dead` says why",
    "oversized": "make groups smaller, or batches larger",
}
_STALE = "stale"
_STALE_WINDOW = 40
"""Groups of which at least half must be stale for a warning about that."""
_STALE_MEND = (
    "they were made by an old policy, or waited for long: see which policy the inference server has, where groups wait "
    "(`lachesis top`), and whether more is generated than is trained; batching.max_staleness is the bound"
)
_OUTCOMES = "batching/outcomes/"
_FLOW = ("scorer", "teacher", "normalizer", "batcher", "trainer")


def fruitless_warning(outcomes: Mapping[str, int]) -> tuple[str, str] | None:
    """Return the problem and its remedy if none of these groups was batched; else None."""
    found = {kind: outcomes[kind] for kind in _FRUITLESS if outcomes.get(kind, 0) > 0}
    if outcomes.get("batched", 0) > 0 or sum(found.values()) < _MIN_GROUPS:
        return None
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.items())
    return f"no group was fit to train on ({kinds})", _MENDS[max(found, key=lambda kind: found[kind])]


class StepProgress:
    """Follows the optimizer steps, and the outcomes of groups since the last batch, by heartbeats."""

    def __init__(self, trains: bool, steps: int | None) -> None:
        self._trains = trains
        self._steps = steps
        self.step: int | None = None
        self._last_s: float | None = None
        """When the newest step ended, or when the trainer's first heartbeat came."""
        self._took_s: deque[float] = deque(maxlen=_KEPT_STEPS)
        """How long the newest steps took."""
        self._base: dict[str, int] = {}
        self._outcomes: dict[str, int] = {}
        self._fruitless_since_s: float | None = None
        self._window: dict[str, int] = {}
        """Outcomes when the present window of groups began."""
        self._stale: tuple[float, int, int] | None = None
        """Since when at least half of the groups are stale; how many of the last window, and how large it was."""

    @property
    def outcomes(self) -> dict[str, int]:
        """Groups by outcome since the run began; empty before the batcher's first heartbeat."""
        return dict(self._outcomes)

    @property
    def is_finished(self) -> bool:
        """Whether the last step is taken."""
        return self._steps is not None and self.step is not None and self.step >= self._steps

    def seed(self, took_s: Iterable[float]) -> None:
        """Record how long earlier steps took."""
        self._took_s.extend(took_s)

    def pass_over(self, blind_s: float) -> None:
        """Leave out a time in which no heartbeat could arrive."""
        if self._last_s is not None:
            self._last_s += blind_s

    def hear(self, beat: Heartbeat, now_s: float) -> None:
        """Record a heartbeat of the trainer or the batcher."""
        if beat.service == "trainer":
            step = beat.metrics.get("train/step")
            if self._last_s is None:
                self._last_s = now_s - _seconds_since_step(beat)
                self.step = None if step is None else int(step)
            elif step is not None and int(step) > (self.step or 0):
                self._took_s.append((now_s - self._last_s) / (int(step) - (self.step or 0)))
                self._last_s, self.step = now_s, int(step)
        elif beat.service == "batcher":
            self._hear_outcomes(beat.metrics, now_s)

    def _hear_outcomes(self, metrics: Mapping[str, float], now_s: float) -> None:
        now = {name.removeprefix(_OUTCOMES): int(n) for name, n in metrics.items() if name.startswith(_OUTCOMES)}
        if not now:
            return
        batched = now.get("batched", 0)
        started_over = any(now.get(kind, 0) < count for kind, count in self._base.items())
        if (not self._outcomes and batched) or batched != self._base.get("batched", 0) or started_over:
            self._base = now
        if not self._outcomes or any(now.get(kind, 0) < count for kind, count in self._window.items()):
            self._window = now
        self._outcomes = now
        self._count_stale(now_s)
        if fruitless_warning(self._since_batch()) is None:
            self._fruitless_since_s = None
        elif self._fruitless_since_s is None:
            self._fruitless_since_s = now_s

    def _count_stale(self, now_s: float) -> None:
        ended = sum(self._outcomes.values()) - sum(self._window.values())
        if ended < _STALE_WINDOW:
            return
        stale = self._outcomes.get(_STALE, 0) - self._window.get(_STALE, 0)
        since_s = now_s if self._stale is None else self._stale[0]
        self._stale = (since_s, stale, ended) if 2 * stale >= ended else None
        self._window = self._outcomes

    def _since_batch(self) -> dict[str, int]:
        return {kind: count - self._base.get(kind, 0) for kind, count in self._outcomes.items()}

    def notices(self, now: Moment, heard: Sequence[HeardProcess], stopping: Sequence[Notice]) -> Iterator[Notice]:
        """Yield the notices about the progress.

        `stopping`: notices of what may stop the training, which are the cause.
        """
        fruitless = fruitless_warning(self._since_batch())
        if fruitless is not None and not self.is_finished:
            since = None if self._fruitless_since_s is None else now.ago_ns(self._fruitless_since_s)
            what, mend = fruitless
            yield Notice(
                key="fruitless", source="batcher", what=what, since_ns=since, mend=mend, held_up=["trainer"], stops=True
            )
        if self._stale is not None and not self.is_finished:
            since_s, stale, total = self._stale
            what = f"{stale} of the last {total} groups were too old to train on when they were complete"
            yield Notice(key=_STALE, source="batcher", what=what, since_ns=now.ago_ns(since_s), mend=_STALE_MEND)
        usual_s, last_s = self._usual_s(), self._last_s
        limit_s = _FIRST_STEP_S if usual_s is None else max(_MIN_STANDSTILL_S, _USUAL_STEPS * usual_s)
        if not self._trains or self.is_finished or last_s is None or now.s - last_s <= limit_s:
            return
        usual = "" if usual_s is None else f", where one usually takes {usual_s:.3g} s"
        at = "no optimizer step was taken" if not self.step else f"no optimizer step since step {self.step}"
        ended = ", ".join(f"{count} {kind}" for kind, count in self._since_batch().items() if count > 0)
        why = stopping[0].what if stopping else fruitless[0] if fruitless else _fullest(heard)
        if ended and not fruitless:
            why += f"{'; ' if why else ''}groups that ended since: {ended}"
        yield Notice(
            key="standstill",
            source="trainer",
            what=f"{at}{usual}",
            since_ns=now.ago_ns(last_s),
            why=why,
            mend="mend that first" if stopping or fruitless else "`lachesis top` shows where the groups are",
            stops=True,
        )

    def _usual_s(self) -> float | None:
        return median(self._took_s) if len(self._took_s) > 1 else None


def _seconds_since_step(beat: Heartbeat) -> float:
    """Return how long ago the trainer ended its newest step, 0 if the heartbeat does not say."""
    ended_s = beat.metrics.get("train/time")
    return 0.0 if ended_s is None else max(0.0, beat.time_ns / 1e9 - ended_s)


def _fullest(heard: Sequence[HeardProcess]) -> str:
    """Say which service the groups are at, else what holds back the environments; "" if neither is known."""
    at: dict[str, int] = {}
    for one in heard:
        if one.beat.service.partition("-")[0] in _FLOW:
            stage = one.beat.stage
            at[one.beat.service] = max(at.get(one.beat.service, 0), stage.in_flight, stage.lag or 0)
    most = max(at, key=lambda service: at[service], default=None)
    if most is not None and at[most]:
        note = next((one.beat.stage.note for one in heard if one.beat.service == most and one.beat.stage.note), "")
        return f"the groups are at {most} ({at[most]} wait for it or are in it)" + (f": {note}" if note else "")
    for one in heard:
        if one.beat.service.startswith("environment") and one.beat.stage.note:
            return f"{one.beat.service}: {one.beat.stage.note}"
    return ""
