"""Steps taken again on a bus in memory: to the bit here, within a tolerance elsewhere, and with a report of it."""

import shutil
import threading

import msgspec
import pytest
import torch
from stages import run_trainer

from lachesis.pipeline.config.run import RunConfig, TrainingConfig
from lachesis.pipeline.errors import NotFoundError
from lachesis.pipeline.ledger.checkpoint_state import CHECKPOINTS, known_checkpoints
from lachesis.pipeline.model.policy import build_tiny_policy, load_model, save_policy
from lachesis.pipeline.model.tensors import policy_tensors
from lachesis.pipeline.offline.reproduction import weights as module
from lachesis.pipeline.offline.reproduction.batches import LedgerReplayFacts, verify_batches
from lachesis.pipeline.offline.reproduction.weights import RetrainStart, retrain
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.trainer import torch_backend as trainer
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.feed import BatchFeed
from lachesis.pipeline.trainer.learner import Learner
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.subjects import ROLLOUTS

pytestmark = pytest.mark.outside

STEPS = 6
OTHER = LearnerConfig(max_step_kl=None, learning_rate=3e-2, beta1=0.5, beta2=0.8, weight_decay=0.1, temperature=0.7)


@pytest.fixture(autouse=True)
def _as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(mode=False)


@pytest.fixture
async def fresh(lab, tmp_path):
    """The configuration of a run that is about to train, one of its batches being void."""
    policy = build_tiny_policy(0, width=16, layers=1, heads=2, max_length=32)
    save_policy(policy, tmp_path / "model")
    settings = TrainingConfig(steps=STEPS, checkpoint_every=2, learner=LearnerConfig(learning_rate=1e-2))
    config = RunConfig(run="r", folder=str(tmp_path), model=str(tmp_path / "model"), training=settings)
    batches = [
        [lab.group(100 * n + i, tokens=5 + n, tokenizer_hash=policy.tokenizer_hash if n != 3 else "else")
         for i in range(2)] for n in range(STEPS)
    ]  # fmt: skip
    await lab.extend_ledger(*batches)
    return config


@pytest.fixture
async def config(lab, fresh):
    """The configuration of a run that has trained."""
    await life(lab, fresh)
    return fresh


async def life(lab, config, **settings):
    """Let a trainer live until its steps are taken."""
    training = msgspec.structs.replace(config.training, **settings)
    await run_trainer(Service(lab.bus, "trainer", "r"), msgspec.structs.replace(config, training=training))


async def facts_of(lab, config) -> LedgerReplayFacts:
    return (await verify_batches(lab.bus, config, "main", None, saved={}, progress=lambda *_: None))[0]


async def again(lab, config, begin=None, **options):
    """Return verdict and text by check."""
    kept = {state.step: RetrainStart(str(path), state) for path, state in known_checkpoints(config.path / CHECKPOINTS)}
    start = RetrainStart(config.model, None) if begin is None else kept[begin]
    given = {"end": None, "tolerance": 0.05, "sampled": False, "progress": lambda *_: None} | options
    findings = await retrain(lab.bus, config, start, await facts_of(lab, config), **given)
    return {finding.check: (finding.verdict, finding.text) for finding in findings}


@pytest.mark.parametrize("begin", [None, 2, 4])
async def test_here_it_is_the_same_to_the_bit(lab, config, begin):
    verdict, text = (await again(lab, config, begin))["weights"]
    assert verdict == "ok", text
    steps = (STEPS - (begin or 0)) // 2
    assert f"after {steps} of {steps} steps with a record" in text


async def test_a_checkpoint_that_a_trainer_deletes_meanwhile_is_not_compared(lab, config, monkeypatch):
    def load(path):
        shutil.rmtree(path)  # just before it is read
        return load_model(path)

    monkeypatch.setattr(module, "load_model", load)
    verdict, text = (await again(lab, config))["weights"]
    assert verdict == "ok", text
    assert "after 3 of 3 steps with a record" in text, "the trainer reported them, too"


async def test_a_checkpoint_that_is_there_and_cannot_be_loaded_is_an_error(lab, config):
    for path, _ in known_checkpoints(config.path / CHECKPOINTS):
        (path / "config.json").unlink()
    with pytest.raises(ConfigError):
        await again(lab, config)


async def test_settings_are_those_that_the_run_recorded(lab, config):
    other = msgspec.structs.replace(config.training, learner=LearnerConfig(learning_rate=5e-1), threads=2)
    found = await again(lab, msgspec.structs.replace(config, training=other))
    assert found["weights"][0] == "ok", found
    assert "machine" not in found


@pytest.mark.parametrize("begin", [None, 2])
async def test_each_step_is_taken_as_it_was_when_the_trainer_came_back_with_other_settings(lab, fresh, begin):
    await life(lab, fresh, steps=2)
    await life(lab, fresh, learner=OTHER, shuffle_advantages=True, steps=4)
    await life(lab, fresh)
    found = await again(lab, fresh, begin)
    steps = 3 if begin is None else 2
    assert found["weights"][0] == "ok", found
    assert f"after {steps} of {steps} steps with a record" in found["weights"][1]
    assert "machine" not in found


@pytest.mark.slow
async def test_micro_batches_are_as_small_as_they_were_once_memory_ran_out(lab, fresh, monkeypatch):
    passes, taken = Learner._pass, []

    def limited(learner, part, *given):
        if len(taken) >= 4 and part.tokens_BT.numel() > 20:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        taken.append(part)
        return passes(learner, part, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "_pass", limited)
        await life(lab, fresh, learner=LearnerConfig(learning_rate=1e-2, max_tokens_per_microbatch=40))
    facts = await facts_of(lab, fresh)
    ((first, tokens),) = facts.reports[-1].numerics.microbatches
    assert 1 < first < STEPS
    assert tokens <= 20
    assert (await again(lab, fresh))["weights"][0] == "ok"


