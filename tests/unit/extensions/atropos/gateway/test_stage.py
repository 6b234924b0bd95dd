"""The gateway on a bus in memory: what clients are answered, what is stored, and what a kill leaves."""

import gzip
import json
from functools import partial

import anyio
import msgspec
import pytest

from lachesis.pipeline.errors import FencedError, StartupError
from lachesis.pipeline.extensions.atropos.gateway.config import GatewayConfig
from lachesis.pipeline.extensions.atropos.gateway.stage import _silence_text
from lachesis.pipeline.telemetry.config import TelemetryConfig
from lachesis.pipeline.telemetry.spans import SpanLink, generate_id, root_id
from lachesis.pipeline.telemetry.tracing import Tracing
from lachesis.schemas import keys, rollout, subjects
from lachesis.schemas.codec import encode
from lachesis.schemas.control import Heartbeat, PolicyRecord, StageVitals
from lachesis.schemas.errors import ConfigError

pytestmark = pytest.mark.outside


async def outstanding(world, sequences):
    """Say, as the governor, how much is outstanding."""
    beat = Heartbeat(
        host="h", schema_version=1, run="r", service="governor", instance="i", pid=1, time_ns=1, stage=StageVitals(),
        metrics={"flow/outstanding": float(sequences)},
    )  # fmt: skip
    await world.bus.broadcast(subjects.heartbeat("r", "governor", "i"), encode(beat))


async def test_an_environments_life(world, make_scored, as_gzip):
    async with world.gateway() as http:
        assert (await http.get("/")).json() == {"message": "AtroposLib API"}
        assert (await http.get("/wandb_info")).json() == {"group": "r", "project": "r"}
        assert (await http.get("/info")).json() == {"batch_size": 8, "max_token_len": 64}
        empty = (await http.get("/latest_example")).json()
        assert len(empty) == 9
        assert not any(empty.values())
        body = {"max_token_length": "64", "desired_name": "words", "weight": 1, "group_size": 4}
        answer = (await http.post("/register-env", json={**body, "min_batch_allocation": None})).json()
        assert set(answer) == {
            "status", "env_id", "wandb_name", "checkpoint_dir", "starting_step", "checkpoint_interval", "num_steps",
        }  # fmt: skip
        assert (answer["status"], answer["env_id"], answer["wandb_name"]) == ("success", 0, "words_0")
        assert (await http.request("GET", "/status-env", json={"env_id": 0})).json() == {
            "current_step": 0, "queue_size": 0, "unallocated_fraction": 1.0, "self_queue_size": 0, "max_group_size": 4,
            "env_weight": 1.0,
        }  # fmt: skip
        sent = make_scored(env_id=0)
        assert (await http.post("/scored_data", **as_gzip(sent))).json() == {"status": "received"}
        (group,) = await world.groups()
        assert [s.tokens.tolist() for s in group.sequences] == sent["tokens"]
        assert group.lease == "lease-1"
        assert (world.governor.granted[0].sequences, world.governor.granted[0].env) == (4, "words")
        latest = (await http.get("/latest_example")).json()
        assert latest["tokens"] == sent["tokens"]
        assert len(latest) == 14
        assert (await http.post("/disconnect-env", json={"env_id": 0})).json() == {"status": "success"}
        failed = (await http.post("/disconnect-env", json={"env_id": 9})).json()
        assert failed["status"] == "failure"
        assert "9" in failed["error"]


async def test_texts_are_packed_once_however_often_their_group_is_encoded(world, make_scored, monkeypatch):
    packed = []

    def deflate(data):
        packed.append(len(data))
        return real(data)

    real = rollout.deflate
    monkeypatch.setattr(rollout, "deflate", deflate)
    talk = [{"role": "user", "content": "say it again " * 100}]
    async with world.gateway() as http:
        env_id = await world.registered(http)
        whole, *halves = (
            make_scored(n, seed=seed, env_id=env_id, messages=[talk] * n) for seed, n in enumerate((4, 2, 2))
        )
        assert (await http.post("/scored_data", json=whole)).json() == {"status": "received"}
        assert len(packed) == 1
        for half in halves:
            assert (await http.post("/scored_data", json=half)).json()["status"] == "buffered"
        assert len(packed) == 3
    assert [group.messages[-1][0].content for group in await world.groups()] == [talk[0]["content"]] * 3


