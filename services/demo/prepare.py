"""Makes the demo's model: a character tokenizer, random weights, and a short supervised warm start.

Returns a `PreparedModel`, with a folder that the run loads its model from. Guarantees that no prompt of the held-out
set is among those of the warm start or of training, whatever was cached. A cached model is used only if the very same
inputs made it (data, settings, seed, code, library versions); `cached` says whether it was.
"""

import hashlib
import importlib.metadata
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from lachesis.pipeline.common.disk import write_when_room_sync
from lachesis.pipeline.common.fsync import sync_tree
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.environment.spelling_tasks import SpellBackward
from lachesis.pipeline.trainer.config import WarmStartConfig
from lachesis.schemas.errors import ConfigError
from lachesis.services.demo.settings import TEACHER_FOLDER
from lachesis.services.run.deletion import MODEL_MARK

__all__ = [
    "PreparedModel",
    "cache_folder",
    "cache_key",
    "check_disjoint",
    "keep_model",
    "prepare",
    "prepare_teacher",
    "put_model",
]

WARM_START_PAIRS = 3000
TEACHER_STEPS = 600
"""Optimizer steps of the teacher that is distilled; the student has 220."""
ERROR_RATE = 0.6
"""Share of the demonstrations with a slip: more than the default, so that there is more for the reward to mend."""
HEADS = 4
_WIDTH = 96
_CODE = ("trainer/config.py", "model/policy.py", "model/tokenizer.py", "trainer/warmstart.py")
"""Modules of lachesis.pipeline that decide what the warm start makes."""
_LIBRARIES = ("tokenizers", "torch", "transformers")


class PreparedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model ready to be trained. `difficulties` has the declared difficulty of each task of the environment."""

    folder: str
    cached: bool
    key: str | None
    seconds: float
    difficulties: list[float | None]


def prepare(config: RunConfig, cache: Path, *, fresh: bool = False) -> PreparedModel:
    """Make the model, or find it in `cache`, and put a copy into the run's folder.

    Imports torch only to make one.

    Raises ConfigError when the environments are others than the demo's.
    """
    started = time.monotonic()
    train, held_out, warm = _pools(config)
    check_disjoint(train=train.prompt_hashes(), held_out=held_out.prompt_hashes(), warm_start=warm.prompt_hashes())
    difficulties = [train.task(index).difficulty for index in range(len(train))]
    key, cached = None, False
    folder = config.model
    if folder is None:
        pairs = list(warm.pairs())
        settings = WarmStartConfig(seed=config.seed, slips=ERROR_RATE)
        threads = config.training.threads
        heads = _heads(config)
        key = cache_key(pairs, settings, threads=threads, code=_code(), versions=_versions(), heads=heads)
        cached = keep_model(cache / key, lambda partial: _make(partial, pairs, settings, threads, heads), fresh=fresh)
        folder = str(put_model(cache / key, config))
    return PreparedModel(
        folder=folder,
        cached=cached,
        key=key,
        seconds=time.monotonic() - started,
        difficulties=difficulties,
    )


def prepare_teacher(config: RunConfig, cache: Path, *, fresh: bool = False) -> str:
    """Make a better model, or find it in `cache`, and put a copy into the run's folder, which is returned.

    It is of the same kind, and trained longer, on the tasks of the student's warm start without slips.
    """
    _, _, warm = _pools(config)
    pairs = list(warm.pairs())
    settings = WarmStartConfig(seed=config.seed + 1, slips=0.0, steps=TEACHER_STEPS)
    threads = config.training.threads
    heads = _heads(config)
    key = cache_key(pairs, settings, threads=threads, code=_code(), versions=_versions(), heads=heads)
    keep_model(cache / key, lambda partial: _make(partial, pairs, settings, threads, heads), fresh=fresh)
    return str(put_model(cache / key, config, TEACHER_FOLDER))


def keep_model(kept: Path, make: Callable[[Path], None], *, fresh: bool = False) -> bool:
    """Have `make` write a model into a folder and keep it as `kept`; return whether one was there already.

    It is written beside `kept` and moved there, so that a half-made one is never found.
    """
    if kept.is_dir() and not fresh:
        return True
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=kept.parent, prefix=".partial-"))
    make(partial)
    sync_tree(partial)  # what is found here is taken for whole, also after a power loss
    shutil.rmtree(kept, ignore_errors=True)
    try:
        partial.rename(kept)
    except OSError:  # another demo was quicker, and made the same
        shutil.rmtree(partial)
        if not kept.is_dir():
            raise
    return False


def put_model(kept: Path, config: RunConfig, name: str = "model") -> Path:
    """Copy a kept model into the run's folder, as `name`, and return where it is."""
    folder = config.path / name
    write_when_room_sync(folder, lambda: shutil.copytree(kept, folder, dirs_exist_ok=True))
    write_when_room_sync(folder, (folder / MODEL_MARK).touch)
    return folder


