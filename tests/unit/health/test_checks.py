"""Every check against a planted fault: how bad it says it is, and after how many windows at most."""

import math

import msgspec
import pytest

from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.logic.check import HealthWindow, RunSettings
from lachesis.pipeline.health.logic.monitor import CHECKS, EnvMonitor, _checks
from lachesis.pipeline.normalizer.logic.answer_faults import find_group_fault
from lachesis.schemas.annotations import DeadLetter
from lachesis.schemas.ledger import EnvMismatch, GroupRef, Mismatch

WARM_UP = 6
"""Healthy windows before a fault begins."""


def letter(n, *, leased=True):
    return DeadLetter(
        run="r", env="sums", revision="live", stage="scorer", kind="data", stream="ROLLOUTS", seq=100_000 + n,
        group=f"{n:032x}", reason="NaN", place="x", time_ns=1, leased=leased,
    )  # fmt: skip


@pytest.mark.slow
def test_healthy_groups_are_found_healthy(groups, monitor):
    """Nothing warns, and every check judges."""
    judged = set()
    for results in groups.windows(monitor, 40):
        loud = {name for name, result in results.items() if result.severity not in {"idle", "ok", "inform"}}
        assert not loud
        judged |= {name for name, result in results.items() if result.severity != "idle"}
    assert judged == set(CHECKS) - {
        "staleness",
        "step_size",
        "task_blindness",
        "rollout_training",
        "stale_lengths",
        "held_out",
        "unpaid_bonuses",
        "phrases",
        "language",
        "rater_drift",
    }
    assert monitor.standing.quarantined_from is None


def shuffled_rater(groups):
    """A rater of three that says anything, as from now on."""
    score = groups.score()
    noise = [groups.rng.random() for _ in score.scores]
    return groups.score(ratings={**score.ratings, "judge": noise})


def long_is_good(groups, i):
    score = groups.score()
    ranked = sorted(range(8), key=lambda k: score.scores[k])
    lengths = [0] * 8
    for place, k in enumerate(ranked):
        lengths[k] = 40 + 10 * place + i // 8
    others = [groups.rng.gauss(0.5, 0.01) for _ in ranked]  # one of two raters pays for length
    return groups.score(ratings={"style": score.ratings["style"], "exact": others}, lengths=lengths)


def one_text(groups, _):
    text = groups.rng.randrange(3)
    return groups.score(signals={"texts": [text] * 8})


# check, a group of the fault, the least it must be called, windows until then
FAULTS = [
    ("reward_drift", lambda g, i: g.score(level=0.8), "inform", 1),
    ("score_shift", lambda g, i: g.score(level=0.65), "inform", 1),
    ("step_change", lambda g, i: g.score(level=0.58), "inform", 2),
    ("slow_drift", lambda g, i: g.score(level=0.5 + i / 64 * 0.02), "inform", 6),
    ("change_point", lambda g, i: g.score(level=0.65), "inform", 3),
    ("saturation", lambda g, i: g.score(level=3.0), "halt", 1),
    ("zero_variance", lambda g, i: g.score(scores=[0.5] * 8), "halt", 1),
    ("truncated", lambda g, i: g.score(signals={"truncated": 3}), "warn", 1),
    ("truncated", lambda g, i: g.score(signals={"truncated": 6}), "halt", 1),
    ("length_hacking", long_is_good, "inform", 1),
    ("length_hacking", long_is_good, "quarantine", 4),
    ("rater_at_odds", lambda g, i: shuffled_rater(g), "inform", 1),
    ("entropy", lambda g, i: g.score(signals={"logprobs": [-0.1] * 8}), "warn", 6),
    ("entropy", lambda g, i: g.score(signals={"logprobs": [-0.001] * 8}), "halt", 7),
    ("mode_collapse", one_text, "quarantine", 1),
    ("mode_collapse", lambda g, i: g.score(signals={"distinct": 0.45}), "warn", 1),
    ("missing", lambda g, i: g.score(statuses={"judge": ["timeout"] + ["ok"] * 7}), "inform", 1),
    ("missing", lambda g, i: g.score(scores=[None] + [0.5, 0.4] * 3 + [0.2]), "inform", 1),
    ("missing", lambda g, i: g.score(scores=[None] * 8), "warn", 1),
    ("nonfinite", lambda g, i: g.score(statuses={"judge": ["nonfinite"] + ["ok"] * 7}), "halt", 1),
]
LADDER = ("idle", "ok", "inform", "warn", "quarantine", "halt")


