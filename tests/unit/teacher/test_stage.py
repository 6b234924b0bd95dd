"""The teacher stage: arrays in place, one failing sequence alone, a server that is down, another tokenizer."""

import hashlib
from contextlib import asynccontextmanager
from functools import partial

import anyio
import msgspec
import numpy as np
import pytest

from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig, TeacherConfig
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.governor.config import FlowConfig
from lachesis.pipeline.inference.client import Capabilities
from lachesis.pipeline.inference.config import InferenceConfig
from lachesis.pipeline.inference.identity import IdentityGuard
from lachesis.pipeline.inference.prompt_logprobs import PromptTopLogprobs
from lachesis.pipeline.model.tokenizer import build_character_tokenizer, tokenizer_hash
from lachesis.pipeline.teacher import stage as stage_module
from lachesis.pipeline.teacher.stage import run_teacher
from lachesis.schemas import subjects
from lachesis.schemas.annotations import DeadLetter, TeacherEvent, TeacherLogprobs
from lachesis.schemas.codec import decode
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.rollout import Message
from lachesis.services.stage_settings import teacher_settings

CONFIG = RunConfig(run="r")


class Server:
    """A teacher whose logprob of a token is minus a hundredth of it; `fail` may raise or change an answer."""

    def __init__(self):
        self.tokenizer_hash = "tok"
        self.guard = IdentityGuard()
        self.up = True
        self.calls = 0
        self.fail = lambda tokens, answer: answer

    async def current(self):
        return self

    async def probe(self):
        if not self.up:
            raise InfrastructureError("connection refused")
        return Capabilities(model="big", max_model_len=99, weight_version="0-a-b", tokenizer_hash=self.tokenizer_hash)

    async def prompt_top_logprobs(self, tokens, k, start=0):
        self.calls += 1
        await anyio.lowlevel.checkpoint()
        if not self.up:
            raise InfrastructureError("connection refused")
        answer = np.array([0.0, *(-token / 100 for token in tokens[1:])], np.float32)
        ids, top = self.likeliest(tokens, k)
        logprobs = self.fail(tokens, answer)[start:]
        return PromptTopLogprobs(logprobs, ids[start:], top[start:])

    def likeliest(self, tokens, k):
        none = np.zeros((len(tokens), 0), np.int32)
        return none, none.astype(np.float32)


@pytest.fixture
def server(monkeypatch):
    found = Server()

    class Role:
        def __init__(self, *_, **__):
            pass

        async def __aenter__(self):
            return found

        async def __aexit__(self, *_):
            return None

    monkeypatch.setattr(stage_module, "open_role", Role)
    return found


class TopServer(Server):
    """A teacher that also says which tokens it finds likeliest: the given one's neighbours, the last with only one."""

    def likeliest(self, tokens, k):
        ids = np.array([[-1] * k, *([token + n for n in range(k)] for token in tokens[1:])], np.int32)
        top = np.array([[-np.inf] * k, *([-0.7 - n for n in range(k)] for _ in tokens[1:])], np.float32)
        ids[-1, 1:], top[-1, 1:] = -1, -np.inf
        return ids, top


@pytest.fixture
def servers(monkeypatch):
    """Servers by role; each is opened once."""
    found = {}

    @asynccontextmanager
    async def open_role(_bus, _run, role, **_):
        yield found[role]

    monkeypatch.setattr(stage_module, "open_role", open_role)
    return found


def teacher(service):
    return run_teacher(service, teacher_settings(CONFIG))


async def pointers(lab, *envs):
    events = [event for env in envs or ("sums",) for event in await lab.events("teacher", TeacherEvent, env)]
    return [item for event in events for item in event.groups]


def pointed(lab, count, *envs):
    async def condition():
        return len(await pointers(lab, *envs)) + len(await lab.events("dead", DeadLetter)) >= count

    return condition


async def arrays(lab, pointer):
    return decode(TeacherLogprobs, (await lab.bus.get(subjects.TEACHER, pointer.stored)).data)


