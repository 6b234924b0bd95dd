"""Holds an environment of Atropos in a process of its own, started by `process`.

An interpreter that has atroposlib runs it as a file, so it imports nothing of Lachesis, and only the standard library
before the message that names the class arrives. What the environment prints goes to stderr. It guarantees that a group
comes from one `collect_trajectories` (and `postprocess_histories`) of the class, that its requests for tokens go to the
run and nowhere else, and that it ends when the run's process does. `frames` has the messages.
"""

from __future__ import annotations

import asyncio
import collections
import contextvars
import faulthandler
import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import random
import signal
import struct
import sys
import threading
import time
import traceback
import uuid
from pathlib import Path
from typing import Any

GROUP: contextvars.ContextVar[int | None] = contextvars.ContextVar("group", default=None)
"""Number of the group that the running code works on; tasks that it starts inherit it."""
PROBE = [{"role": "user", "content": "Which tokens are these?"}]
"""As in `source`: the run compares its tokens with those of the policy's server."""
HEADER = struct.Struct(">I")
LENGTHS = ("max_tokens", "max_new_tokens", "max_completion_tokens")
SAMPLING = ("temperature", "top_p", "seed", "stop", "stop_token_ids", "ignore_eos")
WITHOUT_EFFECT = {
    "model", "split", "n", "logprobs", "top_logprobs", "timeout", "user", "skip_special_tokens", "skip_reasoning",
    "messages", "prompt", "input_ids", "echo", "stream",
}  # fmt: skip
"""Arguments that are read elsewhere, or that do not change sampled tokens."""
NORMALIZATION = ("reward_normalization", "reward_clip", "reward_normalization_warmup")
"""Settings that atroposlib 0.4.0 does not know; the run applies them."""
MAX_ERROR_CHARS = 4000


class FramePipe:
    """Frames over what were stdin and stdout: a length of four bytes, big-endian, and JSON."""

    def __init__(self) -> None:
        self._in = os.fdopen(os.dup(0), "rb")
        self._out = os.fdopen(os.dup(1), "wb")
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)

    def read(self) -> dict[str, Any] | None:
        """Return the next frame, None at the end."""
        header = self._in.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        (length,) = HEADER.unpack(header)
        data = self._in.read(length)
        return json.loads(data) if len(data) == length else None

    def send(self, **message: Any) -> None:
        """Send a frame. Raises ValueError or TypeError, and sends nothing, if JSON cannot hold it."""
        data = json.dumps(message, default=plain, allow_nan=False).encode()
        self._out.write(HEADER.pack(len(data)) + data)
        self._out.flush()


def plain(value: Any) -> Any:
    """Return a value for JSON: arrays and sets as lists, models as their fields."""
    for method in ("tolist", "model_dump"):
        if hasattr(value, method):
            return getattr(value, method)()
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    raise TypeError(f"{type(value).__name__} cannot be sent; use texts, numbers, lists and dictionaries")


def digest(item: Any) -> str:
    """Return a name of an item's content; for objects that JSON does not know, only their type counts."""

    def known(value: Any) -> Any:
        try:
            return plain(value)
        except TypeError:
            return type(value).__name__

    try:
        text = json.dumps(item, default=known, sort_keys=True)
    except (TypeError, ValueError):  # keys that are no text, say
        text = type(item).__name__
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_class(place: str) -> Any:
    """Return the class at `module:NAME` or `path/to/file.py:NAME`."""
    module, _, name = place.rpartition(":")
    if module.endswith(".py"):
        path = Path(module).absolute()
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{module} is no Python file")
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = loaded
        spec.loader.exec_module(loaded)
    else:
        loaded = importlib.import_module(module)
    if not hasattr(loaded, name):
        raise ImportError(f"{module} has no {name!r}")
    return getattr(loaded, name)


