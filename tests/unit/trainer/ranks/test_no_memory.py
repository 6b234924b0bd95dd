"""A rank that alone runs out of memory says so and ends, instead of leaving the others to wait for it."""

from types import SimpleNamespace

import anyio
import pytest
import torch

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.config.trainer_settings import trainer_settings
from lachesis.pipeline.errors import OutOfMemoryError
from lachesis.pipeline.trainer.collectives import Ranks
from lachesis.pipeline.trainer.ranks import follower, leader
from lachesis.pipeline.trainer.ranks.leader import EXIT_NO_MEMORY, Leader
from lachesis.pipeline.trainer.ranks.messages import Fetched, NoMemory, TrainNext

TEXT = "an optimizer step does not fit into memory: 8 bytes were requested"


class EndedError(Exception):
    """Stands for the end of a process."""


class Stream:
    """A connection of which the other end is the test."""

    def __init__(self, *received):
        self.received, self.sent = list(received), []

    async def send(self, message):
        self.sent.append(message)

    async def receive(self):
        if not self.received:
            raise anyio.EndOfStream
        return self.received.pop(0)


@pytest.mark.parametrize("sharded", [None, object()], ids=["whole", "sharded"])
async def test_a_rank_says_what_did_not_fit_and_ends(monkeypatch, sharded):
    def train_batch(*_, **__):
        raise OutOfMemoryError(TEXT)

    def end_process(code):
        raise EndedError(code)

    monkeypatch.setattr(follower, "train_batch", train_batch)
    monkeypatch.setattr(follower, "end_process", end_process)
    monkeypatch.setattr(follower, "GRACE_S", 0.0)
    entry = SimpleNamespace(index=4, digest=lambda: "d")
    batch = SimpleNamespace(entry=entry, batch=SimpleNamespace(number=3))
    learner = SimpleNamespace(ranks=Ranks(1, 2), sharded=sharded)
    start = SimpleNamespace(limits=None, pad_id=0, shuffle_seed=None)
    stream = Stream()
    with pytest.raises(EndedError, match=str(EXIT_NO_MEMORY)):
        await follower._train_next(TrainNext(4, "d"), batch, start, learner, stream)
    assert stream.sent == [Fetched(4), NoMemory(TEXT)]


async def test_rank_0_ends_with_the_same_code_and_the_text(monkeypatch):
    codes = []
    monkeypatch.setattr(leader, "end_process_after", lambda _seconds, code: codes.append(code))
    one = Leader(trainer_settings(RunConfig()), torch.device("cpu"), starts_ranks=True)
    with pytest.raises(OutOfMemoryError, match=r"rank 1 of the trainer ran out of memory \(an optimizer step does"):
        await one.listen(Stream(NoMemory(TEXT)), 1)
    assert codes == [EXIT_NO_MEMORY]
