"""Checkpoints: resume to the bit, survive a crash at every point, refuse what is damaged."""

import pytest
import torch
from checkpoints import save_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from lachesis.pipeline.errors import CheckpointError
from lachesis.pipeline.ledger.checkpoint_state import (
    best_checkpoint,
    known_checkpoints,
    latest_checkpoint,
)
from lachesis.pipeline.model.digest import DIGEST_LENGTH
from lachesis.pipeline.model.host_memory import HostCopies
from lachesis.pipeline.model.tensors import policy_tensors, weights_digest
from lachesis.pipeline.trainer import checkpoint as module
from lachesis.pipeline.trainer import checkpoint_folder
from lachesis.pipeline.trainer.checkpoint import CheckpointContent, load_checkpoint
from lachesis.pipeline.trainer.checkpoint_folder import point_to_best
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.gather import gather_optimizer
from lachesis.pipeline.trainer.learner import Learner
from lachesis.schemas.ids import PolicyVersion

CONFIG = LearnerConfig()


def save(folder, policy, learner, **changes):
    values = {"lineage": "a", "ledger_position": 41, "chain_hash": "ff", "unreported": [3, 4]}
    return save_checkpoint(folder, policy, learner, **{**values, **changes})


@pytest.fixture
def train(small_policy, batch):
    """Take one step for each seed, on batches that do not depend on the policy that is trained."""

    def run(learner, seeds):
        for seed in seeds:
            learner.step(batch(small_policy(99), seed))

    return run


@pytest.mark.slow
def test_five_steps_save_load_five_steps_equal_ten_to_the_bit(tmp_path, small_policy, train):
    straight = small_policy()
    learner = Learner(straight.model, CONFIG)
    train(learner, range(10))

    policy = small_policy()
    learner = Learner(policy.model, CONFIG)
    train(learner, range(5))
    state = save(tmp_path, policy, learner)
    random_state = torch.get_rng_state()
    torch.rand(7)

    resumed = load_checkpoint(latest_checkpoint(tmp_path), CONFIG)
    assert resumed.state == state
    assert torch.equal(torch.get_rng_state(), random_state)
    assert resumed.learner.steps == 5
    train(resumed.learner, range(5, 10))
    assert resumed.learner.steps == 10
    digests = [weights_digest(policy_tensors(p.model)) for p in (straight, resumed.policy)]
    assert digests[0] == digests[1]
    assert weights_digest(policy_tensors(policy.model)) != digests[0]


def test_what_is_gathered_for_a_checkpoint_stays_as_it_was(small_policy, train):
    """A checkpoint of a sharded learner is written while the next steps are taken; step counters are on each rank."""
    policy = small_policy()
    learner = Learner(policy.model, LearnerConfig())
    train(learner, range(2))
    learner.sharded = policy.model
    gather_optimizer(learner)
    content = CheckpointContent.of(policy, learner, HostCopies())
    held = {name: tensor.clone() for name, tensor in content.optimizer.items()}
    learner.sharded = None
    train(learner, range(2, 3))
    assert any(name.endswith("/step") for name in held)
    for name, tensor in held.items():
        assert torch.equal(content.optimizer[name], tensor), name


