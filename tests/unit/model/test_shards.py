"""An index of weights comes from elsewhere: it names files of its own folder, or is refused before one is opened."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from lachesis.pipeline.model.policy import PolicyModel, build_tiny_policy, load_model, save_policy
from lachesis.pipeline.model.shards import INDEX_FILE, weight_file_names
from lachesis.pipeline.model.source import find_model
from lachesis.schemas.errors import ConfigError

pytestmark = pytest.mark.hostile

FOREIGN = [
    "../outside.safetensors", "/etc/passwd", "/etc/x.safetensors", "sub/model.safetensors", "..", ".", "", "model.bin",
    "..\\outside.safetensors", "a\0.safetensors", "model.safetensors/../../outside.safetensors", 3, None, ["a"],
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in several files, as large ones are."""
    policy = build_tiny_policy(0, width=32, layers=1, heads=2, max_length=64)
    save_policy(policy, tmp_path / "model")
    policy.model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    (tmp_path / "model" / "model.safetensors").unlink(missing_ok=True)
    save_file({"outside": torch.zeros(1)}, tmp_path / "outside.safetensors")
    return tmp_path / "model"


def rename_a_shard(folder: Path, name: object) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = name
    (folder / INDEX_FILE).write_text(json.dumps(index))


def test_a_model_in_several_files_is_loaded(folder: Path) -> None:
    assert len(weight_file_names(folder)) > 1
    assert find_model(str(folder)).local_files_only
    assert isinstance(load_model(folder), PolicyModel)


def test_without_an_index_there_is_one_file(tmp_path: Path) -> None:
    assert weight_file_names(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_outside_of_the_folder_is_not_opened(folder: Path, name: object) -> None:
    rename_a_shard(folder, name)
    for read in (weight_file_names, lambda path: find_model(str(path)), load_model):
        with pytest.raises(ConfigError, match=INDEX_FILE):
            read(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', "[" * 100_000, "\xff"])
def test_an_index_that_is_none_is_named(folder: Path, text: str) -> None:
    (folder / INDEX_FILE).write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=INDEX_FILE):
        weight_file_names(folder)


class _Worker:
    execute_model = sample_tokens = staticmethod(lambda: None)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """vLLM's half of a weight update, with stubs in the place of vLLM: what it reads of a model's folder is our own."""
    transfer, reload = "vllm.distributed.weight_transfer", "vllm.model_executor.model_loader.reload"
    members = {
        "vllm": {}, "vllm._custom_ops": {}, "vllm.distributed": {}, transfer: {},
        f"{transfer}.base": {"WeightTransferEngine": object},
        f"{transfer}.factory": {"WeightTransferEngineFactory": SimpleNamespace(register_engine=lambda *_: None)},
        "vllm.model_executor": {}, "vllm.model_executor.model_loader": {},
        "vllm.v1": {}, "vllm.v1.worker": {}, "vllm.v1.worker.gpu_worker": {"Worker": _Worker},
        reload: {"finalize_layerwise_reload": None, "initialize_layerwise_reload": None},
    }  # fmt: skip
    for name, content in members.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    monkeypatch.delitem(sys.modules, "lachesis.pipeline.inference.engines.vllm.worker", raising=False)
    found = importlib.import_module("lachesis.pipeline.inference.engines.vllm.worker")
    monkeypatch.delitem(sys.modules, "lachesis.pipeline.inference.engines.vllm.worker")
    return found


def test_vllm_opens_no_file_outside_of_the_folder(worker: ModuleType, folder: Path) -> None:
    model = SimpleNamespace(model=str(folder), hf_text_config=None)
    form = worker._published_form(SimpleNamespace(model_config=model))
    assert "model.embed_tokens.weight" in form
    rename_a_shard(folder, "../outside.safetensors")
    with pytest.raises(ConfigError, match="outside"):
        worker._published_form(SimpleNamespace(model_config=model))
