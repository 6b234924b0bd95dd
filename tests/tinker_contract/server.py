"""A contract server: this project's own reading of the protocol that the tinker SDK 0.38 speaks. It is not Tinker.

No open server known to us takes the SDK's protobuf requests, so this one answers what our back end asks, by the SDK's
own types and protobuf modules, with a real model of torch: gradients, Adam, saved states and samples are computed. All
weights are trained, whatever rank is requested. Sessions, saved states and samplers are kept in a folder; models in
training are in memory, and gone when the process is killed. Every request is written to requests.jsonl.

    python -m tinker_contract.server FOLDER MODEL PORT KEY
"""

import asyncio
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import uvicorn
from safetensors.torch import load_file, save_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tinker.proto import tinker_public_pb2 as pb

from lachesis.pipeline.model.policy import load_model

PROTOBUF = "application/x-protobuf"
REFUSAL = {"error": "tokens are out of range", "category": "user"}
NUMPY = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64}


class Model:
    """A model in training, with its Adam."""

    def __init__(self, source, base_model):
        self.base_model = base_model
        self.model = load_model(source).model.train()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.0)
        self.seq_ids = set()

    def logprobs(self, tokens, targets):
        logits = self.model(torch.tensor([tokens])).logits[0].float()
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(targets)[:, None])[:, 0]

    def forward_backward(self, request):
        assert request.loss_fn == "importance_sampling", request.loss_fn
        total, found = 0.0, []
        for datum in request.data:
            tokens = np.concatenate([np.frombuffer(c.encoded_text.tokens, np.int32) for c in datum.model_input])
            given = {
                name: np.frombuffer(t.dense, NUMPY[t.dtype]).reshape(t.shape)
                for name, t in datum.loss_fn_inputs.items()
            }
            assert given.keys() == {"target_tokens", "logprobs", "advantages"}
            assert given["target_tokens"].shape == tokens.shape
            new = self.logprobs(tokens.tolist(), given["target_tokens"].tolist())
            ratio = (new - torch.tensor(given["logprobs"])).exp()
            loss = -(ratio * torch.tensor(given["advantages"])).sum()
            loss.backward()
            total += float(loss.detach())
            found.append(new.detach().numpy().astype(np.float32))
        out = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": total})
        record = out.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(found))
        field = record.fields["logprobs"]
        field.dtype = pb.DTYPE_FLOAT32
        field.data = b"".join(each.tobytes() for each in found)
        field.offsets = np.cumsum([0, *(each.nbytes for each in found)]).astype(np.int64).tobytes()
        return out.SerializeToString()

    def optim_step(self, adam):
        for group in self.optimizer.param_groups:
            group |= {"lr": adam["learning_rate"], "betas": (adam["beta1"], adam["beta2"]), "eps": adam["eps"]}
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"metrics": {"lr": adam["learning_rate"]}}

    def save(self, folder, *, optimizer):
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: each.detach().clone() for name, each in self.model.named_parameters()}, folder / "weights")
        if optimizer:
            moments = {}
            for name, parameter in self.model.named_parameters():
                for key, value in self.optimizer.state.get(parameter, {}).items():
                    moments[f"{name}/{key}"] = value.clone()
            save_file(moments, folder / "optimizer")
        (folder / "base_model").write_text(self.base_model)

    def load(self, folder):
        with torch.no_grad():
            for name, value in load_file(folder / "weights").items():
                self.model.get_parameter(name).copy_(value)
        if (folder / "optimizer").exists():
            for key, value in load_file(folder / "optimizer").items():
                name, _, entry = key.rpartition("/")
                self.optimizer.state[self.model.get_parameter(name)][entry] = value