async def test_a_report_made_up_for_says_how_the_life_before_took_the_steps(lab, fresh, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(BatchFeed, "report_trained", _killed(lab))
        with pytest.raises(lab.Killed):
            await life(lab, fresh, steps=2)
    await life(lab, fresh, learner=OTHER)
    assert [report.step for report in (await facts_of(lab, fresh)).reports] == [2, 4, 6]
    assert (await again(lab, fresh))["weights"][0] == "ok"


def _killed(lab):
    async def report_trained(*_, **__):
        raise lab.Killed

    return report_trained


@pytest.mark.slow
async def test_each_step_is_taken_with_as_many_threads_as_it_was(lab, fresh, monkeypatch):
    numerics_of, step, used = trainer.numerics_of, Learner.step, []
    for steps, threads in [(2, 2), (STEPS, 1)]:
        monkeypatch.setattr(
            trainer,
            "numerics_of",
            lambda config, device, n=threads: msgspec.structs.replace(numerics_of(config, device), threads=n),
        )
        await life(lab, fresh, steps=steps)

    def noted(learner, batch):
        used.append(torch.get_num_threads())  # of the thread that computes
        return step(learner, batch)

    monkeypatch.setattr(Learner, "step", noted)
    assert "machine" not in await again(lab, fresh)
    assert used == [2, 2, 1, 1, 1]


@pytest.mark.slow
async def test_another_machine_anywhere_on_the_way_is_told(lab, fresh, monkeypatch):
    numerics_of = trainer.numerics_of
    for steps, processor, torch_version in [(2, "one", "9.9"), (4, "two", "9.9"), (STEPS, None, None)]:
        changes = {"processor": processor, "torch": torch_version} if processor else {}
        monkeypatch.setattr(
            trainer,
            "numerics_of",
            lambda config, device, of=changes: msgspec.structs.replace(numerics_of(config, device), **of),
        )
        await life(lab, fresh, steps=steps)
    found = await again(lab, fresh)
    verdict, text = found["machine"]
    assert verdict == "warn"
    assert "processor was one, is " in text
    assert "processor was two, is " in text
    assert text.count("torch was 9.9") == 1
    assert found["weights"][0] == "ok"
    assert "machine" not in await again(lab, fresh, 4), "steps 5 and 6 were taken here"


@pytest.mark.slow
async def test_weights_that_no_checkpoint_holds_are_not_what_the_run_went_on_with(lab, fresh):
    await life(lab, fresh, steps=2)
    [report] = (await facts_of(lab, fresh)).reports
    lost = f"3-{report.lineage}-badbadbad"  # sampled from when the trainer died
    policy_hash = load_model(fresh.model).tokenizer_hash
    await lab.extend_ledger([lab.group(900, tokens=9, tokenizer_hash=policy_hash, policy_versions=[lost])])
    await life(lab, fresh, learner=OTHER, steps=STEPS + 1)
    assert (await again(lab, fresh, sampled=True))["weights"][0] == "ok"


async def test_the_event_loop_is_left_free_while_weights_are_digested(lab, config, monkeypatch):
    loop, digested = threading.get_ident(), []
    weights_digest = module.weights_digest

    def digest(*arguments):
        digested.append(threading.get_ident())
        return weights_digest(*arguments)

    monkeypatch.setattr(module, "weights_digest", digest)
    await again(lab, config)
    assert digested
    assert loop not in digested


@pytest.mark.slow
@pytest.mark.parametrize("begin", [None, 2])
async def test_weights_on_a_gpu_are_compared_with_checkpoints_in_main_memory(lab, config, monkeypatch, begin):
    from stand_in_gpu import stand_in

    def on_stand_in(model):
        return stand_in(policy_tensors(model)) if model.training_here else policy_tensors(model)

    monkeypatch.setattr(torch.nn.Module, "training_here", False, raising=False)
    monkeypatch.setattr(module, "policy_tensors", on_stand_in)
    for name in ("Learner", "load_checkpoint"):
        monkeypatch.setattr(module, name, _marking(getattr(module, name)))
    verdict, text = (await again(lab, config, begin))["weights"]
    assert verdict == "ok", text
    monkeypatch.setattr(module, "numerics_differences", lambda *_: ["its processor was another"])
    _disturb(monkeypatch, from_step=4)
    verdict, text = (await again(lab, config, begin))["weights"]
    assert verdict == "fail"
    assert "of the way that they moved away" in text


def _marking(made):
    """Let what makes a learner mark the model that it trains."""

    def marked(*arguments, **settings):
        found = made(*arguments, **settings)
        (found if isinstance(found, Learner) else found.learner).model.training_here = True
        return found

    return marked


async def test_other_weights_are_told_by_step(lab, config, monkeypatch):
    _disturb(monkeypatch, from_step=2)
    verdict, text = (await again(lab, config))["weights"]
    assert verdict == "fail"
    assert "after 1 of 3 steps with a record: step 4:" in text


@pytest.mark.parametrize(("by", "verdict"), [(1e-6, "ok"), (1.0, "fail")])
async def test_on_another_machine_they_are_close_or_not(lab, config, monkeypatch, by, verdict):
    numerics_of = module.numerics_of
    monkeypatch.setattr(
        module,
        "numerics_of",
        lambda config, device: msgspec.structs.replace(numerics_of(config, device), processor="another"),
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