async def test_every_tokens_logprob_lies_where_the_pointer_says(lab, server):
    group = lab.group(1, samples=3, tokens=5)
    seq = await lab.store(group)
    async with lab.running(teacher, "teacher"):
        await lab.until(pointed(lab, 1))
    (pointer,) = await pointers(lab)
    assert (pointer.group, pointer.seq, pointer.missing, pointer.reason) == (group.id, seq, [], None)
    stored = await arrays(lab, pointer)
    expected = [0.0 if t % 5 == 0 else -token / 100 for t, token in enumerate(11 + t for t in range(15))]
    assert stored.values().tolist() == pytest.approx(expected)
    assert (stored.group, stored.teacher, stored.missing) == (group.id, "big", [])


@pytest.mark.parametrize("how", ["refused", "too short", "not finite"])
async def test_one_failing_sequence_leaves_the_others(lab, server, how):
    def fail(tokens, answer):
        if tokens[0] != 15:  # the second of three
            return answer
        match how:
            case "refused":
                raise DataError("prompt too long")
            case "too short":
                return answer[:-1]
            case _:
                return answer * np.nan

    server.fail = fail
    await lab.store(lab.group(1, samples=3, tokens=4))
    async with lab.running(teacher, "teacher"):
        await lab.until(pointed(lab, 1))
    assert not await lab.events("dead", DeadLetter)
    (pointer,) = await pointers(lab)
    assert pointer.missing == [1]
    assert pointer.reason
    values = (await arrays(lab, pointer)).values()
    assert values[1:4].all()
    assert not values[4:8].any()
    assert values[9:12].all()


async def test_a_server_that_is_down_is_waited_for(lab, server):
    await lab.store(lab.group(1))
    async with lab.running(teacher, "teacher") as service:
        await lab.until(lambda: _true(service.vitals.state == "ok" or server.calls))
        server.up = False
        before = server.calls
        await lab.store(lab.group(2))
        await lab.until(lambda: _true(server.calls >= before + 4))
        assert service.vitals.state == "waiting"
        server.up = True
        await lab.until(pointed(lab, 2))
    assert sorted(pointer.missing for pointer in await pointers(lab)) == [[], []]


async def _true(value):
    return value


async def test_a_drain_ends_the_wait_for_a_server(lab, server):
    server.up = False
    with anyio.fail_after(5):
        async with lab.running(teacher, "teacher") as service:
            await lab.until(lambda: _true(service.vitals.retried >= 2))


async def test_a_teacher_of_another_tokenizer_is_refused_without_asking_it(lab, server):
    server.tokenizer_hash = "another"
    await lab.store(lab.group(1))
    async with lab.running(teacher, "teacher"):
        await lab.until(pointed(lab, 1))
    (pointer,) = await pointers(lab)
    assert pointer.stored is None
    assert "tokenizer" in pointer.reason
    assert server.calls == 0


async def test_another_server_in_the_place_of_a_teacher_is_reported(lab, server):
    async with lab.running(teacher, "teacher") as service:
        await lab.until(lambda: _true(server.guard.model == "big"))
        server.guard.report("it serves another model")
        assert service.vitals.problems["other server teacher"] == "it serves another model"
        server.guard.report(None)
        assert "other server teacher" not in service.vitals.problems


async def test_a_second_delivery_points_at_the_same_arrays(lab, server):
    await lab.store(lab.group(1))
    async with lab.running(teacher, "teacher") as service:
        service.bus.acks = False
        await lab.until(pointed(lab, 1))
    lab.bus.advance(31)
    async with lab.running(teacher, "teacher") as service:
        await lab.until(lambda: _true(service.vitals.handled == 1))
    assert len({pointer.stored for pointer in await pointers(lab)}) == 1
    assert (await lab.bus.usage(subjects.TEACHER)).messages == 1


