"""Checkpoints and weights files: every file of them cut, flipped and exchanged.

A case is a file's name, a line break and its content. `checkpoint.folder` leaves the checksums as they were;
`checkpoint.sealed` writes them again, so that what lies behind them is met, but for the sizes in `config.json`: a model
that its user names is trusted with the machine's memory.
"""

import random
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from checkpoints import save_checkpoint
from fuzz.mutate import mutate_bytes, mutate_json
from fuzz.oracle import Target

from lachesis.pipeline.errors import CheckpointError, NotFoundError
from lachesis.pipeline.ledger.checkpoint_state import known_checkpoints, latest_checkpoint
from lachesis.pipeline.ledger.checkpoint_sums import SUMS, write_sums
from lachesis.pipeline.model.policy import build_tiny_policy
from lachesis.pipeline.model.tensors import policy_tensors, policy_version
from lachesis.pipeline.model.weight_files import read_weights, write_weights
from lachesis.pipeline.trainer.checkpoint import load_checkpoint
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.learner import Learner
from lachesis.schemas.errors import DataError

__all__ = ["targets"]

_UNSEALED = {SUMS, "config.json", "tokenizer.json"}


def targets(things: ExitStack) -> list[Target]:
    """Return the targets, over one checkpoint of a tiny model."""
    folder = Path(things.enter_context(tempfile.TemporaryDirectory()))
    policy = build_tiny_policy(0, width=8, layers=1, heads=2, max_length=16)
    learner = Learner(policy.model, LearnerConfig())
    save_checkpoint(folder, policy, learner, lineage="a", ledger_position=3, chain_hash="0" * 64, unreported=[1])
    good = latest_checkpoint(folder)
    assert good is not None
    files = [path for path in sorted(good.iterdir()) if path.stat().st_size < 1 << 20]
    seeds = [path.name.encode() + b"\n" + path.read_bytes() for path in files]
    sealed = [seed for seed in seeds if seed.partition(b"\n")[0].decode() not in _UNSEALED]
    tensors = policy_tensors(policy.model)
    version = policy_version(1, "a", tensors)
    weights = write_weights(tensors, folder, version)

    def read(data: bytes) -> None:
        weights.write_bytes(data)
        found = read_weights(weights, version, tensors)
        assert found.keys() == tensors.keys()

    return [
        Target(
            "checkpoint.folder",
            seeds,
            _mutate_file,
            lambda data: _feed(good, data, seal=False),
            (CheckpointError,),
            weight=0.5,
        ),
        Target(
            "checkpoint.sealed",
            sealed,
            _mutate_file,
            lambda data: _feed(good, data, seal=True),
            (CheckpointError,),
            weight=0.1,
        ),
        Target("checkpoint.weights", [weights.read_bytes()], mutate_bytes, read, (DataError, NotFoundError)),
    ]


def _mutate_file(rng: random.Random, good: bytes) -> bytes:
    name, _, content = good.partition(b"\n")
    if name == b"trainer.json" and rng.random() < 0.7:
        return name + b"\n" + mutate_json(rng, content)
    if name.endswith(b".safetensors") and rng.random() < 0.5:  # its header: a length of 8 bytes, and JSON
        length = int.from_bytes(content[:8], "little")
        header = mutate_json(rng, content[8 : 8 + length])
        claimed = rng.choice([len(header), len(header), 0, 1 << 40, (1 << 64) - 1])
        return name + b"\n" + claimed.to_bytes(8, "little") + header + content[8 + length :]
    return name + b"\n" + mutate_bytes(rng, content)


def _feed(good: Path, data: bytes, *, seal: bool) -> str | None:
    """What differs from the checkpoint must be refused, unless it was sealed; what loads, must be of one piece."""
    name, _, content = data.partition(b"\n")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(shutil.copytree(good, Path(place) / good.name))
        file = folder / name.decode("utf-8", "replace").replace("/", "").replace("\0", "")
        if file == folder or file.name in {"", ".", ".."} or len(name) > 200:
            return "no file"
        same = file.exists() and file.read_bytes() == content
        file.write_bytes(content)
        if seal:
            write_sums(folder)
        known_checkpoints(Path(place))
        loaded = load_checkpoint(folder, LearnerConfig())
    assert same or seal, f"{file.name} was exchanged, and nobody saw it"
    assert loaded.state.step == loaded.learner.steps
    return None
