"""Where the reference server computes and in what precision, and that a policy's weights arrive there."""

import httpx
import pytest
import torch

from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig, EngineConfig, InferenceConfig
from lachesis.pipeline.inference.engines.reference.app import build_app
from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.inference.engines.reference.placement import find_device, forms_of, place
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.model.logprobs import token_logprobs
from lachesis.pipeline.model.policy import build_tiny_policy
from lachesis.pipeline.model.tensors import policy_tensors, policy_version, rounded
from lachesis.pipeline.model.weight_files import write_weights
from lachesis.schemas.errors import ConfigError


@pytest.mark.parametrize(
    ("setting", "gpus", "right"),
    [
        ("auto", 0, "cpu"),
        ("auto", 1, "cuda:0"),
        ("auto", 3, "cuda:2"),
        ("cuda", 2, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
        ("cpu", 2, "cpu"),
    ],
)
def test_a_device_is_found(monkeypatch, setting, gpus, right):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert str(find_device(setting, "policy")) == right


@pytest.mark.parametrize(("setting", "gpus"), [("cuda", 0), ("cuda:1", 1)])
def test_a_device_that_is_not_there_is_named(monkeypatch, setting, gpus):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ConfigError, match=rf'inference\.eval\.device is "{setting}", but .* sees (1 GPUs|no GPU)'):
        find_device(setting, "eval")


@pytest.mark.slow
@pytest.mark.parametrize("travels", ["float32", "bfloat16"])
async def test_weights_arrive_at_a_server_that_computes_in_bfloat16(policy, tmp_path, travels):
    threads = torch.get_num_threads()
    forms, buffers = forms_of(policy.model), {name: value.clone() for name, value in policy.model.named_buffers()}
    place(policy, InferenceConfig(device="cpu", dtype="bfloat16", threads=threads), "policy")
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.bfloat16}
    for name, value in policy.model.named_buffers():
        assert torch.equal(value, buffers[name]), "frequencies are rounded"
    trained = build_tiny_policy(5, width=32, layers=2, max_length=96)
    tensors = {name: tensor * 2 for name, tensor in policy_tensors(trained.model).items()}
    trained.model.load_state_dict(tensors, strict=False)
    sent = rounded(tensors, travels)
    version = policy_version(1, "a", sent)
    path = write_weights(sent, tmp_path, version, travels)
    with Engine(policy.model, eos_token_id=2, weight_version="0-a-b", config=EngineConfig()) as engine:
        app = build_app(policy, engine, model_name="policy", weights_folder=tmp_path, token="t", forms=forms)
        config = ClientConfig(url="http://test")
        async with InferenceClient(config, token="t", transport=httpx.ASGITransport(app)) as client:
            await client.update_weights(str(path), str(version))
            assert await client.weight_version() == str(version)
            params = SamplingParams(max_tokens=40, ignore_eos=True)
            samples = await client.generate([1, 20, 30], 4, params)
            greedy = [
                (await client.generate([1, 20, 30], 1, SamplingParams(max_tokens=20, temperature=0)))[0]
                for _ in range(2)
            ]
    assert greedy[0].token_ids.tolist() == greedy[1].token_ids.tolist()
    for sample in samples:
        with torch.no_grad():
            right, _ = token_logprobs(trained.model, torch.tensor([[1, 20, 30, *sample.token_ids.tolist()]]), 1.0)
        assert abs(sample.logprobs - right[0, 3:].numpy()).mean() < 0.05
