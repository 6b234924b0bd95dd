"""`/generate` on vLLM, over routes that stand for vLLM's: what requests they get, what becomes of their answers."""

import json

import anyio
import httpx
import pytest

from lachesis.pipeline.inference.engines.vllm.middleware import VllmMiddleware
from lachesis.pipeline.inference.engines.vllm.names import CONTROL_TOKEN, TOKENIZER_HASH


class Vllm:
    """An application that answers as vLLM's routes do, and notes the requests."""

    def __init__(self):
        self.asked = []
        self.versions = []
        self.refusal = None
        self.hung_up = anyio.Event()
        self.began = None

    async def __call__(self, scope, receive, send):
        message = await receive()
        body = json.loads(message["body"] or b"null")
        self.asked.append((scope["path"], body))
        assert dict(scope["headers"])[b"content-length"] == str(len(message["body"])).encode()
        if scope["path"] == "/v1/completions" and self.began is not None:
            self.began.set()
            assert (await receive())["type"] == "http.disconnect"
            self.hung_up.set()
            return
        status, answer = self._answer(scope["path"], body)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    def _answer(self, path, body):
        if path == "/weight_info":
            return 200, {"weight_version": self.versions.pop(0) if self.versions else "1-a-b"}
        if path == "/tokenize":
            return 200, {"count": 2, "max_model_len": 9, "tokens": [5, 6]}
        if path == "/detokenize":
            return 200, {"prompt": "".join(f"<{token}>" for token in body["tokens"])}
        if self.refusal is not None:
            return self.refusal
        tops = {"token_id:8": -0.5, "token_id:7": -0.25, "token_id:9": -3.0}
        logprobs = {"tokens": ["token_id:8"], "token_logprobs": [-0.5], "top_logprobs": [tops], "text_offset": [0]}
        choices = [
            {
                "index": index, "text": f"t{index}", "token_ids": [8], "finish_reason": "stop", "stop_reason": "zz",
                "logprobs": logprobs if "logprobs" in body else None,
                "prompt_logprobs": [None, {"6": {"logprob": -1.0, "rank": 1}}] if "prompt_logprobs" in body else None,
            }
            for index in reversed(range(body.get("n", 1)))
        ]  # fmt: skip
        return 200, {"choices": choices, "model": "policy"}


@pytest.fixture
def vllm():
    return Vllm()


@pytest.fixture
def http(vllm, monkeypatch):
    monkeypatch.setenv(TOKENIZER_HASH, "h")
    monkeypatch.setenv(CONTROL_TOKEN, "t")
    return httpx.AsyncClient(base_url="http://v", transport=httpx.ASGITransport(VllmMiddleware(vllm)))


async def test_vllms_shape_comes_from_its_completions(vllm, http):
    answer = await http.post("/generate", json={"prompt": "hi", "n": 2, "logprobs": 1, "stop": "zz", "seed": 3})
    assert answer.json() == {
        "text": ["t0", "t1"], "prompt": "hi", "finish_reasons": ["stop", "stop"], "prompt_token_ids": [5, 6],
        "token_ids": [[8], [8]], "logprobs": [[[{"8": -0.5, "7": -0.25}]]] * 2,
    }  # fmt: skip
    assert dict(vllm.asked)["/v1/completions"] == {
        "prompt": [5, 6], "n": 2, "max_tokens": 16, "seed": 3, "stop": ["zz"], "logprobs": 1,
        "return_token_ids": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    scored = await http.post("/generate", json={"prompt": {"prompt_token_ids": [5, 6]}, "prompt_logprobs": 1})
    assert (scored.json()["prompt"], scored.json()["prompt_logprobs"]) == ("<5><6>", [None, {"6": -1.0}])


async def test_sglangs_shape_comes_from_its_completions(vllm, http):
    asked = {"input_ids": [5], "return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    vllm.versions = ["1-a-b", "1-a-b", "1-a-b", "2-a-c"]
    about = (await http.post("/generate", json=asked)).json()["meta_info"]
    assert about["output_token_logprobs"] == [[-0.5, 8, "<8>"]]
    assert about["output_top_logprobs"] == [[[-0.25, 7, "<7>"], [-0.5, 8, "<8>"]]]
    assert about["finish_reason"] == {"type": "stop", "matched": "zz"}
    assert about["weight_version"] == "1-a-b"
    torn = (await http.post("/generate", json={"input_ids": [5]})).json()["meta_info"]
    assert torn["weight_version"] is None, "the weights changed on the way: which made the last token is not known"


@pytest.mark.parametrize(
    ("body", "words"),
    [(b"{", "request"), (b"[]", "request"), (b'{"prompt": "a", "stream": true}', "stream"), (b"{}", "prompt"),
     (b'{"prompt": "a", "top_k": 5}', "top_k"), (b'{"prompt": "' + b"a" * (17 << 20) + b'"}', "more than")],
)  # fmt: skip
async def test_what_is_wrong_is_said_before_vllm_samples(vllm, http, body, words):
    answer = await http.post("/generate", content=body)
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True)
    assert not vllm.asked


async def test_what_vllm_refuses_is_answered_in_its_words(vllm, http):
    vllm.refusal = 422, {"error": {"message": "too long"}}
    answer = await http.post("/generate", json={"prompt": "a"})
    assert (answer.status_code, answer.json()) == vllm.refusal


async def test_who_hangs_up_ends_the_work(vllm, http):
    vllm.began = anyio.Event()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            sent = [{"type": "http.request", "body": b'{"prompt": "a"}', "more_body": False}]

            async def receive():
                if sent:
                    return sent.pop()
                await vllm.began.wait()
                return {"type": "http.disconnect"}

            async def send(_):
                pass

            scope = {"type": "http", "path": "/generate", "method": "POST", "headers": [], "query_string": b""}
            tasks.start_soon(http._transport.app, scope, receive, send)
            await vllm.hung_up.wait()
