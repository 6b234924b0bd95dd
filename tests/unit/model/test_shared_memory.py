"""Weights in shared memory: one copy, which a reader sees as it changes, and never takes for another."""

import fcntl
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lachesis.pipeline.errors import NotFoundError
from lachesis.pipeline.model.config import LoraConfig
from lachesis.pipeline.model.policy import ModelSetup, build_tiny_policy, load_model, save_policy
from lachesis.pipeline.model.segment_layout import place_tensors
from lachesis.pipeline.model.shared_memory import SegmentReader, WeightSegment, read_pointer, segment_pointer
from lachesis.pipeline.model.tensors import policy_tensors, policy_version, weights_digest
from lachesis.pipeline.trainer.adapters import load_trainable_model
from lachesis.schemas.errors import ConfigError, DataError

OWNER = """
import sys
from pathlib import Path
from lachesis.pipeline.model.policy import build_tiny_policy
from lachesis.pipeline.model.shared_memory import WeightSegment
segment = WeightSegment.share(build_tiny_policy(0, width=32, layers=1, max_length=32).model)
segment.announce(Path(sys.argv[1]))
with segment.changing():
    print("changing", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def policy():
    return build_tiny_policy(0, width=32, layers=2, max_length=32)


@pytest.fixture
def segment(policy, tmp_path):
    segment = WeightSegment.share(policy.model)
    segment.announce(tmp_path)
    yield segment
    segment.close(tmp_path)


def reader_of(folder):
    return SegmentReader(segment_pointer(folder))


def named(policy, segment, step=0):
    version = policy_version(step, "a", policy_tensors(policy.model))
    segment.publish(version)
    return version


def test_sharing_changes_no_weight_and_a_reader_finds_each_under_its_name(policy, tmp_path):
    before = weights_digest(policy_tensors(policy.model))
    segment = WeightSegment.share(policy.model)
    segment.announce(tmp_path)
    assert weights_digest(policy_tensors(policy.model)) == before
    assert weights_digest(reader_of(tmp_path).tensors) == before


def test_what_the_optimizer_does_is_what_a_reader_has(policy, segment, tmp_path):
    reader = reader_of(tmp_path)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-2)
    tokens = torch.tensor([[5, 6, 7, 8]])
    policy.model(input_ids=tokens, labels=tokens).loss.backward()
    before = weights_digest(reader.tensors)
    with segment.changing():
        optimizer.step()
    after = weights_digest(policy_tensors(policy.model))
    assert weights_digest(reader.tensors) == after != before
    assert reader.check_version(named(policy, segment)) == 2


def test_shared_weights_are_saved_and_loaded_as_any_others(policy, segment, tmp_path):
    save_policy(policy, tmp_path / "saved")
    saved = load_model(tmp_path / "saved")
    assert weights_digest(policy_tensors(saved.model)) == weights_digest(policy_tensors(policy.model))


def test_tensors_that_vllm_joins_lie_side_by_side_and_those_of_the_vocabulary_have_room_behind():
    names = [
        f"layers.{layer}.attn.{name}_proj.{kind}" for layer in (0, 10) for name in "vkq" for kind in ("weight", "bias")
    ]
    tensors = {name: torch.zeros(3, 5) if name.endswith("weight") else torch.zeros(3) for name in names}
    tensors["embed.weight"] = torch.zeros(70, 5)
    places, size = place_tensors(tensors, 70)
    found = {place.name: place for place in places}
    for layer in (0, 10):
        q, k, v = (found[f"layers.{layer}.attn.{name}_proj.weight"] for name in "qkv")
        assert (k.offset, v.offset) == (q.offset + 60, q.offset + 120)
    assert found["embed.weight"].reserved == 128 * 5 * 4
    ends = sorted((place.offset, place.offset + place.reserved) for place in places)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    assert ends[-1][1] == size


def test_a_model_in_bfloat16_is_refused_and_its_tensors_are_named(policy):
    with pytest.raises(ConfigError, match=r"float32 on one device.*embed_tokens\.weight is torch\.bfloat16 on cpu"):
        WeightSegment.share(policy.model.bfloat16())


def test_a_model_with_adapters_is_refused(policy, tmp_path):
    save_policy(policy, tmp_path)
    adapted = load_trainable_model(tmp_path, ModelSetup(lora=LoraConfig(rank=2)))
    with pytest.raises(ConfigError, match=r"leave training\.lora out"):
        WeightSegment.share(adapted.model)


def test_weights_have_no_version_from_the_first_change_until_they_are_named(policy, segment, tmp_path):
    reader = reader_of(tmp_path)
    version = named(policy, segment)
    assert reader.check_version(version) == 0
    with segment.changing():
        pass
    with pytest.raises(DataError, match=f"holds policy version '', not '{version}'"):
        reader.check_version(version)
    assert reader.check_version(named(policy, segment, 1)) == 2


def test_no_reader_computes_while_the_weights_change(segment, tmp_path):
    reader = reader_of(tmp_path)
    with segment.changing(), segment_pointer_file(tmp_path) as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    with reader.reading(), segment_pointer_file(tmp_path) as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def segment_pointer_file(folder):
    return Path(read_pointer(segment_pointer(folder)).path).open("rb")


def test_weights_that_an_error_has_torn_are_never_served(policy, segment, tmp_path):
    version = named(policy, segment)
    with pytest.raises(ZeroDivisionError), segment.changing():
        raise ZeroDivisionError
    segment.publish(version)
    with pytest.raises(DataError, match="are torn"):
        reader_of(tmp_path).check_version(version)


def test_a_step_that_the_learner_has_taken_back_leaves_whole_weights(policy, segment, tmp_path):
    with pytest.raises(DataError), segment.changing():
        raise DataError("too large")
    assert reader_of(tmp_path).check_version(named(policy, segment)) == 2


@pytest.mark.slow
def test_a_trainer_killed_in_a_step_leaves_torn_weights_to_its_readers_and_nothing_to_others(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "changing\n"
        reader = reader_of(tmp_path)
        owner.kill()
    assert all(tensor.isfinite().all() for tensor in reader.tensors.values())
    with pytest.raises(DataError, match="are torn"):  # the lock went with its process
        reader.check_version(policy_version(0, "a", reader.tensors))
    with pytest.raises(NotFoundError, match="the trainer that made it has ended"):
        reader_of(tmp_path)


def test_a_pointer_that_leads_to_another_generation_or_to_no_segment_is_refused(segment, tmp_path):
    pointer = segment_pointer(tmp_path)
    named = json.loads(pointer.read_text())
    other = tmp_path / "other"
    other.write_bytes(b"something else" * 100)
    with other.open("rb") as file:
        for text, reason in (
            (named | {"generation": "0" * 32}, "is not generation '00000000'"),
            (named | {"path": f"/proc/self/fd/{file.fileno()}"}, "no open file|an open file of a process"),
            (named | {"path": "/etc/passwd"}, "a segment is an open file of a process"),
        ):
            pointer.write_text(json.dumps(text))
            with pytest.raises(DataError, match=reason):
                reader_of(tmp_path)
    pointer.unlink()
    with pytest.raises(NotFoundError, match="no trainer of this run shares its weights"):
        reader_of(tmp_path)


def test_a_closed_segment_takes_its_own_pointer_back_and_no_other(policy, tmp_path):
    first = WeightSegment.share(policy.model)
    first.announce(tmp_path)
    second = WeightSegment.share(build_tiny_policy(1, width=32, layers=1, max_length=32).model)
    second.announce(tmp_path)
    first.close(tmp_path)
    assert read_pointer(segment_pointer(tmp_path)) == second.pointer
    second.close(tmp_path)
    assert not segment_pointer(tmp_path).exists()
