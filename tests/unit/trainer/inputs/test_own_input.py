"""A class of one's own gives the model what the configuration says it reads, and its errors cost a group alone."""

import numpy as np
import pytest
import torch

import lachesis
from lachesis.pipeline.common.trainability import TrainerLimits, TrainerReads, why_untrainable
from lachesis.pipeline.config.run import RunConfig, TrainingConfig
from lachesis.pipeline.trainer.config import LearnerConfig, ModelInputConfig
from lachesis.pipeline.trainer.inputs.model_inputs import load_inputs
from lachesis.pipeline.trainer.learner import Learner
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.rollout import Attachment

from .groups import group, packed, selected

OWN = '''
import torch, lachesis

class Positions(lachesis.ModelInput):
    """Position ids of the rollout instead of 0, 1, 2, ..."""

    def __init__(self, model, shift=0):
        self.shift = shift

    def prepare(self, parts):
        if "positions" not in parts.columns:
            raise KeyError("positions")
        return parts.columns["positions"] + self.shift

    def arguments(self, prepared, width, device):
        rows = torch.zeros(len(prepared), width, dtype=torch.int64)
        for row, values in enumerate(prepared):
            rows[row, : len(values)] = torch.from_numpy(values.copy())
        return {"position_ids": rows.to(device)}

class NoInput:
    pass
'''


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def rollout(positions=None):
    columns = None if positions is None else {"positions": (np.array(positions)[:, None], "int32")}
    return group([np.arange(20, 28, dtype=np.int32)], [np.full(8, -2.0)], columns)


def test_it_gives_the_model_what_it_made_of_its_columns(small_policy, own):
    policy = small_policy()
    config = ModelInputConfig(input=f"{own}:Positions", columns=["positions"], params={"shift": 3})
    learner = Learner(policy.model, LearnerConfig())
    learner.inputs = load_inputs([config], policy, policy.model)
    scattered = [0, 5, 2, 9, 1, 7, 3, 4]
    batch = packed([rollout(scattered)], learner.inputs, columns=["positions"])
    with torch.no_grad():
        found = learner._logprobs(batch)
        ids = torch.tensor([scattered]) + 3
        logits = policy.model(batch.tokens_BT, position_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    expected = logits.gather(-1, batch.tokens_BT[:, 1:, None]).squeeze(-1)
    assert torch.allclose(found[:, 1:][batch.mask_BT[:, 1:]], expected[batch.mask_BT[:, 1:]], atol=1e-5)
    assert isinstance(learner.step(batch).step_kl, float)
    dropped = selected([rollout()], learner.inputs, columns=["positions"]).dropped
    assert dropped[1] == "own.py:Positions: sequence 0: KeyError: 'positions'"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"input": "routed_expert"},
            "unknown input 'routed_expert'; built in are routed_experts, sampling_mask,",
        ),
        ({"input": "m:C"}, "say what it reads of rollouts"),
        ({"input": "images", "columns": ["x"]}, "is built in: leave columns, attachments and params out"),
    ],
)
def test_settings_that_say_too_little_or_too_much_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        ModelInputConfig(**settings)


def test_classes_that_are_none_are_refused_at_the_start(small_policy, own):
    policy = small_policy()
    for name, params, said in [
        ("NoInput", {}, "NoInput is no subclass of lachesis.ModelInput"),
        ("Gone", {}, "has no 'Gone'"),
        ("Positions", {"shfit": 1}, "did you mean 'shift'"),
    ]:
        config = ModelInputConfig(input=f"{own}:{name}", columns=["positions"], params=params)
        with pytest.raises(ConfigError, match=said):
            load_inputs([config], policy, policy.model)
    assert issubclass(lachesis.ModelInput, object)


def test_edges_let_in_what_the_configuration_names_and_refuse_the_rest():
    inputs = [ModelInputConfig(input="routed_experts"), ModelInputConfig(input="images")]
    reads = RunConfig(model="m", training=TrainingConfig(inputs=inputs)).trainer_reads
    assert reads == TrainerReads(frozenset({"routed_experts"}), attachments=True)
    held = group([np.arange(20, 28, dtype=np.int32)], [np.full(8, -2.0)],
                 {"routed_experts": (np.zeros((8, 4)), "int16"), "other": (np.zeros((8, 1)), "int16")},
                 attachments=[Attachment(mime="image/png", data=b"x")])  # fmt: skip
    reason = why_untrainable(held, TrainerLimits(reads=reads))
    assert reason.startswith("other: this run's trainer reads text tokens and routed_experts, attachments alone")
    assert RunConfig(model="m", mode="observe", training=TrainingConfig(inputs=inputs)).trainer_reads is None
    with pytest.raises(ConfigError, match="names 'images' twice"):
        RunConfig(model="m", training=TrainingConfig(inputs=[inputs[1], inputs[1]]))