async def test_a_whole_group_of_which_a_sample_is_too_long_is_stored_at_once_and_says_so(world, make_scored):
    async with world.gateway() as http:
        data = make_scored(4, env_id=await world.registered(http))
        for name, value in (("tokens", 7), ("masks", 7), ("inference_logprobs", -1.0)):
            data[name][2] = [value] * 65
        assert (await http.post("/scored_data", json=data)).json() == {"status": "received"}
        assert "1 samples were left out" in world.service.vitals.problems["words failed samples"]
    (group,) = await world.groups()
    assert group.sequences.n_samples == 3


async def test_an_environment_waits_for_the_first_policy(new_run, make_scored):
    world = new_run
    async with world.gateway() as http:
        body = {"max_token_length": 64, "desired_name": "words", "weight": 1.0, "group_size": 4}
        assert (await http.post("/register-env", json=body)).json() == {"status": "wait for trainer to start"}
        assert (await http.get("/wandb_info")).json() == {"group": None, "project": None}
        assert (await http.get("/status")).json() == {"current_step": 0, "queue_size": 0}
        early = await http.post("/scored_data", json=make_scored())
        assert early.status_code == 503
        assert int(early.headers["Retry-After"]) > 0
        await world.policy(3)
        await world.registered(http)
        assert (await http.post("/scored_data", json=make_scored())).json() == {"status": "received"}
        assert (await http.get("/status")).json()["current_step"] == 3


async def test_a_bad_group_is_refused_with_its_reason_and_nothing_else_happens(world, make_scored):
    async with world.gateway() as http:
        number = await world.registered(http)
        bad = json.dumps(make_scored(env_id=number, scores=[float("nan")] * 4))
        answer = await http.post("/scored_data", content=bad)
        assert answer.status_code == 422
        assert "NaN" in answer.json()["detail"][0]["msg"]
        listed = await http.post("/scored_data_list", json=[make_scored(), make_scored(inference_logprobs=None)])
        assert listed.status_code == 422
        assert await world.groups() == []
        assert (await http.post("/scored_data", json=make_scored(16))).status_code == 422
        assert (await http.post("/scored_data", json=make_scored(env_id=number))).json() == {"status": "received"}
        too_large = {"max_token_length": 64, "desired_name": "words", "weight": 1.0, "group_size": 9}
        assert (await http.post("/register-env", json=too_large)).status_code == 422
        unknown = await http.post("/register-env", json=too_large | {"group_size": 4, "desired_name": "others"})
        assert "environments.others" in unknown.json()["detail"][0]["msg"]
        assert (await http.request("GET", "/status-env", json={"env_id": 77})).status_code == 404
        assert world.service.vitals.state == "ok"


async def test_bodies_are_bounded_and_a_broken_one_is_400(world, make_scored, as_gzip):
    async with world.gateway(world.config(body_bytes=20_000)) as http:
        bomb = as_gzip({"tokens": "0" * 30_000_000})
        assert len(bomb["content"]) < 40_000
        for request in (bomb, {"content": b"x" * 20_001}, as_gzip("0" * 20_001)):
            answer = await http.post("/scored_data", **request)
            assert answer.status_code == 422
            assert "body_bytes" in answer.json()["detail"][0]["msg"]
        good = as_gzip(make_scored())
        for content in (b"no gzip", good["content"][:-4], good["content"] + b"x"):
            answer = await http.post("/scored_data", **good | {"content": content})
            assert (answer.status_code, answer.text) == (400, "Invalid gzip payload")
        assert (await http.post("/scored_data", **good)).status_code == 200


