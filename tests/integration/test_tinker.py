"""A real run that trains at a contract server of Tinker's protocol; trainer and server are killed amid it."""

import json
import os
import signal

import anyio
import httpx
import pytest
from integration.harness import Run
from integration.servers import Supervised
from tinker_contract.process import KEY, ContractServer

from lachesis.pipeline.ledger.checkpoint_state import known_checkpoints

pytest.importorskip("tinker", reason="the extra `tinker` is not installed")

STEPS = 8

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


async def test_a_run_trains_at_tinker_serves_its_policy_and_goes_on_after_kills(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    sets = {
        "training.backend": "tinker",
        "training.tinker.base_model": "tiny",
        "training.tinker.port": 0,
        "training.tinker.learning_rate": 0.003,
        "training.tinker.context_length": 64,
        "training.checkpoint_every": 2,
        "batching.teacher": "off",
        "teacher.enabled": "false",
    }
    server = ContractServer(tmp_path / "tinker", folder / "model")
    sets["training.tinker.url"] = server.url
    environ = {"TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"}
    with Run(folder, STEPS, Supervised(folder), sets=sets, environ=environ) as run:
        await server.start()
        try:
            run.start()
            await run.wait_for_step(2)
            await _is_served(folder)
            trainer = run.pids()["trainer"]
            os.kill(trainer, signal.SIGKILL)
            await run.wait_until_back("trainer", trainer)
            await run.wait_for_step(4)
            await server.kill()
            await server.start()
            assert await run.wait(600) == 0, run.tail()
        finally:
            await server.kill()
    checkpoints = folder / "checkpoints"
    newest, state = known_checkpoints(checkpoints)[0]
    assert state.step == STEPS
    steps = [json.loads(line).get("train/step") for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step for step in steps if step] == list(range(1, STEPS + 1))
    # by model: first the steps of a life, each but the first beginning where a state was saved
    taken: dict[str, int] = {}
    for each in server.requests("optim_step"):
        taken[each["model"]] = taken.get(each["model"], 0) + 1
    loads = [int(each["path"].rpartition("-")[2]) for each in server.requests("load_weights")]
    assert len(loads) >= 2
    assert loads[-1] + list(taken.values())[-1] == STEPS
    assert (server.folder / json.loads((newest / "tinker.json").read_text())["state"][len("tinker://") :]).is_dir()
    sampled = {each["path"] for each in server.requests("asample")}
    assert len(sampled) > 2  # a sampler a step


async def _is_served(folder):
    """Ask the policy at /v1, as OpenAI's clients do."""
    url = (folder / "inference" / "policy.url").read_text().strip()
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": "1+1="}], "max_tokens": 4, "logprobs": True,
        "return_token_ids": True,
    }  # fmt: skip
    async with httpx.AsyncClient(timeout=60) as client:
        with anyio.fail_after(60):
            answer = await client.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["token_ids"]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert choice["weight_versions"][0]["version"].count("-") == 2
