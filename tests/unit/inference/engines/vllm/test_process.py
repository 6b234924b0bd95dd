"""Around vLLM, without it: how its process is started and ended, and what the middleware makes of its answers."""

import os
import signal
import stat
import sys

import anyio
import httpx
import pytest

from lachesis.pipeline.config.run import InferenceConfig
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.inference.access import CONTROL_PATHS
from lachesis.pipeline.inference.engines.vllm import process as vllm
from lachesis.pipeline.inference.engines.vllm.middleware import VllmMiddleware
from lachesis.pipeline.inference.engines.vllm.names import CONTROL_TOKEN, REFUSED, SAMPLING_KEY, TOKENIZER_HASH
from lachesis.pipeline.inference.engines.vllm.process import start_vllm


def starting(tmp_path, python):
    return start_vllm(
        InferenceConfig(kind="vllm", python=str(python)),
        "m",
        role="policy",
        folder=tmp_path,
        tokenizer_hash="h",
        token="t",
    )


def interpreter(tmp_path, script):
    """A program that stands for vLLM's interpreter."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


async def test_an_interpreter_that_is_not_there_is_named(tmp_path):
    with pytest.raises(StartupError, match=r"inference\.policy\.python.*nowhere"):
        async with starting(tmp_path, tmp_path / "nowhere"):
            pass


async def test_one_without_vllm_ends_the_wait(tmp_path):
    async with starting(tmp_path, sys.executable) as server:
        with anyio.fail_after(20), pytest.raises(StartupError, match="ended with code 1"):
            await server.ready()


async def test_it_is_given_the_package_and_none_of_the_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("LACHESIS_NATS__TOKEN", "hush-42")
    monkeypatch.setenv("NATS_PASSWORD", "hush-42")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'one'}{os.pathsep}{tmp_path / 'other'}")
    async with starting(tmp_path, interpreter(tmp_path, f"env > {tmp_path}/env")) as it:
        with anyio.fail_after(20), pytest.raises(StartupError, match="code 0"):
            await it.ready()
    seen = (tmp_path / "env").read_text()
    assert "hush-42" not in seen
    assert f"LACHESIS_VLLM_WEIGHTS={tmp_path}/weights" in seen
    folders = next(line for line in seen.splitlines() if line.startswith("PYTHONPATH=")).removeprefix("PYTHONPATH=")
    first, *rest = folders.split(os.pathsep)
    assert os.listdir(first) == ["lachesis"]  # noqa: PTH208 - in an async test
    assert rest == [str(tmp_path / "one"), str(tmp_path / "other")]


@pytest.mark.parametrize(("gpus", "seen"), [([], "0,1"), ([1], "1"), ([4, 5, 6], "4,5,6")])
async def test_it_sees_the_gpus_that_are_its_own(tmp_path, monkeypatch, gpus, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    script = interpreter(tmp_path, f"echo $CUDA_VISIBLE_DEVICES > {tmp_path}/env")
    settings = InferenceConfig(kind="vllm", python=str(script), gpus=gpus)
    async with start_vllm(settings, "m", role="policy", folder=tmp_path, tokenizer_hash="h", token="t") as it:
        with anyio.fail_after(20), pytest.raises(StartupError, match="code 0"):
            await it.ready()
    assert (tmp_path / "env").read_text() == f"{seen}\n"


async def test_key_and_token_are_in_its_environment_alone(tmp_path, caplog):
    caplog.set_level("INFO")
    script = f"echo $LACHESIS_VLLM_TOKEN-$LACHESIS_VLLM_KEY > {tmp_path}/env; echo $0 $@ > {tmp_path}/argv"
    started = start_vllm(
        InferenceConfig(kind="vllm", python=str(interpreter(tmp_path, script))), "m", role="policy", folder=tmp_path,
        tokenizer_hash="h", token="hush-1", key="hush-2", routed_experts=True,
    )  # fmt: skip
    async with started as it:
        with anyio.fail_after(20), pytest.raises(StartupError, match="code 0"):
            await it.ready()
    assert (tmp_path / "env").read_text() == "hush-1-hush-2\n"
    assert "--model m" in (tmp_path / "argv").read_text()
    assert "--enable-return-routed-experts" in (tmp_path / "argv").read_text()
    assert "hush" not in (tmp_path / "argv").read_text() + caplog.text


async def test_its_whole_group_ends_with_it_even_if_it_will_not(tmp_path, monkeypatch):
    monkeypatch.setattr("lachesis.pipeline.inference.engines.vllm.process._END_S", 0.2)
    stubborn = f"trap '' TERM; sleep 100 & echo $! > {tmp_path}/worker; wait; wait; sleep 100"
    async with starting(tmp_path, interpreter(tmp_path, stubborn)) as server:
        with anyio.fail_after(10):
            while not (tmp_path / "worker").exists() or not (tmp_path / "worker").read_text():  # noqa: ASYNC110
                await anyio.sleep(0.01)
        worker = int((tmp_path / "worker").read_text())
    for pid in (server.pid, worker):
        with anyio.fail_after(10):
            while _runs(pid):  # noqa: ASYNC110
                await anyio.sleep(0.01)


async def test_one_that_dies_in_service_ends_the_watch(tmp_path):
    async with starting(tmp_path, interpreter(tmp_path, "exec sleep 100")) as server:
        os.kill(server.pid, signal.SIGKILL)
        with anyio.fail_after(10), pytest.raises(StartupError, match="code -9"):
            await server.watch()


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return " Z " not in file.read()
    except FileNotFoundError:
        return False


async def application(scope, receive, send):
    if scope["path"] == "/refuse":
        raise RuntimeError(f"Call failed: {REFUSED}lm_head is bfloat16")
    if scope["path"] == "/break":
        raise RuntimeError("out of memory")
    headers = [(b"content-type", b"application/json"), (b"x-kept", b"1")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b'{"data": [', "more_body": True})
    await send({"type": "http.response.body", "body": b'{"id": "m"}]}'})


async def test_what_changes_vllms_state_takes_the_token_and_no_page_is_answered(monkeypatch):
    monkeypatch.setenv(TOKENIZER_HASH, "h")
    monkeypatch.setenv(CONTROL_TOKEN, "t")
    answers = VllmMiddleware(application)
    assert CONTROL_TOKEN not in os.environ
    async with httpx.AsyncClient(transport=httpx.ASGITransport(answers), base_url="http://v") as http:
        for path in (*CONTROL_PATHS, "/collective_rpc", "/sleep", "/v1/load_lora_adapter", "/else"):
            for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "t"}):
                assert (await http.post(path, headers=headers)).status_code == 401
            assert (await http.post(path, headers={"Authorization": "Bearer t"})).status_code == 200
        for path in ("/v1/chat/completions", "/tokenize", "/metrics", "/health"):
            assert (await http.post(path)).status_code == 200
        assert (await http.get("/else", headers={"Origin": "http://evil.example"})).status_code == 403


async def test_a_root_path_and_a_web_socket_lead_past_nothing(monkeypatch):
    monkeypatch.setenv(TOKENIZER_HASH, "h")
    monkeypatch.setenv(CONTROL_TOKEN, "t")
    answers, sent = VllmMiddleware(application), []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": "/root/pause", "root_path": "/root", "method": "POST", "headers": []}
    await answers(scope, None, send)
    await answers({"type": "websocket", "path": "/v1/realtime", "headers": []}, None, send)
    assert [message.get("status", message.get("code")) for message in sent] == [401, None, 1008]


async def test_with_a_key_vllm_answers_nobody_else(monkeypatch):
    for name, value in ((TOKENIZER_HASH, "h"), (CONTROL_TOKEN, "t"), (SAMPLING_KEY, "k")):
        monkeypatch.setenv(name, value)
    answers = VllmMiddleware(application)
    assert SAMPLING_KEY not in os.environ
    async with httpx.AsyncClient(transport=httpx.ASGITransport(answers), base_url="http://v") as http:
        for path in ("/v1/models", "/v1/completions", "/inference/v1/generate", "/tokenize"):
            for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "k"}):
                answer = await http.post(path, headers=headers)
                assert (answer.status_code, "inference.ROLE.key_file" in answer.text) == (401, True)
            for secret in ("k", "t"):
                assert (await http.post(path, headers={"Authorization": f"Bearer {secret}"})).status_code == 200
        for path in CONTROL_PATHS:
            assert (await http.post(path, headers={"Authorization": "Bearer k"})).status_code == 401
        assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/v1/models", 200, '"tokenizer_hash":"h"'),
        ("/else", 200, '{"data": [{"id": "m"}]}'),
        ("/refuse", 400, "lm_head is bfloat16"),
        ("/break", 500, "out of memory"),
    ],
)
async def test_answers_are_as_the_reference_servers(monkeypatch, path, status, text):
    monkeypatch.setenv(TOKENIZER_HASH, "h")
    monkeypatch.setenv(CONTROL_TOKEN, "t")
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(VllmMiddleware(application)), base_url="http://v"
    ) as http:
        answer = await http.get(path, headers={"Authorization": "Bearer t"})
    assert (answer.status_code, text in answer.text) == (status, True)


@pytest.mark.parametrize(
    ("arguments", "environ", "gib"),
    [
        ([], {}, "5"),
        (["--dtype", "float32"], {"VLLM_CPU_KVCACHE_SPACE": ""}, "5"),
        ([], {"VLLM_CPU_KVCACHE_SPACE": "2"}, None),
        (["--gpu-memory-utilization", "0.4"], {}, None),
        (["--kv-cache-memory-bytes=1000000000"], {}, None),
    ],
)
def test_on_a_cpu_the_cache_takes_a_quarter_of_the_free_memory_unless_something_says_its_size(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], environ: dict[str, str], gib: str | None
) -> None:
    monkeypatch.setattr(vllm, "free_on_machine", lambda: 20 << 30)
    assert vllm.cpu_cache_variables(arguments, environ) == ({} if gib is None else {"VLLM_CPU_KVCACHE_SPACE": gib})


def test_on_a_machine_that_is_full_the_cache_takes_a_gibibyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "free_on_machine", lambda: 1 << 28)
    assert vllm.cpu_cache_variables([], {}) == {"VLLM_CPU_KVCACHE_SPACE": "1"}