async def test_groups_of_odd_sizes_wait_until_some_make_up_the_size(world, make_scored):
    async with world.gateway() as http:
        number = await world.registered(http, group_size=8)

        async def post(n, seed):
            return (await http.post("/scored_data", json=make_scored(n, seed=seed, env_id=number))).json()

        assert await post(5, 1) == {"status": "buffered", "buffer_size": 5}
        assert await post(2, 2) == {"status": "buffered", "buffer_size": 7}
        assert await world.groups() == []
        status = (await http.get(f"/status-env?env_id={number}")).json()
        assert status["self_queue_size"] == 0  # 7 sequences are no group yet
        assert await post(3, 3) == {"status": "buffered", "buffer_size": 2}
        assert [len(group.sequences) for group in await world.groups()] == [5, 3]  # as they came, not merged
        assert [request.sequences for request in world.governor.granted] == [8]
        assert [group.lease for group in await world.groups()] == [None, "lease-1"]
        assert await post(8, 4) == {"status": "received"}
        listed = [make_scored(3, seed=5, env_id=number), make_scored(8, seed=6, env_id=number)]
        assert (await http.post("/scored_data_list", json=listed)).json() == {
            "status": "received", "groups_processed": 2, "buffered": 1, "last_buffer_size": 5,
        }  # fmt: skip
        assert (await http.post("/disconnect-env", json={"env_id": number})).json() == {"status": "success"}
        assert [len(group.sequences) for group in await world.groups()] == [5, 3, 8, 8, 2, 3]
        counters = [group.counter for group in await world.groups()]
        assert len(set(counters)) == 6


async def test_what_finds_no_room_in_the_buffer_is_published_as_it_is(world, make_scored):
    async with world.gateway(world.config(buffer_bytes=0)) as http:
        number = await world.registered(http)
        answer = await http.post("/scored_data", json=make_scored(3, env_id=number))
        assert answer.json() == {"status": "received"}
        assert len(await world.groups()) == 1


async def test_a_kill_loses_nothing_that_was_acknowledged(world, make_scored):
    async with world.gateway() as http:
        number = await world.registered(http)
        assert (await http.post("/scored_data", json=make_scored(4, seed=1, env_id=number))).status_code == 200
        buffered = (await http.post("/scored_data", json=make_scored(3, seed=2, env_id=number))).json()
        assert buffered == {"status": "buffered", "buffer_size": 3}
        world.service.kill()
    async with world.gateway() as http:
        status = await http.request("GET", "/status-env", json={"env_id": number})  # the client knows its id still
        assert status.status_code == 200
        again = await http.post("/scored_data", json=make_scored(4, seed=1, env_id=number))  # no answer had come
        assert again.json() == {"status": "received"}
        again = await http.post("/scored_data", json=make_scored(3, seed=2, env_id=number))
        assert again.json() == {"status": "buffered", "buffer_size": 3}
        done = await http.post("/scored_data", json=make_scored(1, seed=3, env_id=number))
        assert done.json() == {"status": "buffered", "buffer_size": 0}
        assert [len(group.sequences) for group in await world.groups()] == [4, 3, 1]
        assert await world.registered(http) == number + 1


@pytest.mark.parametrize("call", range(1, 9))
async def test_a_kill_at_any_write_of_a_completion_stores_each_group_once(world, make_scored, call):
    """The process dies before its `call`-th write; its client sends again what was not answered."""
    sent = [(2, 1), (2, 2)]
    async with world.gateway() as http:
        number = await world.registered(http)
        bus, writes, patience = world.service.bus, 0, anyio.CancelScope()

        def dying(name):
            real = getattr(bus, name)

            async def write(*args, **kwargs):
                nonlocal writes
                writes += 1
                if writes == call:
                    world.service.kill()
                    patience.cancel()  # a client that waits for its answer waits in vain
                return await real(*args, **kwargs)

            return write

        bus.put, bus.publish_large = dying("put"), dying("publish_large")
        answered = 0
        with patience:
            for n, seed in sent:
                try:
                    answer = await http.post("/scored_data", json=make_scored(n, seed=seed, env_id=number))
                except Exception:  # noqa: BLE001 - whatever its death looks like from outside
                    break
                if answer.status_code != 200:
                    break
                answered += 1
        if world.service.bus.dead:
            world.governor.granted.clear()
        else:
            world.service.kill()
    async with world.gateway() as http:
        for n, seed in sent[answered:]:
            answer = await http.post("/scored_data", json=make_scored(n, seed=seed, env_id=number))
            assert answer.json()["status"] == "buffered"
        assert (await http.post("/disconnect-env", json={"env_id": number})).json() == {"status": "success"}
        firsts = [next(iter(group.sequences)).tokens[0] for group in await world.groups()]
        assert sorted(firsts) == [101, 102]