async def test_the_likeliest_tokens_are_stored_with_the_probability_of_all_others(lab, servers):
    servers["teacher"] = TopServer()
    config = RunConfig(
        run="r", teacher=TeacherConfig(enabled=True, top_k=3), flow=FlowConfig(teacher_bytes_per_token=26)
    )
    await lab.store(lab.group(1, samples=2, tokens=4))
    async with lab.running(partial(run_teacher, settings=teacher_settings(config)), "teacher"):
        await lab.until(pointed(lab, 1))
    stored = await arrays(lab, (await pointers(lab))[0])
    ids, logprobs = stored.alternatives()
    assert stored.k == 3
    assert ids.tolist()[:4] == [[-1] * 3, [12, 13, 14], [13, 14, 15], [14, -1, -1]]
    assert logprobs[1, :3] == pytest.approx([-0.7, -1.7, -2.7], abs=2e-3)
    assert np.exp(logprobs[1].astype(float)).sum() == pytest.approx(1, abs=1e-3)
    assert np.exp(logprobs[3, 3]) == pytest.approx(1 - np.exp(-0.7), abs=1e-3)
    assert stored.values()[1:4] == pytest.approx([-0.12, -0.13, -0.14])


async def test_what_branches_begin_with_has_one_answer_that_is_stored_once(lab, servers):
    class Rounding(TopServer):
        """As real ones, it computes the same tokens with other roundings in another request."""

        async def prompt_top_logprobs(self, tokens, k, start=0):
            rounding = 1 + 1e-6 * self.calls
            found = await super().prompt_top_logprobs(tokens, k, start)
            return found._replace(logprobs=(found.logprobs * rounding).astype(np.float32))

    servers["teacher"] = Rounding()
    config = RunConfig(
        run="r", teacher=TeacherConfig(enabled=True, top_k=3), flow=FlowConfig(teacher_bytes_per_token=26)
    )
    group = lab.group(1, samples=3, tokens=100)
    tokens = np.arange(11, 311).reshape(3, 100)
    tokens[0, :60], tokens[1, :80] = tokens[2, :60], tokens[2, :80]
    whole = msgspec.structs.replace(group.sequences, tokens=as_bytes(tokens, "int32"))
    await lab.store(group.replace(sequences=whole))
    async with lab.running(partial(run_teacher, settings=teacher_settings(config)), "teacher"):
        await lab.until(pointed(lab, 1))
    (pointer,) = await pointers(lab)
    data = (await lab.bus.get(subjects.TEACHER, pointer.stored)).data
    raw = msgspec.msgpack.decode(data)
    assert {len(raw[name]) // width for name, width in (("logprobs", 4), ("topk_ids", 12), ("topk_tail", 2))} == {160}
    stored = decode(TeacherLogprobs, data)
    values, (ids, _) = stored.values().reshape(3, 100), stored.alternatives()
    assert values[:, 1:] == pytest.approx(-tokens[:, 1:] / 100, rel=1e-4)
    assert (values[0, :60] == values[2, :60]).all()
    assert (values[1, :80] == values[2, :80]).all()
    assert ids.reshape(3, 100, 3)[:, 1:, 0].tolist() == tokens[:, 1:].tolist()


async def test_a_record_names_the_template_of_the_teachers_own_prompt_and_the_tokens_keep_their_places(lab, servers):
    class Rendering(Server):
        async def tokenize(self, messages, *, chat_template_kwargs=None):
            return {"q": [11], "q: 4": [90, 91]}[messages[-1]["content"]]

    servers["teacher"] = Rendering()
    config = RunConfig(run="r", teacher=TeacherConfig(enabled=True, prompt="{question}: {answer}"))
    await lab.store(lab.group(1, samples=1, task={"answer": 4}))
    await lab.store(lab.group(1, samples=1).replace(id=f"{2:032x}"))
    async with lab.running(partial(run_teacher, settings=teacher_settings(config)), "teacher"):
        await lab.until(pointed(lab, 2))
    found = {pointer.seq: pointer for pointer in await pointers(lab)}
    stored = await arrays(lab, found[1])
    assert stored.values() == pytest.approx([0, -0.12, -0.13, -0.14])
    assert stored.prompt_digest == hashlib.sha256(b"{question}: {answer}").hexdigest()
    assert (found[2].missing, found[2].reason) == (
        [0],
        "sequence 0: teacher.prompt: the task has no 'answer'; it has: none",
    )


async def test_each_environment_has_its_own_teacher(lab, servers):
    servers |= {"teacher": Server(), "teacher-code": Server()}
    servers["teacher-code"].fail = lambda _tokens, answer: answer * 10
    config = RunConfig(
        run="r",
        environments={name: EnvironmentConfig(kind="spell_backward") for name in ("sums", "code")},
        teacher=TeacherConfig(enabled=True, environments={"code": "teacher-code"}),
        inference={"teacher-code": InferenceConfig(model="big/coder")},
    )
    for n, env in enumerate(("sums", "code"), 1):
        await lab.store(lab.group(n, env=env))
    async with lab.running(partial(run_teacher, settings=teacher_settings(config)), "teacher"):
        await lab.until(pointed(lab, 2, "sums", "code"))
    stored = {found.env: found for found in [await arrays(lab, one) for one in await pointers(lab, "sums", "code")]}
    assert stored["sums"].values()[1] == pytest.approx(-0.12)
    assert stored["code"].values()[1] == pytest.approx(-1.3)
    assert [server.calls for server in servers.values()] == [2, 2]


@pytest.fixture
def tokenizers(tmp_path):
    """Two tokenizers in folders: the second has tokens for "the " and for "cat"."""
    made = {}
    for name, phrases in (("student", []), ("teacher", ["the ", "cat"])):
        made[name] = build_character_tokenizer(max_length=64, phrases=phrases)
        made[name].save_pretrained(tmp_path / name)
    return made


def align_config(tmp_path):
    return RunConfig(
        run="r",
        tokenizer=str(tmp_path / "student"),
        inference={"teacher": InferenceConfig(tokenizer=str(tmp_path / "teacher"))},
        teacher=TeacherConfig(enabled=True, tokenizers="align"),
        flow=FlowConfig(teacher_bytes_per_token=12),
    )


def spoken_group(lab, student, texts=("the cat.", "no"), **changes):
    prompt = student.apply_chat_template([{"role": "user", "content": "q"}], return_dict=False)
    said = [[*prompt, *student.encode(text, add_special_tokens=False), student.eos_token_id] for text in texts]
    talk = [[Message(role="user", content="q"), Message(role="assistant", content=text)] for text in texts]
    mask = [t >= len(prompt) for tokens in said for t in range(len(tokens))]
    cuts = np.cumsum([0, *map(len, said)])
    group = lab.group(1, samples=len(texts))
    sequences = msgspec.structs.replace(
        group.sequences,
        offsets=as_bytes(cuts, "int32"),
        tokens=as_bytes([t for tokens in said for t in tokens], "int32"),
        loss_mask=pack_mask(mask),
        logprobs=as_bytes([-1.0 * one for one in mask], "float32"),
    )
    fields = {"sequences": sequences, "messages": talk, "tokenizer_hash": tokenizer_hash(student)}
    return group.replace(**fields | changes), len(prompt), cuts


@pytest.mark.outside  # it imports torch
async def test_a_teacher_of_another_tokenizer_gives_the_logprobs_of_spans(lab, servers, tokenizers, tmp_path):
    server = servers["teacher"] = Server()
    server.tokenizer_hash = tokenizer_hash(tokenizers["teacher"])
    group, start, cuts = spoken_group(lab, tokenizers["student"])
    await lab.store(group)
    async with lab.running(partial(run_teacher, settings=teacher_settings(align_config(tmp_path))), "teacher"):
        await lab.until(pointed(lab, 1))
    (pointer,) = await pointers(lab)
    assert (pointer.missing, pointer.reason) == ([], None)
    stored = await arrays(lab, pointer)
    assert stored.missing == [0, 1], "a reader that knows no spans does without the teacher"
    assert not stored.values().any()
    starts, logprobs = stored.spans()
    assert (starts[: cuts[1]] - start).tolist()[start:] == [0, 0, 0, 0, 4, 4, 4, 7, 8]
    assert (starts[:start] == -1).all()
    vocabulary = tokenizers["teacher"].get_vocab()
    expected = [-vocabulary[token] / 100 for token in ("the ", "cat", ".")]
    assert logprobs[[start, start + 4, start + 7]] == pytest.approx(expected)
    assert not logprobs[[start + 1, start + 5]].any()
    assert server.calls == 2


@pytest.mark.outside  # it imports torch
async def test_the_turns_of_a_conversation_are_one_request_of_a_teacher_with_another_tokenizer(
    lab, servers, tokenizers, tmp_path
):
    server = servers["teacher"] = Server()
    server.tokenizer_hash = None
    student, texts = tokenizers["student"], ["the cat.", "no"]
    talk = [message for text in texts for message in (Message(role="user", content="q"), _said(text))]
    tokens, mask = [], []
    for turn, text in enumerate(texts):
        before = [{"role": one.role, "content": one.content} for one in talk[: 2 * turn + 1]]
        prompt = student.apply_chat_template(before, add_generation_prompt=True, return_dict=False)
        said = [*student.encode(text, add_special_tokens=False), student.eos_token_id]
        mask += [False] * (len(prompt) - len(tokens)) + [True] * len(said)
        tokens = [*prompt, *said]
    group = lab.group(1, samples=1)
    sequences = msgspec.structs.replace(
        group.sequences,
        offsets=as_bytes([0, len(tokens)], "int32"),
        tokens=as_bytes(tokens, "int32"),
        loss_mask=pack_mask(mask),
        logprobs=as_bytes([-1.0 * one for one in mask], "float32"),
    )
    await lab.store(group.replace(sequences=sequences, messages=[talk], tokenizer_hash=tokenizer_hash(student)))
    async with lab.running(partial(run_teacher, settings=teacher_settings(align_config(tmp_path))), "teacher"):
        await lab.until(pointed(lab, 1))
    (pointer,) = await pointers(lab)
    assert (pointer.missing, pointer.reason, server.calls) == ([], None, 1)
    starts, logprobs = (await arrays(lab, pointer)).spans()
    vocabulary = tokenizers["teacher"].get_vocab()
    first, second = np.flatnonzero(mask)[[0, -len("no") - 1]]
    assert logprobs[first] == pytest.approx(-vocabulary["the "] / 100)
    assert logprobs[second : second + 2] == pytest.approx([-vocabulary[letter] / 100 for letter in "no"])
    assert (starts[np.array(mask)] >= 0).all()


def _said(text):
    return Message(role="assistant", content=text)


@pytest.mark.outside  # it imports torch
async def test_a_sequence_that_cannot_be_rendered_leaves_the_others(lab, servers, tokenizers, tmp_path):
    servers["teacher"] = server = Server()
    server.tokenizer_hash = None
    group, start, cuts = spoken_group(lab, tokenizers["student"])
    await lab.store(group.replace(messages=[group.messages[0], []]))
    async with lab.running(partial(run_teacher, settings=teacher_settings(align_config(tmp_path))), "teacher"):
        await lab.until(pointed(lab, 1))
    (pointer,) = await pointers(lab)
    assert pointer.missing == [1]
    assert "sequence 1: 1 sampled turns" in pointer.reason
    starts, _ = (await arrays(lab, pointer)).spans()
    assert (starts[start : cuts[1]] >= 0).all()
    assert (starts[cuts[1] :] == -1).all()


@pytest.mark.outside  # it imports torch
async def test_a_group_of_a_third_tokenizer_is_refused(lab, servers, tokenizers, tmp_path):
    servers["teacher"] = server = Server()
    server.tokenizer_hash = None
    group, _, _ = spoken_group(lab, tokenizers["student"], tokenizer_hash="third")
    await lab.store(group)
    async with lab.running(partial(run_teacher, settings=teacher_settings(align_config(tmp_path))), "teacher"):
        await lab.until(pointed(lab, 1))
    (pointer,) = await pointers(lab)
    assert pointer.stored is None
    assert "to be aligned" in pointer.reason


@pytest.mark.outside  # it imports torch
async def test_a_tokenizer_that_is_not_the_servers_ends_the_stage(lab, servers, tokenizers, tmp_path):
    servers["teacher"] = server = Server()
    server.tokenizer_hash = tokenizer_hash(tokenizers["student"])
    with pytest.raises(ExceptionGroup) as caught:
        async with lab.running(partial(run_teacher, settings=teacher_settings(align_config(tmp_path))), "teacher"):
            await lab.until(pointed(lab, 1))
    assert caught.group_contains(ConfigError, match=r"inference.teacher: its server has tokenizer")
