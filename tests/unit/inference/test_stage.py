"""The inference service: when it registers, which weights it serves, how it ends. A real server on a free port."""

import socket

import anyio
import httpx
import msgspec
import pytest
import torch
from stages import run_inference

from lachesis.pipeline.config.run import InferenceConfig, RunConfig
from lachesis.pipeline.config.servers import key_path, sampling_key
from lachesis.pipeline.errors import AccessError, InfrastructureError, StartupError
from lachesis.pipeline.inference.directory import InferenceDirectory, control_token, open_role, register
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy
from lachesis.pipeline.model.tensors import policy_tensors, policy_version, rounded
from lachesis.pipeline.model.weight_files import write_weights
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.weights.config import WeightsConfig
from lachesis.pipeline.weights.download import FETCHED
from lachesis.pipeline.weights.upload import WeightsUploader
from lachesis.schemas import keys
from lachesis.schemas.codec import encode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.errors import ConfigError

EVERYWHERE = "0.0.0.0"  # noqa: S104 - what is tested


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    policy = build_tiny_policy(0, width=16, layers=1, heads=2, max_length=32)
    save_policy(policy, folder)
    return folder


@pytest.fixture(scope="module")
def policies():
    """Policies to publish, made before a server loads: transformers makes models one at a time in a process."""
    return [build_tiny_policy(step + 1, width=16, layers=1, heads=2, max_length=32) for step in range(4)]


@pytest.fixture
def config(tmp_path, model):
    return RunConfig(run="r", folder=str(tmp_path), model=str(model))


async def publish(lab, config, policies, step, *, pruned=False):
    """Publish new weights and return their version."""
    policy = policies[step]
    tensors = policy_tensors(policy.model)
    version = policy_version(step, "a", tensors)
    path = write_weights(tensors, config.path / "weights", version)
    if pruned:
        path.unlink()
    record = PolicyRecord(
        run="r", version=str(version), weights=str(path), tokenizer_hash=policy.tokenizer_hash, written_ns=1
    )
    await lab.bus.put(keys.POLICY, encode(record))
    return str(version)


async def registered(lab, role):
    entry = await lab.bus.value(keys.inference(role))
    return entry.value.decode() if entry else None


def is_registered(lab, role):
    async def condition():
        return await registered(lab, role) is not None

    return condition


def serving(directory, version):
    async def condition():
        return await (await directory.current()).weight_version() == version

    return condition


async def test_the_policys_server_registers_only_once_it_holds_a_published_version(lab, config, policies):
    main = lambda service: run_inference(service, config, "policy")  # noqa: E731
    async with lab.running(main, "inference") as service:
        await anyio.sleep(1.0)
        assert await registered(lab, "policy") is None
        assert service.vitals.state == "starting"
        version = await publish(lab, config, policies, 0)
        async with open_role(lab.bus, "r", "policy") as directory:
            client = await directory.current()  # a client that finds it finds it with these weights
            assert await client.weight_version() == version
            (sample,) = await client.generate([1, 20, 30], 1, SamplingParams(max_tokens=3))
            assert {span.version for span in sample.weight_versions} == {version}
            newer = await publish(lab, config, policies, 1)
            await lab.until(serving(directory, newer))
        await lab.until(lambda: _true(service.vitals.state == "ok"))


async def _true(value):
    return value


async def test_off_loopback_a_key_is_made_that_samples_need_and_weights_follow_as_ever(lab, config, policies):
    config = msgspec.structs.replace(config, inference={"policy": InferenceConfig(host=EVERYWHERE)})
    await publish(lab, config, policies, 0)
    main = lambda service: run_inference(service, config, "policy")  # noqa: E731
    async with lab.running(main, "inference"):
        await lab.until(is_registered(lab, "policy"), seconds=20)
        async with open_role(lab.bus, "r", "policy") as directory:
            with pytest.raises(AccessError, match=r"inference/ROLE\.key"):
                await (await directory.current()).probe()
        async with open_role(lab.bus, "r", "policy", key=sampling_key(config, "policy")) as directory:
            client = await directory.current()
            assert len(await client.generate([1, 20, 30], 2, SamplingParams(max_tokens=3))) == 2
            newer = await publish(lab, config, policies, 1)
            await lab.until(serving(directory, newer))
            with pytest.raises(AccessError, match="state"):
                await client.resume()
    path = key_path(config, "policy")
    assert (path, path.stat().st_mode & 0o777) == (config.path / "inference" / "policy.key", 0o600)
    assert path.read_text().strip() != control_token(config.path, "policy")