async def test_a_group_that_the_broker_forgot_is_known_to_the_next_gateway(world, make_scored):
    async with world.gateway() as http:
        number = await world.registered(http)
        for n, seed in ((4, 1), (2, 2), (2, 3)):
            await http.post("/scored_data", json=make_scored(n, seed=seed, env_id=number))
        assert len(await world.groups()) == 3
    async with world.gateway() as http:
        publish = world.service.bus.publish_large

        async def forgetful(*args, msg_id, **kwargs):
            return await publish(*args, msg_id=f"{msg_id}.later", **kwargs)  # as after the duplicate window

        world.service.bus.publish_large = forgetful
        for n, seed in ((4, 1), (2, 2), (2, 3)):
            answer = await http.post("/scored_data", json=make_scored(n, seed=seed, env_id=number))
            assert answer.json() == {"status": "received"}
        assert (await http.post("/disconnect-env", json={"env_id": number})).json() == {"status": "success"}
        assert len(await world.groups()) == 3
        await http.post("/scored_data", json=make_scored(seed=4, env_id=number))
        assert len(await world.groups()) == 4


async def test_a_group_is_held_until_the_governor_grants_a_lease(world, make_scored):
    world.governor.open = False
    answers = []

    async def post(http, seed):
        answers.append(await http.post("/scored_data", json=make_scored(seed=seed)))

    async with world.gateway() as http:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post, http, 1)
            tasks.start_soon(post, http, 1)  # the same again, as by a client that lost patience
            await world.until(lambda: world.governor.refusals > 3)
            assert answers == []
            assert (await http.get("/status")).json()["queue_size"] == 8
            world.governor.open = True
        assert [answer.json() for answer in answers] == [{"status": "received"}] * 2
        assert len(await world.groups()) == 1


async def test_past_the_deadline_it_says_when_to_come_again_and_takes_it_then(world, make_scored):
    world.governor.open = False
    async with world.gateway(world.config(hold_s=0.1)) as http:
        answer = await http.post("/scored_data", json=make_scored())
        assert answer.status_code == 503
        assert int(answer.headers["Retry-After"]) > 0
        assert "no lease" in answer.json()["detail"][0]["msg"]
        assert await world.groups() == []
        world.governor.open = True
        assert (await http.post("/scored_data", json=make_scored())).status_code == 200


async def test_one_environments_flood_is_bounded_and_leaves_the_others_their_part(world, make_scored):
    world.governor.open = False
    config = world.config("words", "sums", held_bytes=4096)
    codes = []
    async with world.gateway(config) as http:
        words = await world.registered(http, "words")
        sums = await world.registered(http, "sums")

        async def post(env_id, seed):
            codes.append(
                (env_id, (await http.post("/scored_data", json=make_scored(seed=seed, env_id=env_id))).status_code)
            )

        async with anyio.create_task_group() as tasks:
            for seed in range(20):
                tasks.start_soon(post, words, seed)
            await world.until(lambda: (words, 503) in codes)
            refused = len(codes)
            tasks.start_soon(post, sums, 0)
            await world.until(lambda: world.service.vitals.metrics["gateway/held_sequences"] > 0)
            assert len(codes) >= refused
            await world.until(lambda: len(codes) + world.service.vitals.in_flight == 21)
            world.governor.open = True
        assert (sums, 200) in codes
        assert 0 < codes.count((words, 200)) < 20
        assert len(await world.groups("words")) == codes.count((words, 200))


async def test_what_is_held_of_a_halted_environment_holds_up_no_other(world, make_scored):
    """It would wait for ever for a queue that is never emptied."""
    world.governor.closed = {"words"}
    async with world.gateway(world.config("words", "sums")) as http:
        words = await world.registered(http, "words")
        sums = await world.registered(http, "sums")
        await outstanding(world, 0)

        async def queued(env_id):
            return (await http.get("/status-env", params={"env_id": env_id})).json()["queue_size"]

        async with anyio.create_task_group() as tasks:
            for seed in range(5):
                tasks.start_soon(partial(http.post, "/scored_data", json=make_scored(seed=seed, env_id=words)))
            await world.until(lambda: world.service.vitals.in_flight == 5 and world.governor.refusals > 5)
            assert (await queued(words), await queued(sums)) == (5, 0)
            assert (await http.get("/status")).json()["queue_size"] == 0
            world.governor.closed = set()
        assert len(await world.groups("words")) == 5


