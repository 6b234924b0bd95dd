"""Around vLLM, without it: how its process is started and ended, and what the middleware makes of its answers."""

import os
import signal
import stat
import sys

import anyio
import httpx
import pytest

from lachesis.pipeline.config.run import InferenceConfig
from lachesis.pipeline.inference.protocol import CONTROL_PATHS, CONTROL_TOKEN, REFUSED, TOKENIZER_HASH
from lachesis.pipeline.inference.vllm import start_vllm
from lachesis.pipeline.inference.vllm_http import VllmMiddleware
from lachesis.schemas.errors import StartupError


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
    async with starting(tmp_path, interpreter(tmp_path, f"env > {tmp_path}/env; ls $PYTHONPATH > {tmp_path}/ls")) as it:
        with anyio.fail_after(20), pytest.raises(StartupError, match="code 0"):
            await it.ready()
    seen = (tmp_path / "env").read_text()
    assert "hush-42" not in seen
    assert f"LACHESIS_VLLM_WEIGHTS={tmp_path}/weights" in seen
    assert (tmp_path / "ls").read_text().split()[0] == "lachesis"


async def test_its_whole_group_ends_with_it_even_if_it_will_not(tmp_path, monkeypatch):
    monkeypatch.setattr("lachesis.pipeline.inference.vllm._END_S", 0.2)
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
        for path in CONTROL_PATHS:
            for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "t"}):
                assert (await http.post(path, headers=headers)).status_code == 401
            assert (await http.post(path, headers={"Authorization": "Bearer t"})).status_code == 200
        assert (await http.get("/else", headers={"Origin": "http://evil.example"})).status_code == 403


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
        answer = await http.get(path)
    assert (answer.status_code, text in answer.text) == (status, True)
