"""`lachesis export` and `import` as a user runs them, on a real server."""

import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import pytest
from integration.archive.world import RUN, World, a_group, a_world

from lachesis.pipeline.model.policy import build_tiny_policy, save_policy
from lachesis.pipeline.offline.archive.jsonl import JsonLinesWriter, read_lines, read_row
from lachesis.pipeline.offline.archive.logic.row import SCHEMA, DerivedColumns, RolloutRow, content_digest, rows_of
from lachesis.pipeline.offline.archive.parquet import METADATA_KEY, arrow_schema, read_rows
from lachesis.pipeline.retention.holds import read_record, update_record
from lachesis.schemas.annotations import GroupScore
from lachesis.schemas.codec import encode
from lachesis.schemas.retention import LostRange
from lachesis.schemas.subjects import ROLLOUTS


@pytest.fixture
async def world(tmp_path: Path, anyio_backend: str) -> AsyncIterator[World]:
    async with a_world(tmp_path / "here") as made:
        yield made


def rows(path: Path) -> list[RolloutRow]:
    if path.suffix == ".parquet":
        return [row for _, row in read_rows(path)]
    return [read_row(line.data) for line in read_lines(path)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("export", "out.jsonl"),
        ("replay", "--revision", "again"),
        ("train", "--revision", "live", "--steps", "1", "--name", "second", "--from", "model"),
    ],
    ids=lambda command: command[0],
)
async def test_what_makes_something_of_history_says_what_of_it_is_lost(world: World, command: tuple[str, ...]) -> None:
    """Whether the rest of it can be done or not."""
    await world.judge({await world.store(one): one for one in (a_group(1), a_group(2))})
    save_policy(build_tiny_policy(0, width=16, layers=1), world.folder / "model")
    _, _, whole = await world.lachesis(*command)
    assert "history is missing" not in whole
    lost = {ROLLOUTS: [LostRange(7, 9)]}
    await update_record(world.bus, RUN, lambda old: old.replace(lost=lost))
    _, _, said = await world.lachesis(*command)
    assert "history is missing: sequences 7 to 9 of ROLLOUTS were lost by the server" in said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
async def test_rollouts_and_all_that_was_derived_come_out_and_the_rollouts_go_back(
    world: World, tmp_path: Path, kind: str
) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    made = [a_group(n, env="words" if n == 3 else "sums") for n in range(1, 6)]
    made.append(a_group(6, samples=8, tokens=90_000))  # in chunks
    stored = {await world.store(one): one for one in made}
    await world.judge({seq: one for seq, one in stored.items() if one.env == "sums"})
    path = world.folder / f"out.{kind}"
    done = await world.json("export", path.name)
    assert (done["groups"], done["rows"], done["unscored"], done["left_out"]) == (6, 28, 1, 0)
    assert done["bytes"] == path.stat().st_size
    found = rows(path)
    assert [row.seq for row in found[::4]][:5] == list(stored)[:5]
    one, other, words, last = found[1], found[4], found[8], found[-1]
    assert (one.score, one.advantage, one.outcome, one.batch, one.batch_advantage) == (1.25, 1.0, "batched", 0, 9.0)
    assert (one.ratings[0].rating, found[3].ratings[0].rating, found[3].ratings[0].status) == (0.5, None, "timeout")
    assert (one.ensemble, one.raters[0].version, one.estimator, one.snapshot) == ("e", "1", "rloo", "s")
    assert (other.outcome, other.outcome_reason, other.batch) == ("stale", "too old", None)
    assert (words.score, words.ratings, words.outcome, words.env) == (None, None, None, "words")
    assert (last.score is not None, last.reward, last.verdict) == (True, None, None)
    assert (await read_record(world.bus, RUN)).holds == {}
    assert [entry.name for entry in world.folder.iterdir() if "index" in entry.name or "partial" in entry.name] == []
    if kind == "parquet":
        import pyarrow.parquet as pq

        about = json.loads(pq.read_schema(path).metadata[METADATA_KEY])
        assert (about["schema"], about["run"], about["groups"]) == (SCHEMA, RUN, 6)

    async with a_world(tmp_path / "there") as there:
        done = await there.json("import", path, "--unleased")
        assert (done["stored"], done["known"], done["bad"]) == (6, 0, 0)
        assert [encode(one) for one in await there.groups()] == [encode(one) for one in made]
        again = await there.json("import", path, path, "--unleased")
        assert (again["stored"], again["known"]) == (0, 12)
        await there.json("export", "again.jsonl", "--env", "sums")
        digests = {row.group: row.digest for row in rows(there.folder / "again.jsonl")}
        assert digests == {one.id: content_digest(one) for one in made if one.env == "sums"}