def test_a_key_is_wanted_off_loopback_or_where_one_is_given(tmp_path):
    (tmp_path / "key").write_text("given\n")

    def key(**settings):
        settings = InferenceConfig(**settings)
        return sampling_key(RunConfig(run="r", folder=str(tmp_path), inference={"policy": settings}), "policy")

    given = str(tmp_path / "key")
    assert key() is None
    assert key(host="localhost") is None
    assert key(url="http://elsewhere") is None
    assert key(key_file=given) == key(url="http://elsewhere", key_file=given) == key(host=EVERYWHERE, key_file=given)
    assert key(key_file=given) == "given"
    assert key(host="10.0.0.7") == key(host=EVERYWHERE) == (tmp_path / "inference" / "policy.key").read_text().strip()
    with pytest.raises(StartupError, match=r"inference\.policy\.key_file .*nowhere"):
        key(key_file=str(tmp_path / "nowhere"))
    for text in ("", "two words", "gr\u00fcn", "a\nb"):
        (tmp_path / "key").write_text(text)
        with pytest.raises(StartupError, match=r"inference\.policy\.key_file .*/key (is empty|must hold one word)"):
            key(key_file=given)


async def test_a_pruned_weights_file_is_passed_over(lab, config, policies):
    await publish(lab, config, policies, 0, pruned=True)
    main = lambda service: run_inference(service, config, "policy")  # noqa: E731
    async with lab.running(main, "inference") as service:
        await lab.until(lambda: _true(lab.said(service) != ""), seconds=20)
        assert await registered(lab, "policy") is None
        version = await publish(lab, config, policies, 1)
        await lab.until(is_registered(lab, "policy"))
        async with open_role(lab.bus, "r", "policy") as directory:
            assert await serving(directory, version)()
            await publish(lab, config, policies, 2, pruned=True)
            await lab.until(lambda: _true("refused" in lab.said(service)))
            assert await serving(directory, version)()  # it goes on with what it has, under its own name


async def test_a_teacher_registers_at_once_under_a_version_of_its_own(lab, config):
    async with lab.running(lambda service: run_inference(service, config, "teacher"), "inference"):
        await lab.until(is_registered(lab, "teacher"), seconds=20)
        async with open_role(lab.bus, "r", "teacher") as directory:
            found = await (await directory.current()).probe()
    assert found.weight_version.startswith("0-teacher-")


async def test_a_server_registers_again_once_one_that_came_later_is_gone(lab, config):
    async with lab.running(lambda service: run_inference(service, config, "eval"), "inference"):
        await lab.until(is_registered(lab, "eval"), seconds=20)
        first = await registered(lab, "eval")
        async with lab.running(lambda service: run_inference(service, config, "eval"), "inference"):
            await lab.until(lambda: _is_registered_elsewhere(lab, first), seconds=20)
            await anyio.sleep(1.0)
            assert await registered(lab, "eval") != first  # both live: the later one gets the request
        await lab.until(lambda: _is_registered_at(lab, first), seconds=20)


async def _is_registered_at(lab, url):
    return await registered(lab, "eval") == url


async def _is_registered_elsewhere(lab, url):
    return await registered(lab, "eval") != url


async def test_a_drain_closes_the_port_even_while_it_waits_for_a_policy(lab, config):
    with anyio.fail_after(20):
        async with lab.running(lambda service: run_inference(service, config, "policy"), "inference"):
            await anyio.sleep(0.5)
        async with lab.running(lambda service: run_inference(service, config, "eval"), "inference"):
            await lab.until(is_registered(lab, "eval"), seconds=20)
    url = await registered(lab, "eval")
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(f"{url}/health")


async def test_a_taken_port_is_named(lab, config):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        crowded = RunConfig(
            run="r", folder=config.folder, model=config.model, inference={"eval": InferenceConfig(port=port)}
        )
        with pytest.raises(StartupError, match=f"port {port}"):
            await run_inference(Service(lab.bus, "inference", "r"), crowded, "eval")