class Server:
    def __init__(self, folder, source, key):
        self.folder, self.source, self.key = folder, source, key
        self.models = {}
        self.samplers = {}
        self.results = {}
        self.sampling = asyncio.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        self.known = folder / "known.json"
        found = json.loads(self.known.read_text()) if self.known.exists() else {"sessions": 0, "samplers": {}}
        self.sessions, self.sampler_paths = found["sessions"], found["samplers"]
        self.log = (folder / "requests.jsonl").open("a")

    def note(self, **what):
        self.log.write(json.dumps(what) + "\n")
        self.log.flush()

    def remember(self):
        self.known.write_text(json.dumps({"sessions": self.sessions, "samplers": self.sampler_paths}))

    def place(self, path):
        return self.folder / path.removeprefix("tinker://")

    def model(self, model_id):
        return self.models.get(model_id)

    async def handle(self, request: Request) -> Response:
        if request.headers.get("X-API-Key") != self.key:
            return JSONResponse({"detail": "the key is not known"}, 401)
        name = request.path_params["name"]
        if name.startswith("samplers/"):
            path = self.sampler_paths[name.removeprefix("samplers/")]
            base = (self.place(path) / "base_model").read_text()
            return JSONResponse({"sampler_id": name, "base_model": base, "model_path": path})
        if name.startswith("sessions/"):
            return Response(status_code=204)
        if name.startswith("training_runs/"):
            return self.deleted(name.removeprefix("training_runs/").replace("/checkpoints/", "/"))
        if name == "forward_backward":
            body = pb.ForwardBackwardRequest.FromString(await request.body())
            return self.trained(body.model_id, body.seq_id, name, lambda model: model.forward_backward(body), body)
        body = {} if request.method == "GET" else await request.json()
        return await getattr(self, name)(body)

    def trained(self, model_id, seq_id, name, compute, body=None):
        """Compute a model's request once: the SDK sends it again when an answer is lost."""
        model = self.models.get(model_id)
        if model is None:
            return JSONResponse({"detail": f"there is no model {model_id}"}, 404)
        request_id = f"{model_id}:{seq_id}"
        if body is not None and self.refuses(body):
            self.results[request_id] = REFUSAL
        if request_id not in self.results:
            self.results[request_id] = compute(model)
            noted = {"request": name, "model": model_id, "seq": seq_id}
            if body is not None:
                noted["sequences"] = [datum.model_input_spans[0].prompt_tokens.sequence_id for datum in body.data]
            self.note(**noted)
        return JSONResponse({"request_id": request_id, "model_id": model_id})

    def refuses(self, body):
        """Whether a sequence of a group is in the data that the file `refused` names, one a line."""
        file = self.folder / "refused"
        named = file.read_text().split() if file.exists() else []
        ids = [datum.model_input_spans[0].prompt_tokens.sequence_id for datum in body.data]
        found = any(each.partition("/")[0] in named for each in ids)
        if found:
            self.note(request="refused", sequences=ids)
        return found

    def deleted(self, name):
        """Delete a saved state."""
        place = self.folder / name
        if not place.is_dir():
            return JSONResponse({"detail": f"there is no checkpoint {name}"}, 404)
        shutil.rmtree(place)
        self.note(request="delete", path=f"tinker://{name}")
        return Response(status_code=204)

    def promised(self, request_id, result, **more):
        self.results[request_id] = result
        return JSONResponse({"request_id": request_id, **more})

    async def client_config(self, _):
        return JSONResponse({})

    async def get_server_capabilities(self, _):
        return JSONResponse({"supported_models": [{"model_name": "tiny"}, {"model_name": "old", "trainable": False}]})

    async def telemetry(self, _):
        return JSONResponse({"status": "accepted"})

    async def create_session(self, _):
        self.sessions += 1
        self.remember()
        return JSONResponse({"type": "create_session", "session_id": f"session{self.sessions}"})

    async def session_heartbeat(self, _):
        return JSONResponse({"type": "session_heartbeat"})

    async def create_model(self, body):
        model_id = f"{body['session_id']}:train:{body['model_seq_id']}"
        self.models[model_id] = Model(self.source, body["base_model"])
        self.note(request="create_model", base_model=body["base_model"], lora=body["lora_config"])
        return self.promised(model_id, {"model_id": model_id, "type": "create_model"}, model_id=model_id)

    async def load_weights(self, body):
        model_id = f"{body['session_id']}:train:{body['model_seq_id']}"
        place = self.place(body["path"])
        model = self.models[model_id] = Model(self.source, (place / "base_model").read_text())
        model.load(place)
        self.note(request="load_weights", path=body["path"], optimizer=body["optimizer"])
        return self.promised(f"{model_id}:load", {"path": body["path"], "type": "load_weights"})

    async def get_info(self, body):
        model = self.models[body["model_id"]]
        names = {"model_name": model.base_model}
        return JSONResponse({"type": "get_info", "model_id": body["model_id"], "model_data": names})

    async def optim_step(self, body):
        adam = body["adam_params"]
        return self.trained(body["model_id"], body["seq_id"], "optim_step", lambda model: model.optim_step(adam))

    def saved(self, body, kind, *, optimizer):
        path = f"tinker://{body['model_id'].replace(':', '-')}/{kind}/{body['path']}"

        def save(model):
            model.save(self.place(path), optimizer=optimizer)
            return {"path": path}

        return self.trained(body["model_id"], body["seq_id"], kind, save)

    async def save_weights(self, body):
        return self.saved(body, "weights", optimizer=True)

    async def save_weights_for_sampler(self, body):
        return self.saved(body, "sampler_weights", optimizer=False)

    async def create_sampling_session(self, body):
        if not self.place(body["model_path"]).exists():
            return JSONResponse({"detail": f"there are no weights {body['model_path']}"}, 404)
        name = f"{body['session_id']}-sample-{body['sampling_session_seq_id']}"
        self.sampler_paths[name] = body["model_path"]
        self.remember()
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": name})

    async def asample(self, body):
        name, count = body["sampling_session_id"], body["num_samples"]
        request_id = f"{name}:{body['seq_id']}"
        async with self.sampling:
            sampled = await asyncio.to_thread(self.sample, self.sampler_paths[name], body)
        ids = [f"{request_id}:{index}" for index in range(count)]
        self.note(request="asample", path=self.sampler_paths[name], params=body["sampling_params"])
        return self.promised(request_id, sampled, sample_sequence_ids=ids)

    def sample(self, path, body):
        if path not in self.samplers:
            self.samplers[path] = load_model(self.source).model
            weights = load_file(self.place(path) / "weights")
            self.samplers[path].load_state_dict(weights, strict=False)
        model, params = self.samplers[path], body["sampling_params"]
        prompt = [token for chunk in body["prompt"]["chunks"] for token in chunk["tokens"]]
        stop = params.get("stop")
        ends = {model.config.eos_token_id} if stop is None else {each for each in stop if isinstance(each, int)}
        draw = torch.Generator().manual_seed(params.get("seed") or torch.seed() % 2**62)
        out = pb.SampleResponse()
        if body.get("prompt_logprobs"):
            with torch.inference_mode():
                scores = torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1].float(), -1)
                own = scores.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].numpy()
            out.prompt_logprobs = np.concatenate(([np.nan], own)).astype(np.float32).tobytes()
        for _ in range(body["num_samples"]):
            tokens, logprobs = [], []
            with torch.inference_mode():
                while len(tokens) < params["max_tokens"] and not (tokens and tokens[-1] in ends):
                    logits = model(torch.tensor([prompt + tokens])).logits[0, -1].float() / (params["temperature"] or 1)
                    scores = torch.log_softmax(logits, -1)
                    token = int(torch.multinomial(scores.exp(), 1, generator=draw))
                    tokens.append(token)
                    logprobs.append(float(scores[token]))
            reason = pb.STOP_REASON_STOP if tokens[-1] in ends else pb.STOP_REASON_LENGTH
            out.sequences.add(
                stop_reason=reason,
                tokens=np.array(tokens, np.int32).tobytes(),
                logprobs=np.array(logprobs, np.float32).tobytes(),
            )
        return out.SerializeToString()

    async def retrieve_future(self, body):
        result = self.results.get(body["request_id"])
        if result is None:
            return JSONResponse({"detail": f"there is no request {body['request_id']}"}, 404)
        return Response(result, media_type=PROTOBUF) if isinstance(result, bytes) else JSONResponse(result)


def build(folder, source, key):
    server = Server(Path(folder), source, key)
    setattr(server, "client/config", server.client_config)
    setattr(server, "client/dynamic_config", server.client_config)
    return Starlette(routes=[Route("/api/v1/{name:path}", server.handle, methods=["GET", "POST", "DELETE"])])


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, source, port, key = sys.argv[1:]
    uvicorn.run(build(folder, source, key), host="127.0.0.1", port=int(port), log_level="warning", lifespan="off")
