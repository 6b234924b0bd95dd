"""The reference server's engine on a GPU: the CPU's logprobs, the same tokens twice, and weights without a file."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from contract.model_families import family_model

from lachesis.pipeline.inference.config import EngineConfig, InferenceConfig
from lachesis.pipeline.inference.engines.reference.decoding import PaddedBatch
from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.inference.engines.reference.placement import forms_of, place
from lachesis.pipeline.inference.engines.reference.shared_copy import SharedCopy
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.model.logprobs import token_logprobs
from lachesis.pipeline.model.policy import PolicyModel
from lachesis.pipeline.model.shared_memory import segment_pointer
from lachesis.pipeline.model.tensors import policy_tensors
from lachesis.schemas.ids import PolicyVersion

pytestmark = pytest.mark.gpu
WAIT = 120
PROMPTS = [[3, 5, 6], [3, *range(7, 20)], [3, 20], [3, *range(30, 60)]]


def on_gpu(model, dtype):
    policy = PolicyModel(copy.deepcopy(model), None, "")
    place(policy, InferenceConfig(device="cuda", dtype=dtype, threads=torch.get_num_threads()), "policy")
    return policy.model


def start(model):
    return Engine(model, eos_token_id=2, weight_version="first", config=EngineConfig(max_model_len=90))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "qwen3_5", "mamba", "bloom"])
@pytest.mark.parametrize(("dtype", "apart"), [("float32", 1e-3), ("bfloat16", 0.5)])
def test_samples_have_the_logprobs_of_the_cpu_and_greedy_ones_repeat(name, dtype, apart):
    model = family_model(name)
    params = SamplingParams(n=2, max_tokens=20, ignore_eos=True, seed=1, prompt_logprobs=0)
    greedy = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
    with start(on_gpu(model, dtype)) as engine:
        results = [(prompt, engine.submit(prompt, params)) for prompt in PROMPTS]
        results = [(prompt, future.result(WAIT)) for prompt, future in results]
        twice = []
        for _ in range(2):
            engine.pause("keep").result(WAIT)
            futures = [engine.submit(prompt, greedy) for prompt in PROMPTS]
            engine.resume().result(WAIT)
            twice.append([future.result(WAIT).samples[0] for future in futures])
    assert [sample.token_ids for sample in twice[0]] == [sample.token_ids for sample in twice[1]]
    assert [sample.logprobs for sample in twice[0]] == [sample.logprobs for sample in twice[1]]
    for prompt, result in results:
        for sample in result.samples:
            with torch.no_grad():
                right, _ = token_logprobs(model, torch.tensor([[*prompt, *sample.token_ids]]), 1.0)
            difference = (torch.tensor(sample.logprobs) - right[0, len(prompt) :]).abs()
            assert difference.mean() < apart


TRAINER = """
import sys
from pathlib import Path
from contract.model_families import family_model
from lachesis.pipeline.model.shared_memory import WeightSegment
from lachesis.pipeline.model.tensors import policy_tensors, policy_version

trained = family_model("qwen3", seed=1).cuda()
segment = WeightSegment.share(trained)
segment.announce(Path(sys.argv[1]))
version = policy_version(1, "a", policy_tensors(trained))
segment.publish(version)
print(version, flush=True)
sys.stdin.read()
segment.close(Path(sys.argv[1]))
"""
"""A process of its own: CUDA maps no memory in the process that has allocated it."""


def test_weights_come_from_a_trainers_segment_on_the_same_gpu(tmp_path):
    trained, served = family_model("qwen3", seed=1), on_gpu(family_model("qwen3"), "bfloat16")
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", TRAINER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as trainer:
        version = PolicyVersion.parse(trainer.stdout.readline().strip())
        tensors = SharedCopy(trained.config, forms_of(trained)).read(segment_pointer(tmp_path), version)
        assert {tensor.device.type for tensor in tensors.values()} == {"cuda"}
        with start(served) as engine:
            assert isinstance(engine._batch, PaddedBatch)
            engine.load_weights(tensors, str(version)).result(WAIT)
        del tensors
        trainer.stdin.close()
        assert trainer.wait(WAIT) == 0
    for name, tensor in policy_tensors(served).items():
        assert torch.equal(tensor.cpu(), policy_tensors(trained)[name].to(tensor.dtype)), name
