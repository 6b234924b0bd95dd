"""A loop of your own with the parts of the pipeline: no broker, no run, plain lists and dictionaries."""

from lachesis import (
    CurriculumScheduler,
    HealthChecks,
    PerformanceTracker,
    RewardEnsemble,
    RewardNormalizer,
    krippendorff_alpha,
)


def train(steps: int, answer, raters, tasks):
    """`answer(task)` returns four answers; `raters` maps names to functions of (task, answer), each in [0, 1]."""
    curriculum = CurriculumScheduler(tasks, strategy="irt", seed=1)
    ensemble = RewardEnsemble(dict.fromkeys(raters, (0.0, 1.0)), aggregation="median")
    normalizer, health, calls = RewardNormalizer(), HealthChecks(window=16), PerformanceTracker()
    alerts = []
    for step in range(steps):
        (task,) = curriculum.sample()
        with calls.track(items=4):
            answers = answer(task)
        ratings = {name: [rate(task, one) for one in answers] for name, rate in raters.items()}
        scores = ensemble.score(ratings).scores
        alerts += health.add_group(scores, ratings=ratings, lengths=[len(one) for one in answers], item=task)
        curriculum.update(task, [None if one is None else one > 0.5 for one in scores], step=step)
        normalizer.normalize([one for one in scores if one is not None])  # the rewards to train on
    return {"alpha": ensemble.agreement.value, "alerts": alerts, **calls.metrics(), **curriculum.metrics()}


same = krippendorff_alpha({"one": [0, 1, 1, 0], "two": [0, 1, 1, None]})
