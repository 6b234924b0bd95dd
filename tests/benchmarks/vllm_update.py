"""Seconds of a weight update of real vLLM on the CPU, and the part of it that the digest of what it holds takes.

The model is random. `--dtype` is what vLLM computes in; weights travel in float32.

    python tests/benchmarks/vllm_update.py [--width 1024] [--layers 8] [--updates 5] [--dtype bfloat16]
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import anyio

sys.path.insert(0, str(Path(__file__).parents[1]))

from contract import inference_servers
from contract.inference_servers import ARGUMENTS, TOKEN, vllm

from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy
from lachesis.pipeline.model.tensors import policy_tensors, policy_version
from lachesis.pipeline.model.weight_files import write_weights


async def measure(url, path, version, updates):
    """Return the seconds of each update, and of each digest alone."""
    whole, digests = [], []
    async with InferenceClient(ClientConfig(url=url, timeout=600), token=TOKEN) as client:
        for _ in range(updates + 1):
            began = time.perf_counter()
            await client.update_weights(str(path), version)
            updated = time.perf_counter()
            await client.loaded_weights()
            whole.append(updated - began)
            digests.append(time.perf_counter() - updated)
    return whole[1:], digests[1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="what vLLM computes in")
    arguments = parser.parse_args()
    inference_servers.ARGUMENTS[:] = [arguments.dtype if one == "float32" else one for one in ARGUMENTS]
    policy = build_tiny_policy(0, width=arguments.width, layers=arguments.layers, heads=arguments.width // 64)
    tensors = policy_tensors(policy.model)
    version = policy_version(1, "a", tensors)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_policy(policy, folder / "model")
        path = write_weights(tensors, folder / "weights", version)
        with vllm(policy, folder / "model", folder) as url:
            whole, digests = anyio.run(measure, url, path, str(version), arguments.updates)
    update, digest = statistics.median(whole), statistics.median(digests)
    size = sum(tensor.nbytes for tensor in tensors.values())
    print(
        f"{size / 1e6:.0f} MB of weights, vLLM in {arguments.dtype}: an update takes {update:.2f} s (median of "
        f"{arguments.updates}), {digest:.2f} s of it the digest ({digest / update:.0%})"
    )


if __name__ == "__main__":
    main()
