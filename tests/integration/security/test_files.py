"""Every file that is read, mangled in every way: refused in a sentence that names it, never a traceback or a hang.

A reader gets a world of its own with one file in a bad state. What it may do: refuse with an error of ours that names
the file, or pass it over where that is documented (a run's record, the log of figures).
"""

import gzip
import os
import resource
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from checkpoints import save_checkpoint
from fuzz.oracle import limited
from integration.archive.world import a_group

from lachesis.pipeline.bus.acknowledged import AcknowledgedEnds, read_acknowledged
from lachesis.pipeline.bus.api import PubAck
from lachesis.pipeline.bus.config import ConnectionConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import Endpoint, read_endpoint
from lachesis.pipeline.common.os_errors import explain_os_error
from lachesis.pipeline.common.private_file import given_token, shared_token
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.environment.held_out import keep_record, kept_record
from lachesis.pipeline.extensions.atropos.gateway.config import GatewayConfig
from lachesis.pipeline.extensions.atropos.gateway.token import gateway_token
from lachesis.pipeline.extensions.atropos.logic.lines import from_line
from lachesis.pipeline.ledger.checkpoint_state import best_checkpoint, known_checkpoints, latest_checkpoint
from lachesis.pipeline.model.policy import build_tiny_policy, load_model, save_policy
from lachesis.pipeline.model.tensors import policy_tensors, policy_version
from lachesis.pipeline.model.weight_files import read_weights, write_weights
from lachesis.pipeline.offline.archive.jsonl import JsonLinesWriter
from lachesis.pipeline.offline.archive.logic.foreign_lines import ImportAssumptions
from lachesis.pipeline.offline.archive.logic.row import DerivedColumns, rows_of
from lachesis.pipeline.offline.archive.parquet import ParquetWriter
from lachesis.pipeline.offline.archive.reader import check_kind, read_groups
from lachesis.pipeline.tasks.rows import read_file
from lachesis.pipeline.trainer.checkpoint import load_checkpoint
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.tracking import METRICS_FILE, Tracking
from lachesis.schemas.control import HeldOutRecord
from lachesis.schemas.errors import LachesisError
from lachesis.services.cli.auth import _new_seed, _public_key
from lachesis.services.cli.history_options import _read_groups
from lachesis.services.observe.progress import (
    newest_figures,
    progress_line,
    recent_figures,
    step_times,
    training_rewards,
)
from lachesis.services.preflight.first_model import find_changed_model, note_model
from lachesis.services.run.checkpoints import newest_checkpoint
from lachesis.services.run.known_runs import known_runs, register_run
from lachesis.services.run.run_file import is_written_here
from lachesis.services.supervisor.supervisor import has_survivors

HANG_S = 3.0
MOST_BYTES = 2 << 30
NO_SERVER = "tls://127.0.0.1:1"
"""Where no process listens; what reads its credentials first is done with them when it says so."""
TRACEBACK = "this would be a traceback"
UNFIT = {"token", "password", "nkey", "creds", "ca.pem", "cert.pem", "key.pem"}
"""Files whose good state is not worth making: no server checks them here."""
DATA_SETS = ("tasks.jsonl", "tasks.json", "tasks.csv", "tasks.jsonl.gz", "tasks.parquet")
SECRET = "canary-2f81b7"
"""What lies outside of the folder that a reader is given; nothing may show it."""


@dataclass(frozen=True)
class World:
    """A folder with one good file of each kind, made once and copied for each case."""

    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def checkpoint(self) -> Path:
        return next(self.run.glob("checkpoints/step-*"))


