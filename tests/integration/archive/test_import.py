"""Files into a run: of Atropos, and beside a governor that bounds what may come."""

import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from integration.archive.world import CONFIG, RUN, World, a_group, a_world
from integration.proxy import open_proxy
from stages import run_governor

from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.embedded import read_endpoint
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.runtime.service import open_service
from lachesis.schemas import subjects
from lachesis.schemas.codec import encode
from lachesis.schemas.subjects import ROLLOUTS

MIB = 1 << 20


@pytest.fixture
async def world(tmp_path: Path, anyio_backend: str) -> AsyncIterator[World]:
    async with a_world(tmp_path / "here") as made:
        yield made


def scored(n: int, **changes: Any) -> dict[str, Any]:
    """A line as atroposlib 0.4 writes it: what it was given, and the keys that it sets itself."""
    rows = [[2, 100 + n, *range(i, i + 6)] for i in range(4)]
    line = {
        "tokens": rows,
        "masks": [[-100, -100, *row[2:]] for row in rows],
        "scores": [float(i % 2) for i in range(4)],
        "messages": [
            [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "so " * i}] for i in range(4)
        ],
        "inference_logprobs": [[1.0, 1.0] + [-0.5] * 6 for _ in rows],
        "ref_logprobs": None, "overrides": None, "group_overrides": None, "distill_token_ids": None,
        "distill_logprobs": None,
    }  # fmt: skip
    return line | changes


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.mark.slow
async def test_a_past_with_atropos_is_imported_into_a_new_run_and_scored_again(tmp_path: Path) -> None:
    world = World(tmp_path, None)  # type: ignore[arg-type] - no server runs, and none has
    older = {"inference_logprobs": None}  # as environments write that do not collect them
    path = write(tmp_path / "past.jsonl", *(scored(n, **(older if n % 3 else {})) for n in range(30)))
    arguments = ("import", path, "--from", "atropos", "--env", "sums")
    done = await world.json(*arguments, "--policy", "7-theirs-ab")
    assert (done["stored"], done["untrainable"], done["known"], done["sequences"]) == (30, 20, 0, 120)
    assert (await world.json(*arguments))["known"] == 30
    for revision, rater in (("one", "length"), ("two", "repetition")):
        replayed = await world.json("replay", "--revision", revision, "--set", f'scoring.raters=[{{rater="{rater}"}}]')
        assert (replayed["groups"], replayed["unscored"]) == (30, 0)
    code, out, err = await world.lachesis("compare", "one", "two", "--json")
    assert code == 0, err
    assert json.loads(out)["metrics"]["only_a"] == 0
    await world.json("export", "all.jsonl", "--revision", "two", "--env", "sums")
    first = json.loads((tmp_path / "all.jsonl").read_text().splitlines()[0])
    assert (first["policy_versions"], first["environment_rewards"]) == (
        ["7-theirs-ab"],
        [{"name": "environment", "value": 0.0}],
    )
    assert json.loads(first["metadata"])["import"]["name"] == "past.jsonl"
    assert "policy_versions" in json.loads(first["metadata"])["import"]["assumed"]
    assert (first["logprobs"][:3], first["messages"][0]["content"]) == ([0.0, 0.0, -0.5], "q0")


@pytest.mark.slow
async def test_what_is_no_group_of_atropos_is_told_with_its_line(world: World) -> None:
    path = write(
        world.folder / "past.jsonl", scored(1), "", scored(2, scores=[1.0]), scored(3, scores=[float("nan")] * 4),
        scored(4, inference_logprobs=[[]] * 4), scored(5, masks=[[1] * 8] * 4), "[]", scored(6), scored(1),
    )  # fmt: skip
    arguments = ("import", path, "--from", "atropos", "--env", "sums", "--unleased")
    said = await world.refusal(*arguments)
    assert f"lachesis: {path}:3: scores: 1 entries for 4 sequences. 1 groups are stored" in said
    code, out, err = await world.lachesis(*arguments, "--skip-bad")
    assert code == 0, err
    told = [line.removeprefix(f"left out: {path}:") for line in err.splitlines() if line.startswith("left out")]
    assert [line.partition(":")[0] for line in told] == ["3", "4", "5", "6", "7"]
    assert "NaN" in told[1]
    assert "inference_logprobs[0]: 0 values for 8 tokens" in told[2]
    assert ("1 groups stored" in out, "2 were stored already" in out) == (True, True)
    assert len(await world.groups()) == 2
    assert "name the project that it is of, with --from (atropos)" in await world.refusal("import", path)
    assert "name the environment" in await world.refusal("import", path, "--from", "atropos")
    assert "--policy" in await world.refusal("import", path, "--from", "atropos", "--env", "sums", "--policy", "7")
    await world.json("export", "out.jsonl")
    assert "leave --from out" in await world.refusal("import", "out.jsonl", "--from", "atropos", "--env", "sums")


@pytest.mark.slow
async def test_it_is_stored_once_beyond_the_window_of_duplicates(tmp_path: Path) -> None:
    async with a_world(tmp_path / "here", StreamsConfig(duplicate_window_s=1)) as world:
        for n in range(1, 9):
            await world.store(a_group(n))
        await world.json("export", "out.jsonl")
        await anyio.sleep(1.5)  # the broker forgets
        assert (await world.json("import", "out.jsonl", "--unleased"))["known"] == 8
        assert len(await world.groups()) == 8