def configured(cls: Any, settings: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return the class' configuration with `settings`, its servers, and the normalization of rewards."""
    config, servers = cls.config_init()
    fields = set(type(config).model_fields)
    unknown = sorted(set(settings) - fields - set(NORMALIZATION))
    if unknown:
        raise ValueError(
            f"settings: {type(config).__name__} has no {', '.join(unknown)}; it has {', '.join(sorted(fields))}"
        )
    changed = {key: value for key, value in settings.items() if key in fields}
    config = type(config).model_validate({**config.model_dump(), "use_wandb": False, **changed})
    normalization = {key: getattr(config, key) for key in NORMALIZATION if key in fields}
    return config, servers, {**normalization, **{key: settings[key] for key in NORMALIZATION if key in settings}}


class Child:
    """The environment, and the groups that are requested from it."""

    def __init__(self, channel: FramePipe) -> None:
        self.channel = channel
        self.env: Any = None
        self.fresh = False
        self.items: list[tuple[str | None, Any]] = []
        self.backlog: collections.deque[tuple[int, str | None, Any]] = collections.deque()
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.numbers = itertools.count()
        self.drawing = asyncio.Lock()

    async def start(self, message: dict[str, Any]) -> None:
        """Make the environment and send its description."""
        seed, self.fresh = message["seed"], message["fresh"]
        cls = load_class(message["place"])
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % (1 << 32))
        if "torch" in sys.modules:
            sys.modules["torch"].manual_seed(seed)
        config, servers, normalization = configured(cls, message["settings"])
        cls.server_cls = engine_class(self)
        self.env = cls(config, servers if isinstance(servers, list) else [engine_config(servers)], slurm=False)
        self.env.server.servers = self.env.server.servers[:1]
        self.env.max_token_len = config.max_token_length
        await self.env.setup()
        pool = getattr(self.env, "curriculum_items", None)
        if pool and not self.fresh:
            self.items = list(pool.items())
        tokenizer = self.env.tokenizer
        probe = None
        if getattr(tokenizer, "chat_template", None):
            probe = tokenizer.encode(self.render(PROBE), add_special_tokens=False)
        self.channel.send(op="ready", named=len(self.items) or None, probe=probe, normalization=normalization)

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Return a conversation as the tokenizer's chat template writes it, for the model to go on."""
        return str(self.env.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    async def collect(self, number: int, index: int, n: int) -> None:
        """Answer one request for a group."""
        GROUP.set(number)
        try:
            resumed = bool(self.backlog)
            index, name, item = await self.draw(index)
            of_item = None if resumed else digest(item)
            self.env.config.group_size = n
            groups, backlog = await self.env.collect_trajectories(item)
            self.backlog.extend((index, name, one) for one in backlog or ())
            if groups:
                groups = await self.env.postprocess_histories(groups)
            found = groups if isinstance(groups, list) else [groups]
            kept = [self.with_messages(one) for one in found if one is not None and one.get("tokens")]
            self.channel.send(op="groups", id=number, index=index, name=name, digest=of_item, groups=kept)
        except Exception as error:  # noqa: BLE001 - the boundary to other people's code; the run decides
            trace = "".join(traceback.format_exception(error))[-MAX_ERROR_CHARS:]
            said = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
            self.channel.send(op="error", id=number, error=said, trace=trace)
        finally:
            self.tasks.pop(number, None)

    async def draw(self, index: int) -> tuple[int, str | None, Any]:
        """Return the item that the environment left to go on with, else item `index`, as (index, name, item)."""
        if self.backlog:
            return self.backlog.popleft()
        async with self.drawing:
            if self.fresh:
                return index, None, await self.next_item(index)
            while len(self.items) <= index:
                self.items.append((None, await self.next_item(len(self.items))))
        name, item = self.items[index]
        return index, name, item

    async def next_item(self, index: int) -> Any:
        item = await self.env.get_next_item()
        if item is None:
            raise LookupError(f"get_next_item returned None for item {index}: the environment has {index} items")
        return item

    def with_messages(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a group with conversations, made from its tokens if the environment gave none."""
        if not group.get("messages"):
            pairs = zip(group["tokens"], group["masks"], strict=True)
            group = {**group, "messages": [self.conversation(*pair) for pair in pairs]}
        # a default of atroposlib for "none", which its own server drops
        return {key: value for key, value in group.items() if not (isinstance(value, (list, dict)) and not value)}

    def conversation(self, tokens: list[int], labels: list[int]) -> list[dict[str, str]]:
        """Return the texts of a sequence by turns: masked tokens are the user's."""
        turns = []
        for sampled, part in itertools.groupby(zip(tokens, labels, strict=True), key=lambda pair: pair[1] != -100):
            ids = [token for token, _ in part]
            text = self.env.tokenizer.decode(ids, skip_special_tokens=sampled)
            turns.append({"role": "assistant" if sampled else "user", "content": text})
        return turns

    async def generate(self, prompt_ids: list[int], arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the run's samples of a prompt. Raises ValueError for an argument that it does not know."""
        group = GROUP.get()
        if group is None:
            raise RuntimeError(
                "tokens are generated for groups alone, not in setup() or in a task that outlives its group"
            )
        arguments = {**arguments, **(arguments.get("extra_body") or {})}
        arguments.pop("extra_body", None)
        given = {key: value for key, value in arguments.items() if value is not None}
        sampling = {key: given[key] for key in SAMPLING if key in given}
        for key in LENGTHS:
            if key in given:
                sampling["max_tokens"] = given[key]
        unknown = sorted(set(given) - set(SAMPLING) - set(LENGTHS) - WITHOUT_EFFECT)
        if unknown:
            raise ValueError(f"the run's policy cannot be sampled with {', '.join(unknown)}; leave that out")
        if isinstance(sampling.get("stop"), str):
            sampling["stop"] = [sampling["stop"]]
        number = next(self.numbers)
        answer = self.answers[number] = asyncio.get_running_loop().create_future()
        try:
            self.channel.send(
                op="generate", id=number, group=group, prompt_ids=prompt_ids, n=given.get("n", 1), sampling=sampling
            )
            found = await answer
        finally:
            del self.answers[number]
        if found["op"] == "refused":
            raise RuntimeError(found["error"])
        samples: list[dict[str, Any]] = found["samples"]
        return samples

    def hear(self, message: dict[str, Any]) -> None:
        """Handle a message of the run."""
        op = message["op"]
        if op == "ping":
            self.channel.send(op="pong")
        elif op == "collect":
            work = self.collect(message["id"], message["index"], message["n"])
            self.tasks[message["id"]] = asyncio.get_running_loop().create_task(work)
        elif op == "cancel" and message["id"] in self.tasks:
            self.tasks[message["id"]].cancel()
        elif op in ("generated", "refused"):
            answer = self.answers.get(message["id"])
            if answer is not None and not answer.done():
                answer.set_result(message)


def engine_config(servers: Any) -> Any:
    """Return the configuration of one server, made of one that stands for several."""
    kind = importlib.import_module("atroposlib.envs.server_handling.server_baseline").APIServerConfig
    return kind(model_name=servers.model_name, base_url="", api_key="", health_check=False)


def engine_class(child: Child) -> Any:
    """Return a class of servers that let the run generate; atroposlib uses them like any other server."""
    base: Any = importlib.import_module("atroposlib.envs.server_handling.server_baseline").APIServer

    class Engine(base):  # type: ignore[misc]
        """The run's policy. Requests are not repeated here: the run retries them."""

        async def check_server_status_task(self, chat_completion: bool = True) -> None:
            self.server_healthy = True

        async def tokens_and_logprobs_completion(self, **kwargs: Any) -> Any:
            return await self._tokens_and_logprobs_completion_wrapper(**kwargs)

        async def chat_completion(self, **kwargs: Any) -> Any:
            return await self._chat_completion_wrapper(**kwargs)

        async def completion(self, **kwargs: Any) -> Any:
            return await self._completion_wrapper(**kwargs)

        async def get_logprobs(self, **kwargs: Any) -> Any:
            raise NotImplementedError("the run's policy gives logprobs of what it samples, not of given texts")

        async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> Any:
            prompt_ids = kwargs.get("input_ids")
            if prompt_ids is None:
                prompt_ids = child.env.tokenizer.encode(kwargs["prompt"])
            bos = getattr(child.env.tokenizer, "bos_token_id", None)
            if bos is not None and list(prompt_ids[:2]) == [bos, bos]:  # of a chat template, and of encode
                prompt_ids = prompt_ids[1:]
            samples = await child.generate(list(prompt_ids), kwargs)
            columns = [[one[key] for one in samples] for key in ("token_ids", "logprobs", "finish_reason")]
            return (list(prompt_ids), *columns)

        async def _chat_completion_wrapper(self, **kwargs: Any) -> Any:
            ids = child.env.tokenizer.encode(child.render(kwargs["messages"]), add_special_tokens=False)
            samples = await child.generate(ids, kwargs)
            spoken = [{"message": {"role": "assistant", "content": one["text"]}} for one in samples]
            kind = importlib.import_module("openai.types.chat.chat_completion").ChatCompletion
            return kind.model_validate({**self._about(samples, spoken), "object": "chat.completion"})

        async def _completion_wrapper(self, **kwargs: Any) -> Any:
            samples = await child.generate(child.env.tokenizer.encode(kwargs["prompt"]), kwargs)
            kind = importlib.import_module("openai.types.completion").Completion
            written = [{"text": one["text"]} for one in samples]
            return kind.model_validate({**self._about(samples, written), "object": "text_completion"})

        def _about(self, samples: list[dict[str, Any]], said: list[dict[str, Any]]) -> dict[str, Any]:
            ends = [{"index": i, "finish_reason": one["finish_reason"]} for i, one in enumerate(samples)]
            choices = [{**end, **one} for end, one in zip(ends, said, strict=True)]
            about = {"id": uuid.uuid4().hex, "created": int(time.time()), "model": self.config.model_name}
            return {**about, "choices": choices}

    return Engine


async def run(channel: FramePipe) -> None:
    """Make the environment that the first frame names, then handle the other frames."""
    loop = asyncio.get_running_loop()
    child = Child(channel)
    first = channel.read()
    if first is None:
        return
    try:
        await child.start(first)
    except BaseException as error:  # noqa: BLE001 - as above; the run ends with it
        said = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
        channel.send(op="failed", error=said, trace="".join(traceback.format_exception(error))[-MAX_ERROR_CHARS:])
        return

    def listen() -> None:
        while (message := channel.read()) is not None:
            loop.call_soon_threadsafe(child.hear, message)
        os._exit(0)  # the run's process is gone, whatever the environment is doing

    threading.Thread(target=listen, daemon=True).start()
    await asyncio.Event().wait()


def main() -> None:
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    sys.path[0] = str(Path.cwd())  # not this file's folder: its modules are not the environment's
    asyncio.run(run(FramePipe()))


if __name__ == "__main__":
    main()