def test_folder_is_an_ordinary_model_folder_with_the_recorded_state(tmp_path, small_policy, train):
    policy = small_policy()
    learner = Learner(policy.model, CONFIG)
    train(learner, [0])
    state = save(tmp_path, policy, learner)
    path = latest_checkpoint(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert torch.equal(model.lm_head.weight, policy.model.lm_head.weight)
    assert AutoTokenizer.from_pretrained(path).chat_template == policy.tokenizer.chat_template
    assert not list(path.rglob("*.pt")) + list(path.rglob("*.bin"))
    digest = weights_digest(policy_tensors(policy.model))
    assert PolicyVersion.parse(state.policy_version) == PolicyVersion(1, "a", digest[:DIGEST_LENGTH])
    assert (state.ledger_position, state.chain_hash, state.unreported) == (41, "ff", [3, 4])


def test_checkpoint_before_the_first_step_resumes(tmp_path, small_policy):
    policy = small_policy()
    save(tmp_path, policy, Learner(policy.model, CONFIG))
    assert load_checkpoint(latest_checkpoint(tmp_path), CONFIG).learner.steps == 0


@pytest.mark.parametrize("fails_at", ["save_policy", "save_file", "fsync", "write_pointer", "_prune"])
def test_a_crash_at_any_point_leaves_a_loadable_latest_and_the_next_save_mends(
    tmp_path, monkeypatch, fails_at, small_policy, train
):
    class CrashError(BaseException):
        pass

    def crash(*_args, **_kwargs):
        raise CrashError

    policy = small_policy()
    learner = Learner(policy.model, CONFIG)
    save(tmp_path, policy, learner)
    train(learner, [0])
    with monkeypatch.context() as patch:
        patch.setattr(module if hasattr(module, fails_at) else checkpoint_folder, fails_at, crash)
        with pytest.raises(CrashError):
            save(tmp_path, policy, learner)
    found = load_checkpoint(latest_checkpoint(tmp_path), CONFIG)
    assert found.state.step == (1 if fails_at == "_prune" else 0)

    save(tmp_path, policy, learner, chain_hash="after")
    assert load_checkpoint(latest_checkpoint(tmp_path), CONFIG).state.chain_hash == "after"
    assert not list(tmp_path.glob(".partial-*"))


def test_half_written_folders_are_never_the_latest(tmp_path, small_policy):
    policy = small_policy()
    save(tmp_path, policy, Learner(policy.model, CONFIG))
    (tmp_path / ".partial-step-00000009").mkdir()
    (tmp_path / ".partial-step-00000009" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".latest.partial").write_text("step-000")
    assert latest_checkpoint(tmp_path).name == "step-00000000"


def test_the_newest_k_stay(tmp_path, small_policy):
    policy = small_policy()
    learner = Learner(policy.model, CONFIG)
    for step in range(5):
        learner.steps = step
        save(tmp_path, policy, learner, keep=2)
        assert latest_checkpoint(tmp_path).name == f"step-{step:08d}"
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]


def test_one_between_two_multiples_displaces_none_of_these(tmp_path, small_policy):
    policy = small_policy()
    learner = Learner(policy.model, CONFIG)
    left = []
    for step in range(1, 9):
        learner.steps = step
        save(tmp_path, policy, learner, keep=2, every=3)
        left.append([state.step for _, state in known_checkpoints(tmp_path)])
    assert left == [[1], [2, 1], [3, 2], [4, 3], [5, 3], [6, 3], [7, 6, 3], [8, 6, 3]]


def test_the_best_stays_beside_the_newest(tmp_path, small_policy):
    policy = small_policy()
    learner = Learner(policy.model, CONFIG)
    for step in range(1, 6):
        learner.steps = step
        save(tmp_path, policy, learner, keep=2)
        if step == 2:
            assert point_to_best(tmp_path, PolicyVersion(1, "other", "x")).name == "step-00000001"
    assert [state.step for _, state in known_checkpoints(tmp_path)] == [5, 4, 1]
    assert best_checkpoint(tmp_path).name == "step-00000001"
    point_to_best(tmp_path, PolicyVersion(5, "other", "x"))
    learner.steps = 6
    save(tmp_path, policy, learner, keep=2)
    assert [state.step for _, state in known_checkpoints(tmp_path)] == [6, 5], "the former best goes with the others"


@pytest.mark.parametrize(("best", "named"), [(10, 10), (14, 10), (15, 10), (16, 20), (3, 10), (99, 30)])
def test_the_checkpoint_nearest_to_the_best_policy_is_named(tmp_path, small_policy, best, named):
    policy = small_policy()
    learner = Learner(policy.model, CONFIG)
    for learner.steps in (10, 20, 30):
        save(tmp_path, policy, learner)
    assert point_to_best(tmp_path, PolicyVersion(best, "a", "b")).name == f"step-{named:08d}"
    assert (tmp_path / "best").read_text() == f"step-{named:08d}\n"


