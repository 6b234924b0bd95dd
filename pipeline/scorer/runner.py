"""Runs the raters of an ensemble over one group.

It always returns one `Rating` a sample for each rater: a rater that hangs, raises or answers nonsense loses only its
own ratings. Infrastructure failures are retried with exponential backoff; then, as after a timeout, the rating is
missing and its status says why. A failure counts as infrastructure if the rater raises `RaterUnavailable` or if
`is_outage` recognizes its exception. The latter does not hold for a single argument that fails over and over while
others are answered.

A sync rater runs in a worker thread. A thread cannot be killed: after a timeout it is abandoned and goes on by itself.
While as many abandoned calls of a rater still run as its concurrency allows, further calls count as timed out at once,
except for an occasional trial (`HungCalls`): once a trial is answered, the rater is called again as before. A function
that may hang for good, or holds the interpreter lock, needs a process of its own: if its parameters say so
(`runs_apart`), it is called in worker processes.
"""

import importlib
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import anyio
import anyio.to_thread

from lachesis.pipeline.common.backoff import RetryPolicy
from lachesis.pipeline.common.call_times import CallTimes
from lachesis.pipeline.common.error_remedies import with_cure
from lachesis.pipeline.common.outages import is_outage
from lachesis.pipeline.common.real_number import without_addresses
from lachesis.pipeline.common.secret_texts import error_text
from lachesis.pipeline.common.user_code import log_failure, refuse_ending
from lachesis.pipeline.errors import InfrastructureError, UnreadableAnswerError
from lachesis.pipeline.runtime.retries import RetryWait, WaitLog, retry_outages
from lachesis.pipeline.scorer.circuit_breaker import CircuitBreaker, HungCalls, SuspectArguments
from lachesis.pipeline.scorer.loader import EnsembleRater
from lachesis.pipeline.scorer.rater import FunctionRater, Rating, Sample, rating_within
from lachesis.pipeline.scorer.worker_process import WorkerProcesses
from lachesis.pipeline.telemetry.recorder import traced

__all__ = ["EnsembleRunner", "RaterCalls"]

_MAX_DETAIL = 440
"""Characters kept of what a rater raised; how to mend it follows."""
_APART_WORKERS = 2
"""Worker processes of a function that is called in them."""
_APART_BYTES = 256 << 20
"""Memory of one of its calls, beyond what a worker has before its first one."""
_MAX_REPEATED = 100
"""Characters of the last failure that calls which are not made repeat; a score carries 200 in all."""


class RaterCalls(NamedTuple):
    """What to say of calls of a rater that take much longer than usual, and whether all that are under way do."""

    text: str
    are_all: bool


class EnsembleRunner:
    """Rates groups with the members of one ensemble. One a process; groups may be rated concurrently."""

    def __init__(self, members: Sequence[EnsembleRater], report: Callable[[RetryWait], None] | None = None) -> None:
        """`report` is called before a call is repeated; without it, such waits are logged."""
        report = report or WaitLog()
        self._calls = [_MemberCalls(member, report) for member in members]

    @property
    def is_asynchronous(self) -> bool:
        """Whether any rater is asynchronous."""
        return not all(calls.at_once for calls in self._calls)

    def find_late(self, now_s: float) -> dict[str, RaterCalls]:
        """Return rater name -> its calls, for raters that take much longer than usual.

        To be called every `LOOK_S`, as `CallTimes.check_clock`.
        """
        found = {calls.member.name: calls.find_late(now_s) for calls in self._calls}
        return {name: late for name, late in found.items() if late is not None}

    async def rate_group(self, samples: Sequence[Sample]) -> dict[str, list[Rating]]:
        """Return rater name -> one rating a sample."""
        results: dict[str, list[Rating]] = {
            calls.member.name: [Rating(None, "error")] * len(samples) for calls in self._calls
        }
        waiting = [calls for calls in self._calls if not calls.at_once]
        for calls in self._calls:
            if calls.at_once:
                await calls.rate(samples, results[calls.member.name])
        if waiting:
            async with anyio.create_task_group() as tasks:
                for calls in waiting:
                    tasks.start_soon(calls.rate, samples, results[calls.member.name])
        return results

    @property
    def rates_samples(self) -> bool:
        """Whether any rater rates single samples, rather than those of a group together."""
        return not all(calls.member.rater.rates_groups for calls in self._calls)

    async def rate_once(
        self, samples: Sequence[Sample], own: Mapping[str, Sequence[Rating]] | None = None
    ) -> dict[str, list[Rating]]:
        """Return rater name -> one rating a sample, of samples on which nothing depends.

        Raters that rate groups are left out: they compare the samples. `own`: ratings of the same samples under their
        own task; what a rater did not rate there is left out as well. Nothing is retried, and no failure counts as one
        of the rater.
        """
        results = {
            calls.member.name: [Rating(None, "abstain")] * len(samples)
            for calls in self._calls
            if not calls.member.rater.rates_groups
        }
        async with anyio.create_task_group() as tasks:
            for calls in self._calls:
                name = calls.member.name
                for i in range(len(samples)) if name in results else ():
                    if own is None or own[name][i].value is not None:
                        tasks.start_soon(calls.rate_once, samples[i], results[name], i)
        return results


