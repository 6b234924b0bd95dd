"""Steps taken again on a bus in memory: to the bit here, within a tolerance elsewhere, and told where they differ."""

import msgspec
import pytest
import torch

from lachesis.pipeline.config.run import RunConfig, TrainingConfig
from lachesis.pipeline.reproduction import weights as module
from lachesis.pipeline.reproduction.batches import Facts, verify_batches
from lachesis.pipeline.reproduction.weights import Begin, retrain
from lachesis.pipeline.stage.service import Service
from lachesis.pipeline.training.config import LearnerConfig
from lachesis.pipeline.training.learner import Learner
from lachesis.pipeline.training.model import build_tiny_policy, save_policy
from lachesis.pipeline.training.stage import run_trainer
from lachesis.pipeline.training.state import CHECKPOINTS, known_checkpoints
from lachesis.schemas.errors import ConfigError, NotFoundError
from lachesis.schemas.subjects import ROLLOUTS

STEPS = 6


@pytest.fixture(autouse=True)
def _as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(mode=False)


@pytest.fixture
async def config(lab, tmp_path):
    """The configuration of a run that has trained, one of its batches being void."""
    policy = build_tiny_policy(0, width=16, layers=1, heads=2, max_length=32)
    save_policy(policy, tmp_path / "model")
    settings = TrainingConfig(steps=STEPS, checkpoint_every=2, learner=LearnerConfig(learning_rate=1e-2))
    config = RunConfig(run="r", folder=str(tmp_path), model=str(tmp_path / "model"), training=settings)
    batches = [
        [lab.group(100 * n + i, tokens=5 + n, tokenizer_hash=policy.tokenizer_hash if n != 3 else "else")
         for i in range(2)] for n in range(STEPS)
    ]  # fmt: skip
    await lab.extend_ledger(*batches)
    await run_trainer(Service(lab.bus, "trainer", "r"), config)
    return config


async def facts_of(lab, config) -> Facts:
    return (await verify_batches(lab.bus, config, "main", None, saved={}, progress=lambda *_: None))[0]


async def again(lab, config, begin=None, **options):
    """Return verdict and text by check."""
    kept = {state.step: Begin(str(path), state) for path, state in known_checkpoints(config.path / CHECKPOINTS)}
    start = Begin(config.model, None) if begin is None else kept[begin]
    given = {"end": None, "tolerance": 0.05, "sampled": False, "progress": lambda *_: None} | options
    findings = await retrain(lab.bus, config, start, await facts_of(lab, config), **given)
    return {finding.check: (finding.verdict, finding.text) for finding in findings}


@pytest.mark.parametrize("begin", [None, 2, 4])
async def test_here_it_is_the_same_to_the_bit(lab, config, begin):
    verdict, text = (await again(lab, config, begin))["weights"]
    assert verdict == "ok", text
    steps = (STEPS - (begin or 0)) // 2
    assert f"after {steps} of {steps} steps with a record" in text


async def test_settings_are_those_that_the_run_recorded(lab, config):
    other = msgspec.structs.replace(config.training, learner=LearnerConfig(learning_rate=5e-1), threads=2)
    found = await again(lab, msgspec.structs.replace(config, training=other))
    assert found["weights"][0] == "ok", found
    assert "machine" not in found


async def test_other_weights_are_told_by_step(lab, config, monkeypatch):
    _disturb(monkeypatch, from_step=2)
    verdict, text = (await again(lab, config))["weights"]
    assert verdict == "fail"
    assert "after 1 of 3 steps with a record: step 4:" in text


@pytest.mark.parametrize(("by", "verdict"), [(1e-6, "ok"), (1.0, "fail")])
async def test_on_another_machine_they_are_close_or_not(lab, config, monkeypatch, by, verdict):
    numerics_of = module.numerics_of
    monkeypatch.setattr(
        module, "numerics_of", lambda config: msgspec.structs.replace(numerics_of(config), processor="another")
    )
    _disturb(monkeypatch, by=by)
    found = await again(lab, config)
    assert found["machine"][0] == "warn"
    assert ", is another" in found["machine"][1]
    assert found["weights"][0] == verdict, found
    assert "0.05 is allowed" in found["weights"][1]


def _disturb(monkeypatch, *, from_step=0, by=1e-3):
    """Make every step add `by` times noise to the weights."""
    step = Learner.step

    def disturbed(learner, batch):
        metrics = step(learner, batch)
        if learner.steps > from_step:
            with torch.no_grad():
                for parameter in learner.model.parameters():
                    parameter.add_(by * torch.randn_like(parameter))
        return metrics

    monkeypatch.setattr(Learner, "step", disturbed)


async def test_nothing_to_do_and_history_that_is_gone_are_errors(lab, config):
    with pytest.raises(ConfigError, match="nothing to train again between step 4 and step 4"):
        await again(lab, config, 4, end=4)
    with pytest.raises(NotFoundError, match="before step 99"):
        await again(lab, config, end=99)
    await lab.bus.trim(ROLLOUTS, ["rl.rollout.r.sums"], before=6)
    with pytest.raises(NotFoundError, match=r"step 1 of trainer main cannot be taken again: .* Begin behind it"):
        await again(lab, config)
    assert (await again(lab, config, 4))["weights"][0] == "ok"


async def test_a_checkpoint_of_another_ledger_is_told(lab, config):
    facts, findings = await verify_batches(
        lab.bus, config, "main", None, saved={"step-2": known_checkpoints(config.path / CHECKPOINTS)[0][1].position},
        progress=lambda *_: None,
    )  # fmt: skip
    assert facts.batches == STEPS
    assert facts.voids == {3}
    by_check = {finding.check: finding for finding in findings}
    assert by_check["chain"].verdict == by_check["reports"].verdict == "ok"
    assert by_check["batches"].verdict == "fail", "nobody ever rewarded these"
    assert "it has no reward in the streams" in by_check["batches"].text
    elsewhere = known_checkpoints(config.path / CHECKPOINTS)[0][1].position
    moved = type(elsewhere)(elsewhere.entries - 1, elsewhere.digest)
    _, findings = await verify_batches(lab.bus, config, "main", None, saved={"step-2": moved}, progress=lambda *_: None)
    [told] = [finding for finding in findings if finding.check == "reports"]
    assert told.verdict == "fail"
    assert "checkpoint step-2 names entry" in told.text
