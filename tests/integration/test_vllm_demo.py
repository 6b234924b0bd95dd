"""The demo, short, with real vLLM as its policy: weights in files, and one copy for trainer and vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from contract.inference_servers import ARGUMENTS, CPU, PYTHON

STEPS = 4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed; `make vllm` installs it and runs this"),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the demo's model is made once."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("transport", ["shared_memory", "files"])
def test_the_demo_trains_a_policy_that_vllm_serves(tmp_path: Path, cache: Path, transport: str) -> None:
    folder = tmp_path / "run"
    sets = {
        "inference.policy.kind": "vllm",
        "inference.policy.python": PYTHON,
        "inference.policy.args": json.dumps(ARGUMENTS),
        "weights.transport": transport,
        "services.ready_s": 1800,
        "evaluate.items": 8,
        "evaluate.items_between": 8,
        "evaluate.every_steps": 2,
    }
    arguments = [argument for path, value in sets.items() for argument in ("--set", f"{path}={value}")]
    demo = subprocess.run(
        [
            *(sys.executable, "-m", "lachesis", "demo", "--run", "smoke", "--folder", folder, "--no-gate"),
            *("--deadline", "3400", "--steps", str(STEPS), *arguments),
        ],
        env={**os.environ, **CPU, "XDG_CACHE_HOME": str(cache)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    summary = msgspec.json.decode((folder / "summary.json").read_bytes())
    assert (summary["state"], summary["step"], summary["dead_letters"]) == ("finished", STEPS, 0)
    assert summary["gate"]["before"] is not None
    assert summary["gate"]["after"] is not None
    steps = [msgspec.json.decode(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # one step's weights are what the next ones' rollouts are sampled from: trainer and vLLM agree on their logprobs
    assert abs(steps[0]["logprobs/diff"]) < 1e-3, "trainer and vLLM disagree on the logprobs of what was sampled"
    written = {path.name for path in (folder / "weights").glob("*.safetensors")}
    assert len(written) == (3 if transport == "shared_memory" else STEPS + 1), written
    assert not (folder / "weights" / "shared_memory.json").exists(), "the trainer takes its pointer back"