@pytest.mark.slow
@pytest.mark.parametrize("planted", FAULTS, ids=lambda planted: f"{planted[0]}-{planted[2]}")
@pytest.mark.parametrize("seed", range(3))
def test_a_planted_fault_is_caught(groups, monitor, planted, seed):
    check, fault, least, within = planted
    groups.rng.seed(seed)
    before = groups.windows(monitor, WARM_UP)
    assert LADDER.index(before[-1][check].severity) < LADDER.index(least)
    found = groups.windows(monitor, within, lambda i: fault(groups, i))
    caught = [results[check] for results in found if LADDER.index(results[check].severity) >= LADDER.index(least)]
    assert caught, [results[check] for results in found]
    assert caught[0].examples, "an alert names groups to look at"
    assert all(len(example) == 32 for example in caught[0].examples)
    assert caught[0].reason


def test_what_was_not_generated_under_a_lease_counts_against_nobody(groups, monitor):
    groups.windows(monitor, WARM_UP)
    for n in range(1, 20):
        monitor.dead(letter(n, leased=False))
    (results,) = groups.windows(monitor, 1)
    assert results["nonfinite"].severity == "ok"
    for n in range(20, 30):
        monitor.dead(letter(n, leased=True))
    (results,) = groups.windows(monitor, 1)
    assert results["nonfinite"].severity == "halt"


def test_one_unreadable_group_warns_and_a_hundredth_of_them_halts(groups, monitor):
    groups.windows(monitor, WARM_UP)
    monitor.dead(letter(1))
    (results,) = groups.windows(monitor, 1)
    assert results["nonfinite"].severity == "warn"
    assert results["nonfinite"].examples == [f"{1:032x}"]
    assert monitor.standing.quarantined_from is None
    for n in range(2, 8):
        monitor.dead(letter(n))
    (results,) = groups.windows(monitor, 1)
    assert results["nonfinite"].severity == "halt"
    assert monitor.standing.halted


@pytest.mark.parametrize(
    "broken",
    [
        lambda values: [value + 0.001 for value in values],  # off centre
        lambda values: [3.0, -3.0] + [0.0] * 6,  # beyond (n-1)/sqrt(n) = 2.47
    ],
)
def test_an_advantage_that_cannot_be_halts(groups, monitor, broken):
    groups.windows(monitor, 1)
    scores = []
    for _ in range(64):
        score = groups.score()
        reward = groups.reward(score)
        if len(scores) == 40:
            reward = groups.reward(score, advantages=broken(reward.advantages))
        results = groups.feed(monitor, score, reward)
        scores.append(score.group)
    assert results["advantages"].severity == "halt"
    assert results["advantages"].examples == [scores[40]]


def test_shaped_groups_are_held_to_their_bounds_too(groups, monitor):
    added = [0.05, 0.0] * 4

    def shaped(score):
        alike = {"verdict": "zero_variance", "rewards": [0.0] * 8, "shaping": added, "shaping_scale": 1.0}
        return groups.reward(score, "centred", advantages=[0.025, -0.025] * 4, **alike)

    results = groups.windows(monitor, 1, reward=shaped)[0]
    assert results["advantages"].severity == "ok"

    def blown(score):
        return msgspec.structs.replace(shaped(score), advantages=[3.0, -3.0] * 4)

    assert groups.windows(monitor, 1, reward=blown)[0]["advantages"].severity == "halt"


def test_advantages_that_few_samples_carry_inform(groups, monitor):
    lonely = [7 / math.sqrt(8)] + [-1 / math.sqrt(8)] * 7

    def all_lonely(score):
        return groups.reward(score, advantages=lonely)

    def few_lonely(score):
        return groups.reward(score, advantages=lonely if score.seq % 8 == 0 else [0.01, -0.01] * 4)

    assert groups.windows(monitor, 1, reward=all_lonely)[0]["advantages"].value == pytest.approx(6 / math.sqrt(7))
    assert groups.windows(monitor, 1, reward=all_lonely)[0]["advantages"].severity == "ok"
    assert groups.windows(monitor, 1, reward=few_lonely)[0]["advantages"].severity == "inform"


