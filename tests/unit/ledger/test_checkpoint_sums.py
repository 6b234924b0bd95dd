"""Checksums of a folder, in the form of b3sum."""

import errno
from hashlib import sha256

import pytest
from blake3 import blake3

from lachesis.pipeline.errors import CheckpointError
from lachesis.pipeline.ledger import checkpoint_sums
from lachesis.pipeline.ledger.checkpoint_sums import verify_sums, write_sums

FILES = {"model.safetensors": bytes(range(256)) * 9001, "trainer.json": b"{}", "adapter/a.json": b"1", "none": b""}


@pytest.fixture
def folder(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def sums(digest):
    return "".join(f"{digest(FILES[name]).hexdigest()}  {name}\n" for name in sorted(FILES))


def test_what_is_written_is_what_b3sum_reads(folder):
    write_sums(folder)
    assert (folder / "B3SUMS").read_text() == sums(blake3)
    verify_sums(folder)


def test_whatever_differs_is_named(folder):
    write_sums(folder)
    verify_sums(folder)
    for name, content in FILES.items():
        (folder / name).write_bytes(content[:-1] + b"\0" if content else b"x")
        with pytest.raises(CheckpointError, match=f"{name} is not what was written"):
            verify_sums(folder)
        (folder / name).unlink()
        with pytest.raises(CheckpointError, match=f"{name}: missing"):
            verify_sums(folder)
        (folder / name).write_bytes(content)
    (folder / "more").write_bytes(b"")
    with pytest.raises(CheckpointError, match="more: not its own"):
        verify_sums(folder)


def test_sums_of_another_program_are_none(folder):
    (folder / "SHA256SUMS").write_text(sums(sha256))
    with pytest.raises(CheckpointError, match="its B3SUMS cannot be read"):
        verify_sums(folder)


@pytest.mark.parametrize("text", ["", "x\n", sums(sha256)])
def test_sums_that_are_none(folder, text):
    with pytest.raises(CheckpointError, match="its B3SUMS cannot be read"):
        verify_sums(folder)
    (folder / "B3SUMS").write_text(text)
    with pytest.raises(CheckpointError, match=r"its B3SUMS is damaged|is not what was written"):
        verify_sums(folder)


def test_a_file_that_the_disk_does_not_give_back_is_named(folder, monkeypatch):
    write_sums(folder)

    def fail(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(checkpoint_sums, "_digest", fail)
    with pytest.raises(CheckpointError, match="cannot be read: Input/output error"):
        verify_sums(folder)