async def test_an_engine_that_fails_ends_the_service_with_its_cause(lab, config, monkeypatch):
    def broken(*_):
        raise IndexError("list index out of range")

    async def ask():
        await lab.until(is_registered(lab, "eval"))
        async with open_role(lab.bus, "r", "eval") as directory:
            with pytest.raises(InfrastructureError, match="list index out of range"):
                await (await directory.current()).generate([1, 20, 30], 1, SamplingParams(max_tokens=3))

    monkeypatch.setattr("lachesis.pipeline.inference.engines.reference.engine.read_draw", broken)
    with pytest.RaisesGroup(
        pytest.RaisesExc(StartupError, match=r"inference\.eval: .*list index out of range"), flatten_subgroups=True
    ):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await run_inference(Service(lab.bus, "inference", "r"), config, "eval")


async def test_a_model_that_cannot_be_decoded_is_named_before_anything_is_served(lab, config, monkeypatch):
    def fails(*_, **__):
        raise IndexError("list index out of range")

    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", fails)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM cannot be sampled: .*list index out of range"):
        await run_inference(Service(lab.bus, "inference", "r"), config, "eval")
    assert await registered(lab, "eval") is None


async def test_without_a_model_it_says_which_setting_is_missing(lab, tmp_path):
    with pytest.raises(ConfigError, match=r"inference\.eval\.model"):
        await run_inference(Service(lab.bus, "inference", "r"), RunConfig(run="r", folder=str(tmp_path)), "eval")


async def test_a_directory_follows_a_server_that_moves(lab):
    async with open_role(lab.bus, "r", "policy") as directory:
        with anyio.move_on_after(0.02) as scope:
            await directory.current()
        assert scope.cancelled_caught
        await register(lab.bus, "r", "policy", "http://one")
        with anyio.fail_after(5):
            first = await directory.current()
        await register(lab.bus, "r", "policy", "http://two")
        await lab.until(lambda: _moved(directory, first))
        second = await directory.current()
        await register(lab.bus, "r", "policy", "http://two")
        await anyio.sleep(0.02)
        assert await directory.current() is second
    assert (first.config.url, second.config.url) == ("http://one", "http://two")


async def _moved(directory: InferenceDirectory, before):
    return await directory.current() is not before


@pytest.fixture(autouse=True)
def _threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


async def test_others_are_told_the_url_under_which_they_reach_a_server_that_listens_everywhere(lab, config):
    settings = InferenceConfig(host=EVERYWHERE, advertise="http://inference:8000")
    config = RunConfig(run="r", folder=str(config.path), model=config.model, inference={"teacher": settings})
    async with lab.running(lambda service: run_inference(service, config, "teacher")):
        await lab.until(is_registered(lab, "teacher"))
        assert await registered(lab, "teacher") == "http://inference:8000"


async def test_weights_arrive_through_the_runs_own_server_at_a_machine_without_the_trainers_folder(
    lab, config, policies
):
    uploader = WeightsUploader(lab.bus, "r", WeightsConfig(transport="nats", dtype="bfloat16"), budget=1 << 26, kept=2)
    main = lambda service: run_inference(service, config, "policy")  # noqa: E731
    async with lab.running(main, "inference"), open_role(lab.bus, "r", "policy") as directory:
        for step in range(2):
            tensors = rounded(policy_tensors(policies[step].model), "bfloat16")
            version = policy_version(step, "a", tensors)
            sent = await uploader.send(version, tensors)
            record = PolicyRecord(
                run="r",
                version=str(version),
                weights=sent.location,
                tokenizer_hash=policies[step].tokenizer_hash,
                written_ns=1,
            )
            await lab.bus.put(keys.POLICY, encode(record))
            await lab.until(serving(directory, str(version)))
            (sample,) = await (await directory.current()).generate([1, 20, 30], 1, SamplingParams(max_tokens=3))
            assert {span.version for span in sample.weight_versions} == {str(version)}
    assert len(list((config.path / "weights" / FETCHED).glob("*.safetensors"))) == 2
    assert not list((config.path / "weights").glob("*.safetensors"))


async def test_few_clients_of_servers_that_others_have_replaced_are_kept_open():
    async with InferenceDirectory(1.0) as directory:
        clients = []
        for port in range(1, 11):
            await directory.use(f"http://127.0.0.1:{port}")
            clients.append(await directory.current())
        assert [client._http.is_closed for client in clients] == [True] * 2 + [False] * 8
    assert all(client._http.is_closed for client in clients)