class _HungError(Exception):
    """Raised when no more threads are spent on a rater because its earlier calls hang."""


def _key(argument: Any) -> int:
    """Return what a sample, or a list of them, is recognised by when it comes again."""
    samples = argument if isinstance(argument, list) else [argument]
    return hash(tuple((sample.env, sample.item, sample.prompt, sample.completion) for sample in samples))


class _CallsApart:
    """Calls a function of ours in worker processes."""

    def __init__(self, rater: FunctionRater) -> None:
        self._workers = WorkerProcesses(_APART_WORKERS, _APART_BYTES)
        self._what = f"rated an answer by {rater.name}"
        self._function = rater.function.__module__, rater.function.__qualname__
        self._params = rater.params

    async def rate(self, argument: Any) -> Any:
        return await self._workers.call(self._what, _rate_apart, *self._function, self._params, argument)


def _rate_apart(module: str, name: str, params: dict[str, Any], argument: Any) -> Any:
    """Call a function by its name, which stands for its rater in its module."""
    found: FunctionRater = getattr(importlib.import_module(module), name)
    return found.function(argument, **params)


class _MemberCalls:
    """Calls of one rater: its concurrency limit, timeout, retries and abandoned threads."""

    def __init__(self, member: EnsembleRater, report: Callable[[RetryWait], None]) -> None:
        self.member = member
        self._report = report
        self._policy = RetryPolicy(first_s=member.config.backoff_s, jitter=0.5, attempts=member.config.retries + 1)
        rater = member.rater
        self._function: Callable[[Any], Any] = rater.rate_group if rater.rates_groups else rater.rate
        declared: Callable[..., Any] = self._function
        at_once_most = rater.calls_at_once
        if isinstance(rater, FunctionRater):
            self._function, declared = rater.call, rater.function
            if rater.runs_apart:
                self._function = declared = _CallsApart(rater).rate
                at_once_most = _APART_WORKERS
        self._on_loop = rater.inline or inspect.iscoroutinefunction(declared)
        self.at_once = rater.inline and not inspect.iscoroutinefunction(declared)
        """Whether a call is a function's, on this thread: no task, slot or timeout could do anything for it."""
        self._judge = rating_within(member.bounds)
        self._suspects = SuspectArguments()
        self._away_since: datetime | None = None
        """When it failed first without having answered since."""
        self._last_failure = ""
        """In words, with the time since when it is away."""
        self._breaker = CircuitBreaker(member.config.breaker_failures, member.config.breaker_s)
        self._refusing_ending = refuse_ending(f"rater {member.name}")
        self._slots = anyio.Semaphore(min(member.config.concurrency, at_once_most or member.config.concurrency))
        self._threads = anyio.CapacityLimiter(member.config.concurrency)
        self._lock = threading.Lock()
        self._hung = HungCalls(member.config.concurrency)
        self._times = CallTimes()

    def find_late(self, now_s: float) -> RaterCalls | None:
        """Return what to say of calls that take much longer than the last ones did; None: none does."""
        self._times.check_clock(now_s)
        late = self._times.late(now_s)
        if late is None:
            return None
        given_up = f"each is given up after timeout_s, {self.member.config.timeout_s:g} s"
        return RaterCalls(f"{late.describe('calls')}; {given_up}", late.are_all)

    async def rate(self, samples: Sequence[Sample], column: list[Rating]) -> None:
        """Rate a group's samples, all at once or each by itself, into `column`."""
        name = self.member.name
        with traced(f"score {name}", attributes={"rl.rater": name, "rl.samples": len(samples)}) as found:
            if self.member.rater.rates_groups:
                await self._rate_group(samples, column)
            elif self.at_once:
                await self._rate_in_turn(samples, self._judge, column)
            else:
                async with anyio.create_task_group() as tasks:
                    for i, sample in enumerate(samples):
                        tasks.start_soon(self._rate_one, sample, column, i)
            found["rl.missing"] = sum([rating.status != "ok" for rating in column])

    async def rate_once(self, sample: Sample, column: list[Rating], i: int) -> None:
        """Rate a sample once, into `column`; every failure is a missing rating, and is forgotten."""
        async with self._slots:
            if self._breaker.is_open:
                return
            with anyio.move_on_after(self.member.config.timeout_s):
                try:
                    column[i] = self._judge(await self._call(sample))
                except Exception as error:  # noqa: BLE001 - the rater is foreign code, and nothing depends on this call
                    column[i] = Rating(None, "error", type(error).__name__)

    async def _rate_one(self, sample: Sample, column: list[Rating], i: int) -> None:
        column[i] = await self._rate_patiently(sample, self._judge)

    async def _rate_group(self, samples: Sequence[Sample], column: list[Rating]) -> None:

        def judge(values: Any) -> Rating:
            if isinstance(values, str | bytes | dict | set | frozenset) or not hasattr(values, "__len__"):
                return Rating(None, "error", f"returned {values!r:.80} for a group of {len(samples)}")
            if len(values) != len(samples):
                return Rating(None, "error", f"returned {len(values)} ratings for {len(samples)} samples")
            column[:] = [self._judge(value) for value in values]
            return Rating(0.0)

        outcomes: list[Rating] = [Rating(None, "error")]
        await self._rate_in_turn([list(samples)], judge, outcomes)
        if outcomes[0].status != "ok":
            column[:] = outcomes * len(samples)

    async def _rate_in_turn(
        self, arguments: Sequence[Any], judge: Callable[[Any], Rating], column: list[Rating]
    ) -> None:
        """Call with each argument, one after the other; every failure of the rater is a missing rating in `column`."""
        i = 0
        while (i := self._rate_at_once(arguments, judge, column, i)) < len(arguments):
            column[i] = await self._rate_patiently(arguments[i], judge)
            i += 1

    async def _rate_patiently(self, argument: Any, judge: Callable[[Any], Rating]) -> Rating:
        """Call within a slot and the time limit, and again where infrastructure failed."""
        async with self._slots:
            if not self._breaker.admits(anyio.current_time()):
                return Rating(None, "unavailable", f"not called: its last calls all failed, {self._last_failure}")
            failures: list[BaseException] = []
            with anyio.move_on_after(self.member.config.timeout_s):
                rating = await self._attempt_timed(argument, judge, failures)
                return rating or self._given_up(argument, failures[-1], f"after {len(failures)} attempts")
            seconds = f"{self.member.config.timeout_s:g} s"
            if not failures:  # a rater that is slow on one answer is not down
                return Rating(None, "timeout", f"no rating within {seconds}")
            return self._given_up(argument, failures[-1], f"after {len(failures)} attempts in {seconds}")

    async def _attempt_timed(
        self, argument: Any, judge: Callable[[Any], Rating], failures: list[BaseException]
    ) -> Rating | None:
        """Do as `_attempt`, and note how long that is under way."""
        call, rating = object(), None
        self._times.begin(call, anyio.current_time())
        try:
            rating = await self._attempt(argument, judge, failures)
        finally:
            answered = rating is not None and rating.status != "timeout"
            self._times.end(call, anyio.current_time(), answered=answered)
        return rating

    async def _attempt(
        self, argument: Any, judge: Callable[[Any], Rating], failures: list[BaseException]
    ) -> Rating | None:
        """Return the rating, None if the rater was away at every attempt: `failures` gets why, each time."""

        async def call() -> Rating:
            try:
                answer = await self._call(argument)
                self._suspects.answered(_key(argument))
                self._answered()
                return judge(answer)
            except _HungError as error:
                return Rating(None, "timeout", str(error))
            # The rater is foreign code: whatever it raises is its own failure, on this sample alone, unless it says
            # that something is away.
            except Exception as error:
                if not is_outage(error):
                    self._answered()
                    return Rating(None, "error", self._failure_text(error))
                failures.append(error)
                kind = UnreadableAnswerError if isinstance(error, UnreadableAnswerError) else InfrastructureError
                raise kind(self._failure_text(error)) from error

        try:
            return await call()  # the loop would cost as much again as a call that succeeds
        except InfrastructureError as error:
            first: InfrastructureError | None = error

        async def repeat() -> Rating:
            nonlocal first
            if first is not None:
                error, first = first, None
                raise error
            return await call()

        try:
            retrying = retry_outages(f"rater {self.member.name}", self._report, policy=self._policy)
            rating: Rating = await retrying(repeat)
        except InfrastructureError:
            return None
        return rating

    @property
    def _since(self) -> str:
        return f"; away since {self._away_since:%Y-%m-%d %H:%M:%S} UTC" if self._away_since else ""

    def _answered(self) -> None:
        self._breaker.succeeded()
        self._away_since = None

    def _failure_text(self, error: BaseException) -> str:
        log_failure(f"rater {self.member.name}", error)
        return with_cure(without_addresses(error_text(error))[:_MAX_DETAIL], error)

    def _given_up(self, argument: Any, failure: BaseException, tried: str) -> Rating:
        self._breaker.failed(anyio.current_time())
        self._away_since = self._away_since or datetime.now(UTC)
        tried += self._since
        alone = self._suspects.failed(_key(argument))
        text = self._failure_text(failure)
        self._last_failure = f"the newest with {text[:_MAX_REPEATED]}{self._since}"
        if alone and (isinstance(failure, UnreadableAnswerError) or not isinstance(failure, InfrastructureError)):
            return Rating(None, "error", f"{text} (each time, while others were answered)")
        return Rating(None, "unavailable", f"{text} (gave up {tried})")

    def _rate_at_once(
        self, arguments: Sequence[Any], judge: Callable[[Any], Rating], column: list[Rating], first: int
    ) -> int:
        """Call an inline rater with the arguments from `first` on; return the first with which there is something to
        wait for, or their number."""
        done = first
        if not self.at_once or self._breaker.is_open:
            return done
        for argument in arguments[first:]:
            try:
                with self._refusing_ending:
                    answer = self._function(argument)
                if type(answer) is not float and inspect.isawaitable(answer):  # not a function's after all
                    self.at_once = False
                    if inspect.iscoroutine(answer):
                        answer.close()
                    break
                column[done] = judge(answer)
            except Exception as error:  # noqa: BLE001 - as above
                if is_outage(error):
                    break
                column[done] = Rating(None, "error", self._failure_text(error))
            done += 1
        if done > first:
            self._answered()
            self._suspects.others_answered(done - first)
        return done

    async def _call(self, argument: Any) -> Any:
        if not self._on_loop:
            result = await self._in_thread(argument)
            if not inspect.isawaitable(result):
                return result
        with self._refusing_ending:
            if self._on_loop:
                result = self._function(argument)
            return await result if inspect.isawaitable(result) else result

    async def _in_thread(self, argument: Any) -> Any:
        if not self._hung.admits(anyio.current_time()):
            raise _HungError(f"{len(self._hung)} earlier calls that timed out are still running")
        finished = False
        call = object()

        def work() -> Any:
            nonlocal finished
            try:
                with self._refusing_ending:
                    return self._function(argument)
            finally:
                with self._lock:
                    finished = True
                    self._hung.ended(call)

        try:
            answer = await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._threads)
        except anyio.get_cancelled_exc_class():
            with self._lock:
                if not finished:
                    self._hung.gave_up(call, anyio.current_time())
            raise
        with self._lock:
            self._hung.answered()
        return answer
