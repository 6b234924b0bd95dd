"""A policy that collapses within sixteen steps of 4 groups is seen within few of them, by its cause."""

import msgspec
import pytest

from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.logic.check import LADDER, RunSettings
from lachesis.pipeline.health.logic.monitor import EnvMonitor
from lachesis.schemas.ledger import GroupRef, Mismatch

PER_STEP = 4


def group(groups, step, far, entropy=None, **changes):
    """A group of the step; `far` is how much of the collapse lies behind: entropy 1.84 -> .03, pass rate .30 -> .03."""
    rng = groups.rng
    entropy = entropy or 1.84 * (0.03 / 1.84) ** far
    texts = [rng.getrandbits(32) for _ in range(4)]
    texts = [texts[0] if rng.random() < far**2 else text for text in texts]
    verdicts = [float(rng.random() < 0.3 - 0.27 * far) for _ in range(4)]
    fields = {
        "ratings": {"exact": verdicts},
        "scores": verdicts,
        "lengths": [60] * 4,
        "policy_step": step,
        "signals": {
            "logprobs": [-entropy * rng.lognormvariate(0, 0.3) for _ in range(4)],
            "texts": texts,
            "distinct": 0.9 - 0.7 * far,
            "shared": 0.1 + 0.85 * far,
        },
    }
    return groups.score(**fields | changes)


def steps_until(groups, monitor, severity, far_of, steps=40):
    """The step at which the collapse is called at least so bad, and the result; None if it never is."""
    for step in range(steps):
        for _ in range(PER_STEP):
            results = groups.feed(monitor, group(groups, step, far_of(step)))
            result = (results or {}).get("collapse")
            if result is not None and LADDER.index(result.severity) >= LADDER.index(severity):
                return step, result
    return None


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("healthy_steps", [0, 40])
def test_a_collapse_is_seen_while_it_happens_and_named(groups, seed, healthy_steps):
    groups.rng.seed(seed)
    monitor = EnvMonitor(HealthConfig())
    if healthy_steps:
        assert steps_until(groups, monitor, "inform", lambda _: 0.0, healthy_steps) is None

    def far(step):
        return min(1.0, step / 16)

    step, result = steps_until(groups, monitor, "warn", far)
    assert step <= 12
    assert "the step is too large; lower training.learner.learning_rate" in result.reason
    step, _ = steps_until(groups, monitor, "quarantine", lambda later: far(step + later))
    assert step <= 12  # later
    assert monitor.standing.cause == "collapse"


def test_entropy_that_falls_over_hundreds_of_steps_is_no_collapse(groups):
    monitor = EnvMonitor(HealthConfig())
    for step in range(400):
        for _ in range(PER_STEP):
            entropy = 1.84 * 0.03 ** (step / 400)
            results = groups.feed(monitor, group(groups, step, 0.0, entropy))
            assert results is None or results["collapse"].severity in {"idle", "ok"}
    assert monitor.standing.quarantined_from is None


def test_a_fall_by_which_scores_rise_only_informs(groups):
    """Short answers that are learned at once."""
    monitor, found = EnvMonitor(HealthConfig()), set()
    for step in range(60):
        far = min(1.0, step / 16)
        for _ in range(PER_STEP):
            results = groups.feed(monitor, group(groups, step, far, scores=[0.3 + 0.6 * far] * 4, lengths=[20] * 4))
            found |= {results["collapse"].severity} if results else set()
    assert found <= {"idle", "ok", "inform"}
    assert monitor.standing.quarantined_from is None