def make_world(folder: Path) -> None:
    run = folder / "run"
    policy = build_tiny_policy(0, width=8, layers=1, heads=2, max_length=16)
    save_policy(policy, folder / "model")
    learner = Learner(policy.model, LearnerConfig())
    save_checkpoint(
        run / "checkpoints", policy, learner, lineage="a", ledger_position=3, chain_hash="0" * 64, unreported=[]
    )
    (run / "checkpoints" / "best").write_text("step-00000000\n")
    tensors = policy_tensors(policy.model)
    version = policy_version(0, "a", tensors)
    write_weights(tensors, folder / "weights", version).rename(folder / "weights" / "w.safetensors")
    (run / "run.toml").write_text('# The configuration of run r\nrun = "r"\n[batching]\nbatch_size = 16\n')
    (run / "gateway.token").write_text("abc\n")
    (run / "pids.json").write_text('{"trainer": 999999999, "scorer": null}')
    (run / METRICS_FILE).write_text('{"train/step": 1.0, "train/time": 2.0, "reward/mean": 0.5}\n' * 3)
    (run / "nats").mkdir()
    (run / "nats" / "endpoint.json").write_bytes(msgspec.json.encode(Endpoint("nats://127.0.0.1:1", "t", 1)))
    (folder / "state" / "lachesis" / "runs").mkdir(parents=True)
    note_model(RunConfig(model="org/m", folder=str(run)))
    keep_record(run, "sums", HeldOutRecord(seed=1, limit=9))
    store_one(run)
    shared_token(run / "gateway.token")
    shared_token(run / "inference" / "policy.key")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        register_run(RunConfig(run="r", folder=str(run)), run / "run.toml")
    next((folder / "state").rglob("*.json")).rename(folder / "state" / "lachesis" / "runs" / "one.json")
    for name in (
        "token",
        "password",
        "gateway.token",
        "sampling.key",
        "nkey",
        "creds",
        "ca.pem",
        "cert.pem",
        "key.pem",
    ):
        (folder / name).write_text("abc\n")
    (folder / "seed.nk").write_bytes(_new_seed())
    (folder / "groups").write_text(f"{1:032x}\n{2:032x}\n")
    groups = [rows_of(a_group(n), n, 1, DerivedColumns(revision="live")) for n in range(3)]
    with (folder / "rows.jsonl").open("wb") as file:
        writer = JsonLinesWriter(file)
        for rows in groups:
            writer.write(rows)
    with (folder / "rows.parquet").open("wb") as file:
        columns = ParquetWriter(file, {})
        for rows in groups:
            columns.write(rows)
        columns.close()
    line = {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1.0], "messages": None}
    (folder / "atropos.jsonl").write_bytes(msgspec.json.encode(line) + b"\n")
    tasks = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(50)]
    lines = b"".join(msgspec.json.encode(task) + b"\n" for task in tasks)
    (folder / "tasks.jsonl").write_bytes(lines)
    (folder / "tasks.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "tasks.json").write_bytes(msgspec.json.encode(tasks))
    (folder / "tasks.csv").write_text("question,answer\n" + "".join(f"{t['question']},{t['answer']}\n" for t in tasks))
    pq.write_table(pa.Table.from_pylist(tasks), folder / "tasks.parquet")
    (folder.parent / "outside").write_text(SECRET)


def run_apart(call: Callable[[], Awaitable[object]]) -> None:
    """Run `call` in an event loop and thread of its own: fixtures of other tests keep a loop in this one."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(anyio.run, call).result()


def store_one(run: Path) -> None:
    ends = AcknowledgedEnds()
    ends.keep_in(run, "scorer")
    ends.record(PubAck("ROLLOUTS", 1, duplicate=False), "id", after=0)
    ends.close()


def acknowledged(world: World) -> None:
    """Read what was acknowledged, as the governor does, and go on with the file, as the next process does."""
    read_acknowledged(world.run)
    store_one(world.run)


def connected(**settings: str) -> Callable[[World], None]:
    def read(world: World) -> None:
        files = {name: str(world.folder / file) for name, file in settings.items()}
        config = ConnectionConfig(url="tls://127.0.0.1:1", connect_timeout_s=0.01, **files)
        run_apart(lambda: connect(name="test", run="one", config=config))

    return read


def figures(world: World) -> None:
    found = newest_figures(world.run)
    if "train/step" in found:
        progress_line(found, 3)
    recent_figures(world.run)
    step_times(world.run)
    training_rewards(world.run, 0, 9)
    tracking = Tracking(RunConfig(folder=str(world.run)).path, 0, outboxes=[])
    run_apart(lambda: tracking.resume(1))
    run_apart(lambda: tracking.add_figures({"x": 1.0}))


def archive(name: str) -> Callable[[World], None]:
    def read(world: World) -> None:
        path, atropos = world.folder / name, name == "atropos.jsonl"
        kind = "parquet" if name.endswith("parquet") else "jsonl"
        check_kind(path, kind, foreign="atropos" if atropos else None)
        assumed = ImportAssumptions(run="demo", env="sums", longest=64, most=64)
        for placed in read_groups(path, kind, run="demo", foreign=(from_line, assumed) if atropos else None):
            assert placed.group is not None or name in placed.place

    return read


def data_set(name: str) -> Callable[[World], None]:
    def read(world: World) -> None:
        for _ in read_file(world.folder / name, frozenset()):
            pass

    return read


def weights(world: World) -> None:
    policy = build_tiny_policy(0, width=8, layers=1, heads=2, max_length=16)
    tensors = policy_tensors(policy.model)
    read_weights(world.folder / "weights" / "w.safetensors", policy_version(0, "a", tensors), tensors)


def registered(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(world.folder / "state"))
        known_runs()


def configured(world: World) -> None:
    is_written_here(world.run / "run.toml")
    load(run_config_type(), file=world.run / "run.toml")


def pointers(world: World) -> None:
    best_checkpoint(world.run / "checkpoints")
    newest_checkpoint(world.run)
    latest_checkpoint(world.run / "checkpoints")


def checkpoint(world: World) -> None:
    known_checkpoints(world.run / "checkpoints")
    load_checkpoint(world.checkpoint, LearnerConfig())


READERS: dict[str, Callable[[World], object]] = {
    "run/run.toml": configured,
    "run/pids.json": lambda world: has_survivors(world.run),
    "run/nats/endpoint.json": lambda world: read_endpoint(world.run / "nats"),
    f"run/{METRICS_FILE}": figures,
    "run/first_model.json": lambda world: list(find_changed_model(RunConfig(model="org/m", folder=str(world.run)))),
    "run/held_out.sums.msgpack": lambda world: kept_record(world.run, "sums"),
    "run/acknowledged/scorer.0": acknowledged,
    "state/lachesis/runs/one.json": registered,
    "run/checkpoints/latest": pointers,
    "run/checkpoints/best": pointers,
    **{
        f"run/checkpoints/step-00000000/{name}": checkpoint
        for name in ("trainer.json", "B3SUMS", "optimizer.safetensors", "model.safetensors", "config.json")
    },
    **{
        f"model/{name}": lambda world: load_model(world.folder / "model")
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    },
    "weights/w.safetensors": weights,
    "run/gateway.token": lambda world: shared_token(world.run / "gateway.token"),
    "gateway.token": lambda w: gateway_token(GatewayConfig(token_file=str(w.folder / "gateway.token")), w.run),
    "run/inference/policy.key": lambda world: shared_token(world.run / "inference" / "policy.key"),
    "sampling.key": lambda world: given_token(world.folder / "sampling.key", "inference.policy.key_file"),
    "token": connected(token_file="token"),
    "password": connected(user="me", password_file="password"),
    "nkey": connected(nkey_file="nkey"),
    "creds": connected(creds_file="creds"),
    "ca.pem": connected(ca_file="ca.pem"),
    "cert.pem": connected(cert_file="cert.pem", key_file="key.pem"),
    "key.pem": connected(cert_file="cert.pem", key_file="key.pem"),
    "seed.nk": lambda world: _public_key(world.folder / "seed.nk"),
    "groups": lambda world: _read_groups(world.folder / "groups"),
    "rows.jsonl": archive("rows.jsonl"),
    "atropos.jsonl": archive("atropos.jsonl"),
    "rows.parquet": archive("rows.parquet"),
    **{name: data_set(name) for name in DATA_SETS},
}


def _replace(make: Callable[[Path], object]) -> Callable[[Path, bytes], None]:
    def mangle(path: Path, _: bytes) -> None:
        path.unlink(missing_ok=True)
        make(path)

    return mangle


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Path, bytes], None]:
    return lambda path, good: (path.unlink(missing_ok=True), path.write_bytes(change(good)), None)[-1]


def _outside(path: Path) -> Path:
    return next(folder / "outside" for folder in path.parents if (folder / "outside").exists())


MANGLED: dict[str, Callable[[Path, bytes], None]] = {
    "missing": _replace(lambda _: None),
    "empty": _bytes(lambda _: b""),
    "truncated": _bytes(lambda good: good[: len(good) // 2]),
    "doubled": _bytes(lambda good: good + good),
    "zeros": _bytes(lambda good: bytes(len(good))),
    "not-text": _bytes(lambda good: b"\xff\xfe" + good),
    "wrong-type": _bytes(lambda _: b"[1, null, {}]\n"),
    "deep-nesting": _bytes(lambda _: b"[" * 100_000 + b"\n"),
    "deep-maps": _bytes(lambda _: b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"\n"),
    "huge-number": _bytes(
        lambda _: b'{"step": ' + b"9" * 5000 + b', "train/step": 1e308, "pid": ' + b"9" * 400 + b"}\n"
    ),
    "not-a-number": _bytes(lambda _: b'{"train/step": NaN, "reward/mean": 1e999}\n'),
    "no-step": _bytes(lambda _: b'{"reward/mean": 1.0}\n'),
    "control-characters": _bytes(lambda _: b"\x1b]0;owned\x07\x1b[2J\r\nX-Injected: 1\r\n"),
    "giant-length": _bytes(lambda good: b"\xff" * 7 + b"\x7f" + good[8:]),
    "traversal": _bytes(lambda _: b"../../../outside\n"),
    "absolute": _bytes(lambda _: b"/etc/passwd\n"),
    "null-byte": _bytes(lambda _: b"step-0\x000\n"),
    "long-line": _bytes(lambda _: b"a" * 3_000_000),
    "folder": _replace(lambda path: path.mkdir()),
    "fifo": _replace(os.mkfifo),
    "link-to-itself": _replace(lambda path: path.symlink_to(path)),
    "dangling-link": _replace(lambda path: path.symlink_to("/nonexistent/canary")),
    "link-outside": _replace(lambda path: path.symlink_to(_outside(path))),
    "endless-device": _replace(lambda path: path.symlink_to("/dev/zero")),
}


FEW = {"empty", "truncated", "not-text", "deep-nesting", "fifo", "link-outside"}
"""What `make test` tries; the others have no time there."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files") / "good"
    folder.mkdir()
    make_world(folder)
    return folder


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Let a reader without end fail in this process alone."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MOST_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def read(reader: str, world: World) -> str | None:
    """Return what the reader says of its file, None if it says nothing."""
    try:
        with limited(HANG_S), bounded_memory():
            READERS[reader](world)
    except LachesisError as error:
        return str(error)
    except OSError as error:
        return explain_os_error(error) or f"{TRACEBACK}: {error!r}"
    return None