async def test_a_repeat_is_answered_as_before_and_stored_once(world, make_scored):
    async with world.gateway() as http:
        for _ in range(3):
            assert (await http.post("/scored_data", json=make_scored())).json() == {"status": "received"}
        twice = [make_scored(seed=9), make_scored(seed=9)]  # alike, but in one list, so there are two
        assert (await http.post("/scored_data_list", json=twice)).json()["groups_processed"] == 2
        assert len(await world.groups()) == 3
        await world.until(lambda: world.service.vitals.metrics["gateway/duplicates"] == 2)


async def test_environments_throttle_by_all_that_is_not_trained_yet(world):
    async with world.gateway() as http:
        number = await world.registered(http)
        await world.policy(7)

        async def shown():
            await outstanding(world, 24)
            status = (await http.request("GET", "/status-env", json={"env_id": number})).json()
            return (status["queue_size"], status["current_step"]) == (6, 7)

        await world.lab.until(shown)


async def test_an_environment_is_never_told_of_enough_for_the_last_step_before_it_is_taken(world):
    """It ends by itself then; and what waits may be cancelled, or be of no use."""
    config = world.config("words")
    config = msgspec.structs.replace(config, training=msgspec.structs.replace(config.training, steps=8))
    batch = config.batching.batch_size
    async with world.gateway(config) as http:
        number = await world.registered(http)
        await world.policy(7)

        async def status():
            await outstanding(world, 10 * batch)
            return (await http.request("GET", "/status-env", json={"env_id": number})).json()

        async def shown():
            found = await status()
            return found["current_step"] == 7 and found["queue_size"] > 0

        await world.lab.until(shown)
        assert (await status())["queue_size"] * 4 < batch, "a group has 4 samples"
        await world.policy(8)

        async def counted():
            return (await status())["queue_size"] * 4 == 10 * batch

        await world.lab.until(counted)


def test_environments_that_have_gone_are_named_as_such():
    assert _silence_text(["a"], ["a"], 1, "URL").startswith("the run's only environment, a, has gone: nothing is heard")
    assert _silence_text(["a"], ["a"], 2, "URL").startswith("a has gone: nothing is heard")
    assert _silence_text(["a"], [], 1, "URL") == (
        "nothing is heard of a: is it running? Start it with --env.rollout_server_url URL"
    )


async def test_a_foreign_group_is_of_the_policy_that_was_newest_when_it_was_generated(world, make_scored):
    async with world.gateway(world.config(generation_s=3600.0)) as http:
        await world.policy(1, written_ns=2)
        number = await world.registered(http)
        await world.policy(2, written_ns=1 << 62)

        async def newest():
            return (await http.get("/status")).json()["current_step"] == 2

        await world.lab.until(newest)
        await http.post("/scored_data", json=make_scored(env_id=number))
        (group,) = await world.groups()
        assert group.policy_versions == ["1-a-b"]


async def test_nobody_without_the_token_is_answered(world, make_scored, tmp_path):
    (tmp_path / "token").write_text("secret\n")
    async with world.gateway(world.config(needs_token=True, token_file=str(tmp_path / "token"))) as http:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic !"},
            {"Authorization": "secret"},
        ):
            answer = await http.post("/scored_data", json=make_scored(), headers=headers)
            assert answer.status_code == 401
        assert (await http.get("/reset_data")).status_code == 401
        await world.until(lambda: "token" in world.service.vitals.problems)
        said = world.service.vitals.problems["token"]
        assert said.startswith("5 requests came without the gateway's token, or with another, and were refused")
        assert "secret" not in said + world.service.vitals.problem_details["token"].mend
        bearer = await http.get("/info", headers={"Authorization": "Bearer secret"})
        basic = await http.get("/info", auth=("any", "secret"))  # what http://any:secret@host in a URL becomes
        assert bearer.status_code == basic.status_code == 200