def refs(groups, lag, n, last=None):
    newest = None if last is None else 20 - last
    return [
        GroupRef(group=f"{i:032x}", seq=i + 1, env="sums", sequences=8, tokens=8, policy_step=20 - lag, advantages=[],
                 newest_step=newest)
        for i in range(n)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("bound", "lag", "severity"),
    [(0, 0, "ok"), (0, 1, "warn"), (2, 2, "ok"), (2, 3, "warn"), (4, 4, "ok"), (8, 4, "ok"), (8, 5, "inform"),
     (32, 20, "inform"), (32, 32, "inform"), (32, 33, "warn")],
)  # fmt: skip
def test_old_batches_are_caught_after_eight_by_the_bound_of_the_run(groups, bound, lag, severity):
    monitor = EnvMonitor(HealthConfig(halts=CHECKS), RunSettings(max_staleness=bound))
    for _ in range(7):
        monitor.batch(20, refs(groups, lag, 16))
        assert not monitor.batches_full
    monitor.batch(20, refs(groups, lag, 16))
    assert monitor.batches_full
    result, idle, *_ = monitor.judge_batches()
    assert (idle.check, idle.severity) == ("rollout_training", "idle")  # no report yet
    assert (result.severity, result.value) == (severity, lag)
    assert bool(result.examples) == (severity != "ok")


def test_tokens_of_policies_before_the_bound_only_inform_if_the_last_ones_are_within_it(groups):
    monitor = EnvMonitor(HealthConfig(halts=CHECKS), RunSettings(max_staleness=2))
    for _ in range(8):
        monitor.batch(20, refs(groups, 14, 16, last=2))
    result = monitor.judge_batches()[0]
    assert (result.severity, result.value) == ("inform", 14)


def test_batches_older_than_the_run_allows_quarantine_where_that_lasts(groups):
    """A bound that was lowered lately leaves older batches behind it; they pass."""
    monitor = EnvMonitor(HealthConfig(), RunSettings(max_staleness=4))
    severities = []
    for _ in range(4):
        for _ in range(8):
            monitor.batch(20, refs(groups, 9, 16))
        severities.append(monitor.judge_batches()[0].severity)
    assert severities == ["warn", "warn", "quarantine", "quarantine"]


