"""How far rollout and training are apart, environment by environment: summed by row, merged over ranks, bounded."""

import dataclasses
import math

import msgspec
import numpy as np
import pytest
import torch

from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.mismatch_by_env import (
    MAX_MISMATCH_BYTES,
    bounded_mismatches,
    env_figures,
    mismatch_by_env,
    summed_by,
)
from lachesis.schemas.ledger import EnvMismatch, Mismatch


def wrong_in(batch, rows, by):
    logprobs_BT = batch.logprobs_BT.clone()
    logprobs_BT[rows] = torch.where(batch.mask_BT[rows], logprobs_BT[rows] + by, 0.0)
    ids = tuple("wrong" if row in rows else "right" for row in range(batch.sequences))
    return dataclasses.replace(batch, logprobs_BT=logprobs_BT, group_ids=ids)


@pytest.mark.parametrize("tokens", [16384, 20], ids=["one micro-batch", "several"])
@pytest.mark.parametrize("anchor", ["rollout", "proximal"])
def test_wrong_logprobs_of_some_rows_are_seen_there_alone_and_the_parts_make_the_whole(
    small_policy, batch, tokens, anchor
):
    policy = small_policy()
    settings = {"warmup_steps": 0, "max_tokens_per_microbatch": tokens, "loss": {"anchor": anchor}}
    learner = Learner(policy.model, msgspec.convert(settings, LearnerConfig))
    given = wrong_in(batch(policy, 0), [1, 4], -2.0)
    step = learner.step(given)
    found = mismatch_by_env([step.mismatches])
    assert set(found) == {"right", "wrong"}
    assert found["right"].k3 < 1e-6
    assert found["right"].ratio == pytest.approx(1, abs=1e-4)
    assert found["wrong"].k1 == pytest.approx(-2, abs=1e-4)
    assert found["wrong"].k3 == pytest.approx(math.exp(2) - 3, rel=1e-3)
    assert found["wrong"].ratio == pytest.approx(math.exp(2), rel=1e-3)
    assert found["wrong"].ess == pytest.approx(1, abs=1e-4)
    whole = mismatch_by_env([summed_by(["all"] * 2, step.mismatches.values())])["all"]
    assert whole.k1 == pytest.approx(step.kl_k1)
    assert whole.k3 == pytest.approx(step.kl)
    assert whole.ess == pytest.approx(step.effective_sample_size)
    assert sum(sums[0] for sums in step.mismatches.values()) == step.trainable_tokens


def test_ranks_add_up_and_what_is_not_a_number_is_missing():
    shares = [{"a": [2.0, 1.0, 0.5, 2.0, 2.0]}, {"a": [2.0, 3.0, 0.5, 2.0, 2.0], "b": [1.0, None, None, 1.0, 1.0]}, {}]
    found = mismatch_by_env([*shares, {"idle": [0.0] * 5}])
    assert found == {"a": EnvMismatch(1.0, 0.25, 1.0, 1.0), "b": EnvMismatch(None, None, 1.0, 1.0)}
    assert env_figures(found) == {"logprobs/a/diff": 1.0, "logprobs/a/kl": 0.25}


def steps_of(envs, steps, seed=0):
    draw = np.random.default_rng(seed)
    return [
        Mismatch(
            0.0, 0.0, 1.0, 1.0, envs={f"env-{n:04}": EnvMismatch(0.0, float(draw.random()), 1.0, 1.0) for n in envs}
        )
        for _ in range(steps)
    ]


def test_a_report_that_has_room_keeps_all():
    steps = [*steps_of(range(5), 20), Mismatch(0.0, 0.0, 1.0, 1.0)]
    assert bounded_mismatches(steps) == steps


@pytest.mark.parametrize(("envs", "steps"), [(50, 1000), (20_000, 2), (1, 20_000)])
def test_the_environments_figures_are_bounded_in_bytes_and_the_worst_of_each_stays(envs, steps):
    given = steps_of(range(envs), steps)
    given[-1].envs["env-0000"] = EnvMismatch(None, None, None, None)
    kept = bounded_mismatches(given)
    size = len(msgspec.msgpack.encode(kept)) - len(msgspec.msgpack.encode([Mismatch(0.0, 0.0, 1.0, 1.0)] * steps))
    assert size <= MAX_MISMATCH_BYTES + 8 * steps
    assert size > MAX_MISMATCH_BYTES / 2
    assert kept[-1].envs["env-0000"].k3 is None, "no number is the worst"
    if envs == 50:
        for n in range(1, envs):
            env = f"env-{n:04}"
            worst = max(step.envs[env].k3 for step in given)
            assert worst in {step.envs[env].k3 for step in kept if env in step.envs}
    assert all(set(one.envs) <= set(whole.envs) for one, whole in zip(kept, given, strict=True))


def test_older_readers_and_writers_understand_each_other():
    new = msgspec.msgpack.encode(Mismatch(0.1, 0.2, 1.0, 0.9, envs={"a": EnvMismatch(0.1, 0.2, 1.0, 0.9)}))
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.msgpack.decode(new)[:6]), type=Mismatch)
    assert old.envs is None
    assert old.of_env("a") == EnvMismatch(0.1, 0.2, 1.0, 0.9), "the run's as a whole, where no part is known"
    assert msgspec.msgpack.decode(new, type=Mismatch).of_env("b") is None