def test_of_two_checkpoints_of_a_step_the_one_with_the_evaluated_weights_is_named(tmp_path, small_policy):
    policy = small_policy()
    learner = Learner(policy.model, CONFIG, steps=10)
    first = save(tmp_path, policy, learner)
    next(policy.model.parameters()).data.add_(1.0)
    second = save(tmp_path, policy, learner)
    for state, name in ((first, "step-00000010"), (second, "step-00000010-1")):
        assert point_to_best(tmp_path, PolicyVersion.parse(state.policy_version)).name == name


def test_where_the_model_begun_with_is_the_best_none_is_named(tmp_path, small_policy):
    policy = small_policy()
    save(tmp_path, policy, Learner(policy.model, CONFIG, steps=10))
    assert point_to_best(tmp_path, PolicyVersion(10, "a", "b")) is not None
    assert point_to_best(tmp_path, PolicyVersion(0, "a", "b")) is None
    assert best_checkpoint(tmp_path) is None
    assert point_to_best(tmp_path / "nowhere", PolicyVersion(10, "a", "b")) is None


def test_a_pointer_to_what_is_gone_names_nothing_and_is_mended(tmp_path, small_policy):
    policy = small_policy()
    save(tmp_path, policy, Learner(policy.model, CONFIG, steps=10))
    for text in ("step-00000099\n", "", "../elsewhere\n"):
        (tmp_path / "best").write_text(text)
        assert best_checkpoint(tmp_path) is None
        save(tmp_path, policy, Learner(policy.model, CONFIG, steps=10))
    assert point_to_best(tmp_path, PolicyVersion(10, "a", "b")) is not None
    assert best_checkpoint(tmp_path) is not None


def test_one_killed_while_it_is_removed_does_not_pass_for_a_checkpoint(tmp_path, small_policy, monkeypatch):
    policy = small_policy()
    learner = Learner(policy.model, CONFIG)
    save(tmp_path, policy, learner, keep=1)

    def killed(path, **_):
        if path.exists():
            (path / "model.safetensors").unlink()
            raise KeyboardInterrupt

    learner.steps = 1
    with monkeypatch.context() as patched:
        patched.setattr("lachesis.pipeline.trainer.checkpoint_folder.shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, policy, learner, keep=1)
    assert [path.name for path, _ in known_checkpoints(tmp_path)] == ["step-00000001"]
    learner.steps = 2
    save(tmp_path, policy, learner, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000002"]


@pytest.mark.parametrize("saves", [1, 2, 3, 4])
def test_fewer_than_keep_are_all_kept(tmp_path, saves, small_policy):
    policy = small_policy()
    learner = Learner(policy.model, CONFIG)
    for step in range(saves):
        learner.steps = step
        save(tmp_path, policy, learner, keep=5)
    assert len(list(tmp_path.glob("step-*"))) == saves


def test_same_step_saved_again_replaces_the_pointer_not_the_folder(tmp_path, small_policy):
    policy = small_policy()
    learner = Learner(policy.model, CONFIG)
    save(tmp_path, policy, learner, chain_hash="one")
    first = latest_checkpoint(tmp_path)
    save(tmp_path, policy, learner, chain_hash="two")
    assert latest_checkpoint(tmp_path) != first
    assert load_checkpoint(first, CONFIG).state.chain_hash == "one"
    assert load_checkpoint(latest_checkpoint(tmp_path), CONFIG).state.chain_hash == "two"


def test_nothing_saved_is_none_and_a_dangling_pointer_an_error(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    for name in ("step-00000001", "../elsewhere", ""):
        (tmp_path / "latest").write_text(name)
        with pytest.raises(CheckpointError, match="latest"):
            latest_checkpoint(tmp_path)