@pytest.mark.parametrize("window", [16, 17, 64, 4096])
def test_every_window_size_leaves_something_to_compare_with(groups, window):
    monitor = EnvMonitor(HealthConfig(window=window))
    before = max(4, -(-128 // window))
    assert monitor._before.maxlen * window >= 128
    assert monitor._before.maxlen == before
    if window == 16:
        results = groups.windows(monitor, before + 1)
        for check in ("reward_drift", "score_shift"):  # 64 groups are enough to begin with
            assert [found[check].severity == "idle" for found in results] == [True] * 4 + [False] * (before - 3)


FIRST_JUDGED = {
    "nonfinite": 16, "missing": 16, "faulty_groups": 16, "saturation": 16, "zero_variance": 16, "truncated": 16,
    "length_hacking": 16, "advantages": 16, "mode_collapse": 16, "change_point": 32, "entropy": 48,
    "reward_drift": 80, "score_shift": 80, "step_change": 80, "slow_drift": 80,
}  # fmt: skip
"""Groups after which a check first judges, in windows of 16."""


def test_a_small_run_is_judged_early(groups):
    monitor = EnvMonitor(HealthConfig(window=16))
    first = {}
    for n, results in enumerate(groups.windows(monitor, 6), 1):
        for name, result in results.items():
            if result.severity != "idle":
                first.setdefault(name, 16 * n)
    assert {name: first[name] for name in FIRST_JUDGED} == FIRST_JUDGED


@pytest.mark.parametrize(
    ("samples", "alike", "severity"),
    [(8, 0.7, "inform"), (2, 0.7, "ok"), (2, 0.95, "inform"), (2, 0.99, "halt"), (4, 0.65, "ok"), (16, 0.7, "inform")],
)
def test_small_groups_are_alike_more_often_by_right(groups, monitor, samples, alike, severity):
    drawn = [i < alike * 64 for i in range(64)]

    def one(i):
        scores = [0.0] * samples if drawn[i] else [0.0] * (samples - 1) + [1.0]
        signals = {"logprobs": [-0.5] * samples, "texts": list(range(samples))}
        return groups.score(ratings={"a": scores}, scores=scores, lengths=[50] * samples, signals=signals)

    (results,) = groups.windows(monitor, 1, one)
    assert results["zero_variance"].severity == severity


@pytest.mark.parametrize(("before", "severity"), [(3, "warn"), (0, "inform")])
def test_what_a_task_is_like_from_the_start_is_no_warning(groups, before, severity):
    """Hardly anything succeeds, and answers repeat their words: that is the task, unless it came to be so."""
    monitor = EnvMonitor(HealthConfig())
    groups.windows(monitor, before)

    def one(_):
        return groups.score(scores=[0.0] * 8, signals={"truncated": 3, "distinct": 0.4})

    found = groups.windows(monitor, 3, one)[-1]
    for check in ("saturation", "zero_variance", "truncated", "mode_collapse"):
        assert found[check].severity == severity, check


def test_answers_without_end_quarantine_if_they_are_paid_for(groups):
    monitor = EnvMonitor(HealthConfig())
    groups.windows(monitor, 3)
    groups.windows(monitor, 4, lambda _: groups.score(level=0.3, signals={"truncated": 6}))
    assert monitor.standing.quarantined_from is None
    groups.windows(monitor, 4, lambda _: groups.score(level=0.7, signals={"truncated": 6}))
    assert monitor.standing.cause == "truncated"


@pytest.mark.parametrize(("level", "severity"), [(0.7, "inform"), (0.4, "warn")])
def test_entropy_that_falls_while_scores_rise_only_informs(groups, level, severity):
    monitor = EnvMonitor(HealthConfig())
    groups.windows(monitor, 3)
    found = groups.windows(monitor, 8, lambda _: groups.score(level=level, signals={"logprobs": [-0.1] * 8}))
    assert found[-1]["entropy"].severity == severity


@pytest.mark.parametrize("level", [-5.0, -0.5, 3.0])
def test_scores_outside_the_bounds_are_not_at_them(groups, monitor, level):
    (results,) = groups.windows(monitor, 1, lambda i: groups.score(scores=[level + i / 1000] * 8))
    assert results["saturation"].severity == "ok"


def test_one_success_in_a_large_group_is_no_skewness(groups, monitor):
    def hard(i):
        scores = [float(n == i % 64) for n in range(64)]
        signals = {"logprobs": [-0.5] * 64, "texts": list(range(64))}
        return groups.score(ratings={"a": scores}, scores=scores, lengths=[50] * 64, signals=signals)

    (results,) = groups.windows(monitor, 1, hard)
    assert results["advantages"].severity == "ok"
    assert results["advantages"].value > 7


def test_at_temperature_zero_samples_are_alike_and_sure_by_right(groups, monitor):
    def greedy(_):
        return groups.score(signals={"greedy": True, "texts": [groups.rng.getrandbits(32)] * 8, "logprobs": [0.0] * 8})

    for results in groups.windows(monitor, 4, greedy):
        assert results["mode_collapse"].severity == "ok"
        assert results["entropy"].severity == "idle"


def test_another_temperature_than_the_rollouts_is_named(groups):
    monitor = EnvMonitor(HealthConfig(), RunSettings(sampling_temperature=0.7, trainer_temperature=1.0))
    monitor.trained([Mismatch(0.01, 1.1, 1.0, 0.95)])
    for _ in range(8):
        monitor.batch(20, refs(groups, 0, 16))
    _, result, *_ = monitor.judge_batches()
    assert "rollouts are sampled at temperature 0.7, training.learner.temperature is 1" in result.reason


def test_groups_that_the_trainer_cannot_use_do_not_quarantine_the_environment(groups, monitor):
    """They may be imported, and each of them is out already."""

    def unusable(_):
        return groups.score(signals={"untrainable": "images: no"})

    def reward(score):
        assert find_group_fault(score) == "images: no"
        return groups.reward(score, verdict="quarantined", reason=find_group_fault(score))

    found = groups.windows(monitor, 5, unusable, reward)
    assert {results["faulty_groups"].severity for results in found} == {"inform"}
    assert "images: no" in found[0]["faulty_groups"].reason


@pytest.mark.parametrize(
    ("mismatch", "severity"),
    [
        (Mismatch(0.01, 0.001, 1.0, 0.95), "ok"),
        (Mismatch(-0.11, 0.02, 1.0, 0.95), "warn"),
        (Mismatch(0.01, 0.02, 2.1, 0.95), "warn"),
        (Mismatch(0.01, 0.02, 1.0, 0.29), "warn"),
        (Mismatch(0.01, 1.1, 1.0, 0.95), "halt"),
        (Mismatch(0.01, None, 1.0, 0.95), "warn"),  # NaN is never healthy
    ],
)
def test_a_trainer_of_another_policy_than_the_rollouts_is_caught_with_its_report(groups, monitor, mismatch, severity):
    monitor.trained([Mismatch(0.01, 0.001, 1.0, 0.95)] * 9 + [mismatch])
    for _ in range(8):
        monitor.batch(20, refs(groups, 0, 16))
    _, result, *_ = monitor.judge_batches()
    assert result.severity == severity
    assert bool(result.examples) == (severity != "ok")


def test_wrong_logprobs_of_one_environment_halt_that_one_alone(groups):
    """An environment in a batch with it is checked by its own tokens, by this check and by that of the step's size."""
    wrong, right = EnvMismatch(-4.0, 49.6, 54.0, 0.9), EnvMismatch(0.001, 0.0004, 1.0, 0.99)
    whole = {"k1": -2.0, "k3": 24.8, "ratio": 27.0, "ess": 0.5, "step_kl": 0.2, "entropy": 1.0}
    steps = [Mismatch(**whole, envs={"wrong": wrong, "right": right})] * 8
    found = {}
    for env in ("wrong", "right", "absent"):
        monitor = EnvMonitor(HealthConfig(), RunSettings(env=env))
        monitor.trained(steps)
        for _ in range(8):
            monitor.batch(20, refs(groups, 1, 16))
        results = {result.check: result for result in monitor.judge_batches()}
        found[env] = {name: results[name].severity for name in ("rollout_training", "step_size")}
        assert monitor.standing.halted == (env == "wrong")
        if env == "wrong":
            assert "the trainer agrees with the logprobs of right" in results["rollout_training"].reason
            assert monitor.standing.cause == "rollout_training"
    assert found["right"] == {"rollout_training": "ok", "step_size": "warn"}, "the steps are too large for all"
    assert found["wrong"]["rollout_training"] == "halt"
    assert found["absent"]["rollout_training"] == "idle"


@pytest.mark.parametrize(
    ("signals", "lengths", "fault"),
    [
        ({}, [50] * 8, None),
        ({"sure_run": 2999}, [4000] * 8, None),
        ({"sure_run": 3000}, [4000] * 8, "repetition"),
        ({"unlikely": [0] * 7 + [1]}, [50] * 8, None),
        ({"unlikely": [0] * 7 + [2]}, [50] * 8, "gibberish"),
        ({"unlikely": [0] * 7 + [8]}, [8000] * 8, None),
        ({"zeros": 399}, [50] * 8, None),
        ({"zeros": 400}, [50] * 8, "logprobs"),
        ({"zeros": 8}, [1] * 8, None),  # too few tokens to tell
    ],
)
def test_a_group_is_judged_by_its_tokens(groups, signals, lengths, fault):
    found = find_group_fault(groups.score(signals=signals, lengths=lengths))
    assert (found is None) if fault is None else found.startswith(fault)


@pytest.mark.parametrize(("every", "severity"), [(16, "inform"), (8, "warn")])
def test_faulty_groups_are_told_with_their_reason(groups, monitor, every, severity):
    def quarantined(score):
        return groups.reward(score, verdict="quarantined", reason="gibberish: x") if score.seq % every == 0 else None

    (results,) = groups.windows(monitor, 1, reward=quarantined)
    assert results["faulty_groups"].severity == severity
    assert "gibberish" in results["faulty_groups"].reason


@pytest.mark.slow
def test_over_optimisation_without_a_falling_rater_only_informs(groups, monitor):
    """Raters that learn at different speeds part, too."""

    def uneven(i):
        score = groups.score()
        base = [value * 0.3 for value in score.ratings["exact"]]
        faster = [value + i / 2000 for value in base]
        return groups.score(ratings={"exact": base, "style": base, "judge": faster})

    severities = {results["over_optimisation"].severity for results in groups.windows(monitor, 16, uneven)}
    assert "inform" in severities
    assert severities <= {"idle", "ok", "inform"}


def test_nothing_to_judge_by_is_never_healthy():
    for check in _checks(HealthConfig()):
        assert check.evaluate(HealthWindow()).severity == "idle", check.name


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_missing_and_nan_are_never_healthy(groups, monitor, value):
    """Windows without one number (which no decoder lets through): what says ok does not judge numbers."""
    for _ in range(4 * 64):
        monitor.score(groups.score(scores=[value] * 8, ratings={"a": [value] * 8}, signals={"logprobs": [value] * 8}))
        if monitor.window_full:
            results = {result.check: result for result in monitor.evaluate()}
    healthy = {name for name, result in results.items() if result.severity == "ok"}
    assert healthy == {"truncated", "mode_collapse", "nonfinite" if value is None else "missing"}
    assert LADDER.index(results["missing" if value is None else "nonfinite"].severity) >= LADDER.index("quarantine")
    assert all(result.value is None or math.isfinite(result.value) for result in results.values())


def test_a_score_beyond_all_bounds_is_never_healthy(groups, monitor):
    """The wire lets 1e155 through, the square of which is no number."""
    groups.windows(monitor, 2)

    def one(i):
        return groups.score(scores=[1e155] + [0.5, 0.4] * 3 + [0.2]) if i == 9 else groups.score()

    def reward(score):
        return groups.reward(
            groups.score(), group=score.group, seq=score.seq, verdict="quarantined", reason="too large"
        )

    (results,) = groups.windows(monitor, 1, one, reward)
    assert results["nonfinite"].severity == "warn"
    assert "a score beyond 1e12" in results["nonfinite"].reason
    assert all(result.value is None or math.isfinite(result.value) for result in results.values())
    assert monitor.standing.quarantined_from is None


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 1e9])
def test_advantages_off_centre_are_seen_in_every_unit(groups, scale):
    monitor = EnvMonitor(HealthConfig(halts=CHECKS))

    def scaled(off):
        def make(score):
            centred = [scale * (value - 0.5) for value in (0.1, 0.9, 0.3, 0.7, 0.5, 0.5, 0.2, 0.8)]
            alike = {"rewards": [scale * value for value in (0.1, 0.9, 0.3, 0.7, 0.5, 0.5, 0.2, 0.8)]}
            return groups.reward(score, "centred", advantages=[value + off * scale for value in centred], **alike)

        return make

    for off, severity in ((0.0, "ok"), (1e-4, "halt")):
        for _ in range(64):
            score = groups.score()
            monitor.score(score)
            monitor.reward(scaled(off)(score), "centred")
        found = {result.check: result for result in monitor.evaluate()}
        assert found["advantages"].severity == severity


def test_answers_that_are_few_from_the_start_are_no_collapse(groups, monitor):
    """Yes or no: every answer is that of another task as well."""

    def yes_or_no(_):
        return groups.score(lengths=[2] * 8, signals={"texts": [groups.rng.randrange(2) for _ in range(8)]})

    assert {results["mode_collapse"].severity for results in groups.windows(monitor, 5, yes_or_no)} == {"ok"}


def test_one_group_of_long_answers_among_short_ones_is_no_collapse(groups, monitor):
    """Short answers are alike by being right; two long ones that are alike are too few to judge by."""

    def choices(i):
        lengths = [40, 40, *[6] * 6] if i % 64 == 5 else [6] * 8
        return groups.score(lengths=lengths, signals={"texts": [i + 1] * 8})

    assert {results["mode_collapse"].severity for results in groups.windows(monitor, 5, choices)} == {"ok"}


def test_a_group_without_signals_is_judged_by_the_rest(groups, monitor):
    (results,) = groups.windows(monitor, 1, lambda _: msgspec.structs.replace(groups.score(), signals=None))
    assert results["entropy"].severity == results["truncated"].severity == results["mode_collapse"].severity == "idle"
    assert results["saturation"].severity == "ok"