def check_disjoint(**splits: frozenset[str]) -> None:
    """Raise `AssertionError` if two sets of prompt hashes share one, which would make the gate worthless."""
    names = list(splits)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            common = splits[first] & splits[second]
            if common:
                raise AssertionError(f"{first} and {second} share {len(common)} prompts")


def cache_key(
    pairs: Iterable[tuple[str, str]],
    settings: WarmStartConfig,
    *,
    threads: int,
    code: Mapping[str, bytes],
    versions: Mapping[str, str],
    heads: int = HEADS,
) -> str:
    """Return the SHA-256 (hex, 24 digits) of everything that the warm start is a function of."""
    inputs = [
        list(pairs),
        settings,
        threads,
        heads,
        {name: hashlib.sha256(text).hexdigest() for name, text in code.items()},
    ]
    return hashlib.sha256(msgspec.json.encode([*inputs, dict(versions)], order="sorted")).hexdigest()[:24]


def cache_folder(environ: Mapping[str, str], fallback: Path) -> Path:
    """Return where prepared models are kept.

    The user's cache, or `fallback` where there is none to write to.
    """
    home = environ.get("XDG_CACHE_HOME") or (environ.get("HOME") and f"{environ['HOME']}/.cache")
    if home:
        folder = Path(home) / "lachesis" / "demo"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return fallback
        if os.access(folder, os.W_OK):
            return folder
    return fallback


def _pools(config: RunConfig) -> tuple[SpellBackward, SpellBackward, SpellBackward]:
    """Return the tasks of training, of evaluation and of the warm start."""
    (train,), (held_out,) = config.environments.values(), config.evaluation.values()
    if {train.kind, held_out.kind} != {"spell_backward"}:
        raise ConfigError("the demo's task is spell_backward; use `lachesis up` for runs of your own")
    warm: dict[str, Any] = {**train.params, "split": "warm_start", "size": WARM_START_PAIRS}
    return SpellBackward(**train.params), SpellBackward(**held_out.params), SpellBackward(**warm)


def _heads(config: RunConfig) -> int:
    """Return the attention heads of the model, of 96 numbers in all: fewer where an engine needs larger ones."""
    needed = max(config.role(role).spec.min_head_size for role in ("policy", *config.inference))
    return max(heads for heads in range(1, HEADS + 1) if _WIDTH % heads == 0 and _WIDTH // heads >= needed)


def _make(folder: Path, pairs: list[tuple[str, str]], settings: WarmStartConfig, threads: int, heads: int) -> None:
    """Train the model and write it into `folder`."""
    import torch

    from lachesis.pipeline.model.policy import build_tiny_policy, save_policy
    from lachesis.pipeline.model.tokenizer import common_beginning
    from lachesis.pipeline.trainer.warmstart import warm_start

    torch.set_num_threads(threads)
    policy = build_tiny_policy(
        settings.seed, phrases=[common_beginning(question for question, _ in pairs)], width=_WIDTH, heads=heads
    )
    warm_start(policy, pairs, settings)
    write_when_room_sync(folder, lambda: save_policy(policy, folder))


def _code() -> dict[str, bytes]:
    folder = Path(__file__).parents[2] / "pipeline"
    return {name: (folder / name).read_bytes() for name in _CODE}


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in _LIBRARIES}