@pytest.mark.parametrize("reader", READERS)
def test_a_good_file_is_read(good: Path, reader: str) -> None:
    text = read(reader, World(good))
    assert text is None or reader in UNFIT, text


@pytest.mark.parametrize("reader", [name for name in READERS if name not in DATA_SETS])
def test_a_mangled_file_is_refused_by_name_or_passed_over(
    good: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(good.parent / "none"))
    assert wrong_with(good, reader, FEW) == {}


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_mangled_in_any_way_is_refused_by_name_or_passed_over(
    good: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(good.parent / "none"))
    assert wrong_with(good, reader, MANGLED.keys() if reader in DATA_SETS else MANGLED.keys() - FEW) == {}


def wrong_with(good: Path, reader: str, ways: Collection[str]) -> dict[str, str]:
    """Mangle the reader's file in each of the ways; return what is wrong with what it said, by way."""
    wrong = {}
    for way in sorted(ways):
        folder = good.parent / "case"
        shutil.copytree(good, folder)
        try:
            path = folder / reader
            before = set(good.parent.iterdir())
            MANGLED[way](path, (good / reader).read_bytes())
            text = read(reader, World(folder))
            if set(good.parent.iterdir()) != before or (good.parent / "outside").read_text() != SECRET:
                wrong[way] = f"it changed what lies outside of the folder, and said {text}"
            elif text is not None and not is_good_refusal(text, reader, path):
                wrong[way] = text[:2000]
        finally:
            shutil.rmtree(folder)
    return wrong


def is_good_refusal(text: str, reader: str, path: Path) -> bool:
    """Return whether a refusal names the file, is short, and shows neither a traceback nor what lies elsewhere."""
    names_it = path.name in text or str(path.parent) in text or NO_SERVER in text
    shows = SECRET in text and reader != "groups"  # its own user named that file, and is shown the bad line
    return names_it and not shows and TRACEBACK not in text and len(text) < 2000