async def test_by_default_a_token_is_made_once_and_stands_in_a_url_that_its_owner_alone_can_read(world, tmp_path):
    config = msgspec.structs.replace(world.config(), folder=str(tmp_path), gateway=GatewayConfig(port=0))
    urls = []
    for _ in range(2):
        async with world.gateway(config) as http:
            assert (await http.get("/info")).status_code == 401
            url = (tmp_path / "gateway.url").read_text().strip()
            assert (await http.get(f"{url}/info")).status_code == 200
            urls.append(url.rpartition(":")[0])
    assert urls[0] == urls[1]
    for name in ("gateway.url", "gateway.token"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


async def test_no_page_gets_in_by_a_name_that_leads_here(world):
    async with world.gateway() as http:
        port = http.base_url.port
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "[", ""):
            assert (await http.get("/reset_data", headers={"Host": host})).status_code == 403
        for host in ("localhost", f"localhost:{port}", "LOCALHOST", f"[::1]:{port}", "127.0.0.9"):
            assert (await http.get("/info", headers={"Host": host})).status_code == 200


async def test_no_web_page_gets_in(world):
    async with world.gateway() as http:
        for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            answer = await http.get("/reset_data", headers=headers)
            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers


async def test_a_reset_forgets_environments_and_buffers_but_no_history(world, make_scored):
    async with world.gateway() as http:
        number = await world.registered(http)
        await http.post("/scored_data", json=make_scored(4, env_id=number))
        await http.post("/scored_data", json=make_scored(1, env_id=number))
        assert (await http.get("/reset_data")).text == "Reset successful"
        assert (await http.get(f"/status-env?env_id={number}")).status_code == 404
        assert (await http.get("/status")).json()["queue_size"] == 0
        assert len(await world.groups()) == 1
        await world.registered(http)


async def test_the_trainers_side_says_that_the_run_has_a_trainer(world):
    async with world.gateway() as http:
        for answer in (await http.get("/batch"), await http.post("/register", json={})):
            assert answer.status_code == 501
            assert 'mode = "observe"' in answer.json()["detail"][0]["msg"]


async def test_a_second_gateway_ends_the_first(world):
    with pytest.raises(FencedError):  # noqa: PT012
        async with world.gateway() as first:
            async with world.gateway() as second:
                await world.registered(second)
                body = {"max_token_length": 64, "desired_name": "words", "weight": 1.0, "group_size": 4}
                assert (await first.post("/register-env", json=body)).status_code == 503
                await world.registered(second)
            await anyio.sleep(40)


async def test_it_refuses_to_listen_to_everybody_or_where_somebody_does(world):
    with pytest.raises(ConfigError, match="needs_token"):
        GatewayConfig(host="0.0.0.0", needs_token=False)  # noqa: S104
    async with world.gateway() as http:
        with pytest.raises(StartupError):
            async with world.gateway(world.config(port=http.base_url.port)):
                pass


class Kept:
    """A sink that keeps what it gets."""

    traces, dropped, problem = True, 0, None

    def __init__(self) -> None:
        self.spans = []

    def emit(self, spans):
        self.spans += spans

    def observe(self, figures):
        pass


async def test_a_group_leaves_the_spans_of_a_rollout_linked_to_its_callers(world, make_scored):
    sink = Kept()
    caller = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    async with world.gateway(world.config(generation_s=2.0)) as http:
        world.service.tracing = Tracing(TelemetryConfig(ratio=1.0), sink)
        world.governor.open = False
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(http.post, "/scored_data", json=make_scored(), headers={"traceparent": caller}))
            await world.until(lambda: world.governor.refusals >= 2)
            world.governor.open = True
        await http.post("/scored_data", json=make_scored())  # a repeat is stored, and traced, once
        await http.post("/scored_data", json=make_scored(seed=1), headers={"traceparent": "ff-nonsense"})
    first, second = await world.groups()
    spans = {span.name: span for span in sink.spans if span.trace == first.id}
    assert spans.keys() == {"generate", "hold", "publish rl.rollout.{run}.{env}"}
    generated, held, published = spans["generate"], spans["hold"], spans["publish rl.rollout.{run}.{env}"]
    assert (generated.service, generated.parent, generated.id) == (
        "environment", root_id(first.id), generate_id(first.id)
    )  # fmt: skip
    assert generated.links == [SpanLink("a" * 32, "b" * 16)]
    assert (held.parent, published.parent) == (root_id(first.id), generated.id)
    assert generated.end_ns - generated.start_ns == 2_000_000_000
    assert generated.end_ns == held.start_ns
    assert held.end_ns == published.start_ns
    assert held.end_ns > held.start_ns
    assert published.attributes["messaging.message.id"] == "ROLLOUTS:1"
    assert sum(span.name == "generate" for span in sink.spans) == 2
    assert not any(span.links for span in sink.spans if span.trace == second.id)