@pytest.mark.slow
async def test_what_is_never_trained_is_refused_or_told(world: World, tmp_path: Path) -> None:
    async with a_world(tmp_path / "past") as past:
        made = a_group(1)
        turns = [[0.5]] * made.sequences.n_samples
        await past.store(made.replace(sequences=msgspec.structs.replace(made.sequences, turn_rewards=turns)))
        await past.json("export", world.folder / "out.jsonl")
    assert (await world.json("import", "out.jsonl", "--unleased"))["untrainable"] == 0
    assert (await world.groups())[0].sequences.turn_rewards == turns
    path = write(world.folder / "past.jsonl", scored(1, turn_rewards=[[1.0, 2.0]] * 4))
    arguments = ("import", path, "--from", "atropos", "--env", "sums", "--unleased")
    assert "turn_rewards: 2 for sample 0, where the loss mask lets in 1 runs" in await world.refusal(*arguments)
    write(path, scored(2), scored(3, ref_logprobs=[[-1.0] * 8] * 4))  # the trainer computes those itself
    done = await world.json(*arguments)
    assert (done["stored"], done["untrainable"]) == (2, 0)
    write(path, scored(4, inference_logprobs=None))
    done = await world.json(*arguments)
    assert (done["stored"], done["untrainable"]) == (1, 1)


@pytest.mark.slow
async def test_beside_a_governor_it_waits_for_leases_and_keeps_the_bounds(world: World, tmp_path: Path) -> None:
    async with a_world(tmp_path / "past") as past:
        for n in range(1, 61):
            await past.store(a_group(n))
        await past.json("export", world.folder / "out.jsonl")
    config = load(run_config_type(), file=world.folder / "run.toml").config
    async with open_service(world.bus, "governor", RUN) as service, anyio.create_task_group() as tasks:
        tasks.start_soon(run_governor, service, config)
        await service.started.wait()
        said = await world.refusal("import", "out.jsonl", "--unleased")
        assert "a governor runs" in said
        code, _, err = await world.lachesis("import", "out.jsonl", "--wait", "8")
        assert code == 2
        assert "then none was admitted for 8 s" in err
        capacity = (config.batching.max_staleness + 1) * config.batching.batch_size
        stored = await world.groups()
        assert 0 < len(stored) * 4 <= capacity < 240
        assert [one.id for one in stored] == [f"{n:032x}" for n in range(1, len(stored) + 1)]
        assert all(one.lease for one in stored)
        service.drain()


@pytest.mark.slow
async def test_a_governor_that_says_nothing_is_one(world: World, tmp_path: Path) -> None:
    async with a_world(tmp_path / "past") as past:
        await past.store(a_group(1))
        await past.json("export", world.folder / "out.jsonl")

    async def frozen(_: bytes) -> bytes:
        await anyio.sleep_forever()
        raise AssertionError

    async with world.bus.serve(subjects.lease(RUN), frozen):
        assert f"no answer on {subjects.lease(RUN, 'sums')}" in await world.refusal("import", "out.jsonl", "--unleased")
    assert await world.groups() == []


@pytest.mark.slow
async def test_without_a_governor_it_keeps_within_the_byte_budgets(tmp_path: Path) -> None:
    async with a_world(tmp_path / "past") as past:
        for n in range(1, 61):
            await past.store(a_group(n, samples=16, tokens=512))
        await past.json("export", tmp_path / "out.jsonl")
    async with a_world(tmp_path / "here", StreamsConfig(rollouts_bytes=2 * MIB)) as world:
        said = await world.refusal("import", tmp_path / "out.jsonl", "--unleased")
        assert "groups are stored, then there was no more room: stream ROLLOUTS holds" in said
        usage = await world.bus.usage(ROLLOUTS)
        assert 0.4 * usage.max_bytes < usage.bytes <= 0.8 * usage.max_bytes
        code, _, err = await world.lachesis("import", tmp_path / "out.jsonl", "--wait", "1")
        assert (code, "For a run that has ended, give --unleased" in err) == (2, True)
        bad = (world.folder / "run.toml").read_text().replace("64", "8")
        (world.folder / "run.toml").write_text(bad)
        assert "samples: 16, but a batch has 8" in await world.refusal("import", tmp_path / "out.jsonl", "--unleased")
        (world.folder / "run.toml").write_text(CONFIG.replace("sums", "other"))
        assert "the run has no environment 'sums'" in await world.refusal(
            "import", tmp_path / "out.jsonl", "--unleased"
        )


@pytest.mark.slow
async def test_killed_anywhere_it_goes_on_where_it_was(tmp_path: Path) -> None:
    async with a_world(tmp_path / "past") as past:
        made = [a_group(n) for n in range(1, 801)]
        for one in made:
            await past.store(one)
        await past.json("export", tmp_path / "out.jsonl")
    async with a_world(tmp_path / "here") as world:
        server = read_endpoint(tmp_path / "here" / "runs" / RUN / "nats")
        (tmp_path / "token").write_text(server.token)
        # what it stores passes through this process, which thus can always kill it in time
        async with open_proxy(int(server.url.rpartition(":")[2])) as proxy:
            through = ("--nats", f"nats://127.0.0.1:{proxy.port}", "--set", f"nats.token_file={tmp_path / 'token'}")
            for more in (1, 200):
                before = (await world.bus.usage(ROLLOUTS)).messages
                process = world.start("import", tmp_path / "out.jsonl", "--unleased", *through)
                with anyio.fail_after(120):
                    while (await world.bus.usage(ROLLOUTS)).messages < before + more:  # noqa: ASYNC110 - elsewhere
                        await anyio.sleep(0.005)
                process.kill()
                assert (await world.ended(process))[0] == -signal.SIGKILL
        there = (await world.bus.usage(ROLLOUTS)).messages
        assert 200 < there < 800
        done = await world.json("import", tmp_path / "out.jsonl", "--unleased")
        assert (done["stored"], done["known"]) == (800 - there, there)
        assert [encode(one) for one in await world.groups()] == [encode(one) for one in made]