@pytest.mark.parametrize("kind", ["json", "parquet"])
async def test_hugging_face_loads_it(world: World, tmp_path: Path, kind: str) -> None:
    datasets = pytest.importorskip("datasets")
    stored = {await world.store(one): one for one in map(a_group, range(1, 400))}
    await world.judge(stored)
    path = world.folder / ("out.jsonl" if kind == "json" else "out.parquet")
    await world.json("export", path.name)
    loaded = datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded.num_rows == 4 * 399
    row = loaded[5]
    assert (row["group"], row["sequence"], row["outcome"], row["batch"]) == (f"{2:032x}", 1, "stale", None)
    assert row["messages"][0]["content"] == "what is 2?"
    assert (len(row["tokens"]), row["loss_mask"], row["ratings"][0]["rater"]) == (8, [0] + [1] * 7, "length")
    assert json.loads(row["task"]) == {"answer": "2", "weight": 1.0, "none": None}


async def test_json_lines_load_whatever_is_null_at_first_where_the_columns_are_said(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        writer = JsonLinesWriter(file)
        for n in range(1, 200):
            one = a_group(n, samples=8, tokens=256)
            score = GroupScore(
                group=one.id, seq=n, item="", policy_step=0, scores=[0.5] * 8, lengths=[1] * 8, ratings={}
            )
            writer.write(rows_of(one, n, 1, DerivedColumns(revision="live", score=score if n > 190 else None)))
    assert path.stat().st_size > 12 << 20
    features = datasets.Features.from_arrow_schema(arrow_schema())
    cache = str(tmp_path / "cache")
    loaded = datasets.load_dataset("json", data_files=str(path), split="train", features=features, cache_dir=cache)
    assert (loaded.num_rows, loaded[0]["score"], loaded[-1]["score"]) == (199 * 8, None, 0.5)


@pytest.mark.slow
async def test_a_replayed_revision_and_a_selection(world: World) -> None:
    for n in range(1, 21):
        await world.store(a_group(n, step=n, env="words" if n % 2 else "sums"))
    await world.json("replay", "--revision", "short")
    await world.json("export", "out.jsonl", "--revision", "short", "--subject", "rl.rollout.*.words", "--min-step", "5")
    found = rows(world.folder / "out.jsonl")
    assert {row.group for row in found} == {f"{n:032x}" for n in range(5, 21, 2)}
    assert {row.revision for row in found} == {"short"}
    assert all(row.score is not None and row.raters[0].rater == "length" and row.verdict for row in found)
    listed = world.folder / "ids"
    listed.write_text("\n".join(f"{n:032x}" for n in (4, 18)))
    await world.json("export", "two.jsonl", "--groups", listed)
    assert {row.group for row in rows(world.folder / "two.jsonl")} == {f"{n:032x}" for n in (4, 18)}

    async def refusal(*arguments: str) -> str:
        return await world.refusal("export", "none.jsonl", *arguments)

    assert "nothing is selected" in await refusal("--min-step", "99")
    assert "no revision 'long'; there are live, short" in await refusal("--revision", "long")
    assert "takes none of the rollouts" in await refusal("--subject", "rl.score.>")
    listed.write_text("f" * 32)
    assert "1 of the 1 groups listed are not selected" in await refusal("--groups", "ids")
    await update_record(world.bus, RUN, lambda old: old.replace(trimmed={ROLLOUTS: 9}))
    assert "kept from sequence 9 on, not from 3" in await refusal("--from-seq", "3")
    assert not (world.folder / "none.jsonl").exists()
    assert not (world.folder / "none.jsonl.partial").exists()
    code, _, err = await world.lachesis("export", "two.jsonl")
    assert (code, err) == (2, "lachesis: two.jsonl exists; give --overwrite to replace it, or choose another name\n")
    assert (await world.json("export", "two.jsonl", "--overwrite"))["groups"] == 12
    assert "No such file or directory" in await world.refusal("export", "no/where.jsonl")
    assert "which format?" in await world.refusal("export", "out.csv")
    for blocks in (1, 40):  # of 1 KiB, that a file may have: too few for the index, then for what is written
        full = world.start("export", "full.jsonl", before=f"ulimit -f {blocks}")
        code, _, err = await world.ended(full)
        assert (code, "Traceback" in err, "make room on" in err) == (2, False, True), err
    assert list(world.folder.glob("full*")) == []


async def frozen_while_it_writes(world: World, name: str, *, least: int = 0) -> subprocess.Popen[bytes]:
    """Start an export and stop it (SIGSTOP) once it has written `least` bytes, not all; once more if it was faster."""
    whole, partial = world.folder / name, world.folder / f"{name}.partial"
    with anyio.fail_after(240):
        while True:
            process = world.start("export", name, "--overwrite")
            while process.poll() is None and size(partial) < least:  # noqa: ASYNC110 - it is another process
                await anyio.sleep(0.01)
            if process.poll() is None:
                process.send_signal(signal.SIGSTOP)
                stops = os.WSTOPPED | os.WEXITED | os.WNOWAIT
                await anyio.to_thread.run_sync(os.waitid, os.P_PID, process.pid, stops)
                if size(partial) >= least and not whole.exists():
                    return process
                process.send_signal(signal.SIGCONT)
            code, _, err = await world.ended(process)
            assert code == 0, err
            whole.unlink()


def size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


@pytest.mark.slow
async def test_what_is_killed_leaves_nothing_that_looks_whole(world: World) -> None:
    for n in range(1, 1500):
        await world.store(a_group(n, samples=16, tokens=64))
    process = await frozen_while_it_writes(world, "out.jsonl", least=1)
    process.send_signal(signal.SIGKILL)
    assert (await world.ended(process))[0] == -signal.SIGKILL
    assert not (world.folder / "out.jsonl").exists()
    assert (await world.json("export", "out.jsonl"))["groups"] == 1499
    assert not (world.folder / "out.jsonl.partial").exists()
    pytest.importorskip("pyarrow")
    code, err = 0, ""
    while code == 0:  # it was done before it was reported
        (world.folder / "out.parquet").unlink(missing_ok=True)
        process = await frozen_while_it_writes(world, "out.parquet")
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        code, _, err = await world.ended(process)
    assert (code, "Traceback" in err) == (130, False), err
    assert list(world.folder.glob("out.parquet*")) == []


@pytest.mark.slow
async def test_bad_lines_are_told_with_their_place(world: World, tmp_path: Path) -> None:
    for n in range(1, 4):
        await world.store(a_group(n))
    await world.json("export", "out.jsonl")
    lines = (world.folder / "out.jsonl").read_bytes().splitlines(keepends=True)
    broken = msgspec.json.decode(lines[5])
    broken["tokens"][1] += 1
    lines[5] = msgspec.json.encode(broken) + b"\n"
    (world.folder / "bad.jsonl").write_bytes(b"".join([*lines[:8], b"{oops\n", b"\n", *lines[8:11]]))
    async with a_world(tmp_path / "there") as there:
        bad = world.folder / "bad.jsonl"
        said = await there.refusal("import", bad, "--unleased")
        assert f"lachesis: {bad}:5-8: digest: group {2:032x} holds something else than was exported" in said
        assert "1 groups are stored" in said
        code, out, err = await there.lachesis("import", bad, "--unleased", "--skip-bad")
        assert code == 0, err
        places = [
            line.partition(": ")[2].partition(": ")[0] for line in err.splitlines() if line.startswith("left out")
        ]
        assert places == [f"{bad}:5-8", f"{bad}:9", f"{bad}:11-13"]
        assert "0 groups stored" in out
        assert "1 were stored already" in out
        assert [one.id for one in await there.groups()] == [f"{1:032x}"]
        (there.folder / "empty.jsonl").touch()
        (there.folder / "not.parquet").write_text("{}")
        assert "is empty" in await there.refusal("import", "empty.jsonl")
        assert "no Parquet file" in await there.refusal("import", "not.parquet")
        assert "No such file" in await there.refusal("import", "none.jsonl")