def test_a_restart_in_an_open_window_comes_to_the_same(groups):
    scores = [group(groups, i // 4, min(1.0, max(0, i - 200) / 64)) for i in range(400)]

    def run(restart):
        monitor, found, first = EnvMonitor(HealthConfig()), [], 0
        i = 0
        while i < len(scores):
            monitor.score(scores[i])
            i += 1
            if monitor.window_full:
                found.append(monitor.evaluate())
                first = i
            elif restart and i % 37 == 0:
                state = msgspec.msgpack.decode(msgspec.msgpack.encode(monitor.state_dict()))
                monitor = EnvMonitor(HealthConfig())
                monitor.load_state_dict(state)
                for score in scores[first:i]:  # the open window is read again
                    monitor.score(score)
                    assert not monitor.window_full
        return found

    calm = run(restart=False)
    assert len(calm) > 400 // 64
    assert run(restart=True) == calm


def add_batches(monitor, lag, number=20, count=8):
    for n in range(count):
        refs = [
            GroupRef(
                group=f"{n:031x}{k}", seq=100 * n + k + 1, env="e", sequences=1, tokens=1,
                policy_step=number + n - lag, advantages=[0.0],
            )
            for k in range(4)
        ]  # fmt: skip
        monitor.batch(number + n, refs)


def batches(monitor, lag, number=20):
    add_batches(monitor, lag, number)
    return judged(monitor)


def judged(monitor):
    return {result.check: result for result in monitor.judge_batches()}


AGREE = Mismatch(0.01, 0.001, 1.0, 0.95, 0.004, 1.8)


@pytest.mark.parametrize(
    ("first", "later", "lag", "found"),
    [
        (AGREE, AGREE, 1, ("ok", "ok")),
        (AGREE, Mismatch(0.5, 1.4, 1.0, 0.2, 0.6, 1.0), 1, ("halt", "warn")),  # the step, and what follows from it
        (AGREE, Mismatch(0.5, 1.4, 1.0, 0.2, None, 0.2), 1, ("halt", "warn")),  # seen by the trainer's entropy alone
        (AGREE, Mismatch(0.5, 1.4, 1.0, 0.2, 0.6, 1.0), 0, ("warn", "halt")),  # tokens of the very policy must agree
        (AGREE, Mismatch(0.5, 1.4, 1.0, 0.2, 0.004, 1.8), 1, ("ok", "halt")),  # small steps explain nothing
        (Mismatch(0.5, 1.4, 1.0, 0.2, 0.6, 1.8),) * 2 + (1, ("warn", "halt")),  # it never agreed
        (AGREE, Mismatch(0.01, 0.001, 1.0, 0.95, 0.6, 1.8), 1, ("warn", "ok")),
        (Mismatch(0.01, 0.001, 1.0, 0.95),) * 2 + (1, ("idle", "ok")),  # the step was not measured
    ],
)
def test_steps_too_large_are_told_apart_from_tokens_of_another_policy(groups, first, later, lag, found):
    step_size, rollout_training = found
    monitor = EnvMonitor(HealthConfig())
    monitor.trained([first] * 4)
    batches(monitor, lag, number=8)
    restarted = EnvMonitor(HealthConfig())
    restarted.load_state_dict(msgspec.msgpack.decode(msgspec.msgpack.encode(monitor.state_dict())))
    restarted.trained([later] * 4)
    results = batches(restarted, lag)
    assert results["step_size"].severity == step_size
    assert results["rollout_training"].severity == rollout_training
    if step_size == "halt":
        assert "the step is too large" in results["step_size"].reason
        assert "see step_size" in results["rollout_training"].reason
    elif rollout_training == "halt":
        assert "of different policies" in results["rollout_training"].reason


def test_old_reports_are_read(groups):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode([0.1, 0.2, 1.0, 0.9]), type=Mismatch).step_kl is None


@pytest.mark.parametrize(
    ("allowed", "moved", "severity"),
    [(0.1, 0.3, "warn"), (0.5, 0.3, "ok"), (0.5, 0.6, "inform"), (0.5, 1.1, "warn"), (0.02, 0.05, "warn")],
)
def test_a_step_is_too_large_by_what_the_run_allows(groups, allowed, moved, severity):
    monitor = EnvMonitor(HealthConfig(), RunSettings(max_step_kl=allowed))
    monitor.trained([AGREE] * 3 + [Mismatch(0.01, 0.001, 1.0, 0.95, moved, 1.8)])
    result = batches(monitor, 1)["step_size"]
    assert (result.severity, result.value, result.threshold) == (severity, moved, allowed)


@pytest.mark.parametrize(("between", "severity"), [(2, "warn"), (7, "inform")])
def test_a_step_a_little_too_large_warns_if_it_comes_again(groups, between, severity):
    """As after the first step of AdamW without warm-up, the others are small."""
    large = Mismatch(0.01, 0.001, 1.0, 0.95, 0.14, 1.8)
    monitor = EnvMonitor(HealthConfig(), RunSettings(max_step_kl=0.1))
    monitor.trained([large])
    assert batches(monitor, 1)["step_size"].severity == "inform"
    restarted = EnvMonitor(HealthConfig(), RunSettings(max_step_kl=0.1))
    restarted.load_state_dict(msgspec.msgpack.decode(msgspec.msgpack.encode(monitor.state_dict())))
    restarted.trained([*[AGREE] * between, large])
    assert batches(restarted, 1)["step_size"].severity == severity


def test_a_step_that_the_run_allows_still_explains_why_rollouts_fall_behind(groups):
    monitor = EnvMonitor(HealthConfig(), RunSettings(max_step_kl=0.5))
    monitor.trained([AGREE] * 3 + [Mismatch(0.5, 1.4, 1.0, 0.2, 0.3, 1.8)])
    results = batches(monitor, 1)
    assert (results["step_size"].severity, results["rollout_training"].severity) == ("halt", "warn")


RECORDED = [
    Mismatch(*figures)
    for figures in (
        (0.0, 0.0, 1.0, 1.0, 3.7585, 0.4141),
        (3.2681, 2.7252, 0.4571, 0.0369, 28.7741, 0.7109),
        (4.0375, 13.5239, 10.4863, 0.0071, 18.8245, 0.4869),
        (4.0291, 3.8778, 0.8487, 0.0836, 506.2493, 0.3831),
        (0.8785, 1.0525, 1.174, 0.2253, 2.3492, 0.6009),
    )
]
"""What the trainer of the demo reported of its first steps with thirty times its learning rate, 4 groups a step."""


@pytest.mark.parametrize("restarts", [False, True])
def test_a_first_step_that_is_too_large_is_named_with_the_report_of_it(restarts):
    """What the second step's tokens disagree by is the first step's doing."""
    monitor = EnvMonitor(HealthConfig(), RunSettings(max_step_kl=0.1))
    add_batches(monitor, 2, number=0, count=8)
    assert monitor.batches_full
    assert judged(monitor)["step_size"].severity == "idle"
    if restarts:
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(monitor.state_dict()))
        monitor = EnvMonitor(HealthConfig(), RunSettings(max_step_kl=0.1))
        monitor.load_state_dict(state)
    add_batches(monitor, 0, number=8, count=1)  # those of the report were 2 steps behind
    assert not monitor.batches_full
    monitor.trained(RECORDED)
    assert monitor.batches_full
    results = judged(monitor)
    assert (results["step_size"].severity, results["rollout_training"].severity) == ("halt", "warn")
    assert "the step is too large" in results["step_size"].reason
    assert monitor.standing.cause == "step_size"


