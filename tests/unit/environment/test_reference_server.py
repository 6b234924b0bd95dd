"""Against the project's own inference server and client: the recorded logprobs are those of the recorded sequence."""

from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from lachesis import Environment, Reply, Session, Task
from lachesis.pipeline.environment.config import CollectConfig
from lachesis.pipeline.environment.rollout import build_group, collect_group
from lachesis.pipeline.evaluator.evaluate import evaluate
from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig, EngineConfig
from lachesis.pipeline.inference.engines.reference.app import build_app
from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.model.logprobs import token_logprobs
from lachesis.pipeline.model.policy import PolicyModel, build_tiny_policy
from lachesis.schemas.rollout import RolloutGroup

pytestmark = pytest.mark.outside

VERSION = "3-main-0123456789ab"


class Chatter(Environment):
    """Three turns, whatever the model says."""

    max_turns = 3

    def __len__(self) -> int:
        return 4

    def task(self, index: int) -> Task:
        return Task(item=str(index), prompt=f"say {index}")

    def respond(self, task: Task, session: Session, reply: Reply) -> Sequence[str]:
        return [f"and {session.turns_left}?"]

    def reward(self, task: Task, session: Session) -> float:
        return float(len(session.replies))


@pytest.fixture
def policy() -> PolicyModel:
    policy = build_tiny_policy(0, width=32, layers=2, max_length=96)
    with torch.no_grad():  # sharper than at initialisation, and eager to stop, so that conversations go on
        for parameter in policy.model.parameters():
            parameter.mul_(2)
    return policy


async def collected(policy: PolicyModel, folder: Path, n: int) -> RolloutGroup:
    eos = policy.tokenizer.eos_token_id
    with Engine(policy.model, eos_token_id=eos, weight_version=VERSION, config=EngineConfig()) as engine:
        app = build_app(policy, engine, model_name="tiny", weights_folder=folder)
        config = ClientConfig(url="http://test")
        async with InferenceClient(config, transport=httpx.ASGITransport(app)) as client:
            stops = list(range(eos, len(policy.tokenizer), 3))  # a random model would seldom stop by itself
            sampling = SamplingParams(max_tokens=16, seed=11, stop_token_ids=stops)
            draft = await collect_group(
                Chatter(), Chatter().task(1), client, n, sampling, config=CollectConfig(max_context=96)
            )
            result = await evaluate(Chatter(), client, k=2, threshold=2, max_tokens=4, policy_version=VERSION)
            assert result.versions == {VERSION: 12}
    return build_group(draft, run="r", env="e", producer="p", epoch=0, counter=0, tokenizer_hash=policy.tokenizer_hash)


@pytest.mark.slow
async def test_logprobs_are_those_of_the_whole_sequence(policy: PolicyModel, tmp_path: Path) -> None:
    group = await collected(policy, tmp_path, 6)
    turns = []
    for sequence in group.sequences:
        tokens = torch.tensor(sequence.tokens.astype(np.int64))[None]
        with torch.no_grad():
            values, _ = token_logprobs(policy.model, tokens, 1.0)
        expected = values[0].numpy()
        np.testing.assert_allclose(
            sequence.logprobs[sequence.loss_mask], expected[sequence.loss_mask], atol=1e-4, rtol=0
        )
        turns.append(int((np.diff(sequence.loss_mask.astype(int)) == 1).sum()))
    assert max(turns) == 3, "some conversation went through all turns"
    assert group.policy_versions == [VERSION]


@pytest.mark.slow
async def test_a_seed_repeats_a_whole_conversation(policy: PolicyModel, tmp_path: Path) -> None:
    first = await collected(policy, tmp_path, 3)
    second = await collected(policy, tmp_path, 3)
    # not the logprobs' last bits: they depend on which requests the server happened to batch
    assert first.sequences.tokens == second.sequences.tokens
    assert first.sequences.loss_mask == second.sequences.loss_mask
    assert first.messages == second.messages
    assert len({sequence.tokens.tobytes() for sequence in first.sequences}) > 1