async def test_what_environments_ask_for_is_counted(world, make_scored, as_gzip):
    async with world.gateway() as http:
        await world.registered(http)
        whole = as_gzip(make_scored())
        assert (await http.post("/scored_data", **whole)).status_code == 200
        assert (await http.post("/scored_data", json=make_scored(tokens=[]))).status_code == 422
        await http.get("/info")  # a request by any client
        await world.until(lambda: world.service.tracing.figures().get("api_perf/http/total_requests") == 3)
        figures = world.service.tracing.figures()
    assert figures["api_perf/http/failed_requests"] == 1
    assert figures["api_perf/http/error_rate"] == pytest.approx(1 / 3)
    assert figures["api_perf/http/latency_p99_ms"] >= figures["api_perf/http/latency_p50_ms"] > 0
    plain = len(gzip.decompress(whole["content"]))
    assert figures["api_perf/http/mean_compression_ratio"] == pytest.approx(plain / len(whole["content"]))
    assert figures["api_perf/total_items"] == 4  # sequences stored


async def test_what_the_trainer_cannot_use_is_refused_and_not_stored(world, make_scored):
    """Seen: acknowledged, stored, and the whole batch that it came into was void."""
    record = PolicyRecord(run="r", version="0-a-b", weights="w", tokenizer_hash="tok", written_ns=1, vocabulary=100)
    await world.bus.put(keys.POLICY, encode(record))
    async with world.gateway() as http:
        for changes, text in (
            ({}, "token id 100 in sequence 0 is none of the 100"),
            ({"turn_rewards": [[1.0, 0.0]] * 4}, "turn_rewards: 2 for sample 0"),
            ({"images": ["x"]}, "images: not taken by the gateway"),
        ):
            answer = await http.post("/scored_data", json=make_scored(**changes))
            assert answer.status_code == 422
            assert text in answer.text
    assert not await world.groups()


async def test_what_is_sent_and_changes_nothing_is_named_once(world, make_scored, caplog):
    """The run's trainer computes reference logprobs itself, and reads a teacher's only with a weight for them."""
    async with world.gateway() as http:
        for _ in range(2):
            data = make_scored(ref_logprobs=[[0.0] * 6] * 4)
            ids = [[[token] for token in tokens] for tokens in data["tokens"]]
            data |= {"distill_token_ids": ids, "distill_logprobs": [[[-1.0]] * 6] * 4}
            answer = await http.post("/scored_data", json=data)
            assert answer.status_code == 200, answer.text
    said = [record.getMessage() for record in caplog.records if "environment words: its" in record.getMessage()]
    first, second = said
    assert first == "environment words: its ref_logprobs are ignored: the trainer computes them"
    assert "its distill_logprobs are stored and change nothing: training.learner.loss.teacher_coef is 0" in second


async def test_environments_that_nobody_has_started_are_named_with_the_way_to_start_them(world, monkeypatch):
    monkeypatch.setattr("lachesis.pipeline.extensions.atropos.gateway.logic.silence._START_S", 0.05)
    monkeypatch.setattr("lachesis.pipeline.extensions.atropos.gateway.stage._FIGURES_S", 0.01)
    async with world.gateway() as http:
        vitals = world.service.vitals
        await world.until(lambda: vitals.state == "waiting")
        assert vitals.waits_for.startswith("nothing is heard of words: is it running? Start it with")
        assert "--env.rollout_server_url" in vitals.waits_for
        number = await world.registered(http)
        await world.until(lambda: vitals.state == "ok")
        assert vitals.waits_for is None
        monkeypatch.setattr("lachesis.pipeline.extensions.atropos.gateway.logic.silence._UNKNOWN_S", 0.05)
        await world.until(lambda: vitals.state == "waiting")
        monkeypatch.setattr("lachesis.pipeline.extensions.atropos.gateway.logic.silence._UNKNOWN_S", 120.0)
        assert (await http.get("/status-env", params={"env_id": number})).status_code == 200
        await world.until(lambda: vitals.state == "ok")
