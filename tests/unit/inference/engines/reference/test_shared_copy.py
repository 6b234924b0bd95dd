"""The reference server takes a trainer's weights out of shared memory: every version whole, and no other."""

import httpx
import pytest
import torch

from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig, EngineConfig
from lachesis.pipeline.inference.engines.reference.app import build_app
from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.model.logprobs import token_logprobs
from lachesis.pipeline.model.policy import build_tiny_policy
from lachesis.pipeline.model.shared_memory import WeightSegment, segment_pointer
from lachesis.pipeline.model.tensors import policy_tensors, policy_version
from lachesis.schemas.errors import DataError


@pytest.fixture
async def client(policy, tmp_path):
    with Engine(policy.model, eos_token_id=2, weight_version="0-a-b", config=EngineConfig()) as engine:
        app = build_app(policy, engine, model_name="policy", weights_folder=tmp_path, token="t")
        config = ClientConfig(url="http://test")
        async with InferenceClient(config, token="t", transport=httpx.ASGITransport(app)) as running:
            yield running


@pytest.fixture
def trainer(tmp_path):
    """A trainer's model in a segment."""
    model = build_tiny_policy(5, width=32, layers=2, max_length=96).model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    segment = WeightSegment.share(model)
    segment.announce(tmp_path)
    yield model, segment
    segment.close(tmp_path)


def publish(model, segment, step):
    version = policy_version(step, "a", policy_tensors(model))
    segment.publish(version)
    return str(version)


async def check(client, model, version):
    """The server samples by the trainer's weights, under their version."""
    (sample,) = await client.generate([1, 20, 30], 1, SamplingParams(max_tokens=20, ignore_eos=True))
    assert [span.version for span in sample.weight_versions] == [version]
    with torch.no_grad():
        right, _ = token_logprobs(model, torch.tensor([[1, 20, 30, *sample.token_ids.tolist()]]), 1.0)
    assert sample.logprobs == pytest.approx(right[0, 3:].numpy(), rel=1e-5, abs=1e-5)


async def test_each_version_is_taken_and_kept_while_the_trainer_changes_its_own(client, trainer, tmp_path):
    model, segment = trainer
    pointer = str(segment_pointer(tmp_path))
    for step in range(3):
        version = publish(model, segment, step)
        await client.update_weights(pointer, version)
        await check(client, model, version)
        before = build_tiny_policy(5, width=32, layers=2, max_length=96).model
        before.load_state_dict(model.state_dict())
        with segment.changing(), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.2)
        await check(client, before, version)


async def test_what_is_not_that_version_is_refused_and_the_old_weights_go_on(client, trainer, tmp_path):
    model, segment = trainer
    pointer = str(segment_pointer(tmp_path))
    version = publish(model, segment, 0)
    await client.update_weights(pointer, version)
    with pytest.raises(DataError, match="shared memory holds policy version"):
        await client.update_weights(pointer, "7-a-000000000000")
    with segment.changing():
        pass
    with pytest.raises(DataError, match="holds policy version"):  # in between two versions
        await client.update_weights(pointer, version)
    assert await client.weight_version() == version


async def test_a_segment_of_another_model_is_refused(client, tmp_path):
    model = build_tiny_policy(5, width=48, layers=2, max_length=96).model
    segment = WeightSegment.share(model)
    segment.announce(tmp_path)
    version = publish(model, segment, 0)
    with pytest.raises(DataError, match="does not fit the model"):
        await client.update_weights(str(segment_pointer(tmp_path)), version)
    segment.close(tmp_path)


async def test_content_that_is_not_what_its_name_says_is_refused(client, trainer, tmp_path):
    model, segment = trainer
    version = publish(model, segment, 0)
    with torch.no_grad():
        next(model.parameters()).add_(1)  # behind everybody's back
    with pytest.raises(DataError, match="does not have the digest"):
        await client.update_weights(str(segment_pointer(tmp_path)), version)