def test_a_report_of_steps_that_the_run_allows_waits_for_eight_batches():
    monitor = EnvMonitor(HealthConfig(), RunSettings(max_step_kl=0.1))
    add_batches(monitor, 1, count=7)
    monitor.trained([AGREE] * 4)
    assert not monitor.batches_full
    unwatched = EnvMonitor(HealthConfig(off=["step_size"]), RunSettings(max_step_kl=0.1))
    add_batches(unwatched, 1, count=7)
    unwatched.trained(RECORDED)
    assert not unwatched.batches_full


def test_tokens_that_disagreed_before_any_step_are_of_another_policy():
    monitor = EnvMonitor(HealthConfig(), RunSettings(max_step_kl=0.1))
    add_batches(monitor, 1)
    monitor.trained([Mismatch(0.5, 1.4, 1.0, 0.2, 3.8, 1.8), *RECORDED[1:]])
    results = judged(monitor)
    assert (results["step_size"].severity, results["rollout_training"].severity) == ("warn", "halt")


def test_a_step_that_is_too_large_is_named_before_what_follows_from_it():
    """SmolLM2-135M-Instruct on sums, 4 groups a step, thirty times its rate: reports of step 1, and of 2 and 3."""
    monitor = EnvMonitor(HealthConfig(), RunSettings(max_step_kl=0.1))
    add_batches(monitor, 0, number=0, count=2)
    monitor.trained([Mismatch(0.0, 0.0, 1.0, 1.0, 5.0982, 1.499)])
    assert monitor.batches_full
    results = judged(monitor)
    assert (results["step_size"].severity, results["rollout_training"].severity) == ("warn", "ok")
    add_batches(monitor, 1, number=2, count=2)
    monitor.trained([Mismatch(3.7741, 3.9878, 1.2137, 0.0511, 59.531, 0.8363),
                     Mismatch(3.0657, 2.7617, 0.696, 0.4026, 263.964, 0.3722)])  # fmt: skip
    assert monitor.batches_full
    results = judged(monitor)
    assert (results["step_size"].severity, results["rollout_training"].severity) == ("halt", "warn")
    assert monitor.standing.cause == "step_size"
