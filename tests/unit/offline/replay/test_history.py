"""History fetched one by one: a rollout that cannot be put together is passed on as that, and hides no other."""

import pytest
from unit.offline.replay.test_stage import CONFIG, stored

from lachesis.pipeline.offline.replay.outage import retrying
from lachesis.pipeline.offline.replay.scoring import ReplayScorer
from lachesis.pipeline.offline.replay.selected import SelectedRollout, fetched
from lachesis.schemas.errors import DataError


class Torn:
    """A bus that lacks a chunk of the large messages at some sequences."""

    def __init__(self, bus, torn):
        self._bus, self._torn = bus, torn
        self.subjects = []

    async def fetch(self, stream, seqs, subject=None):
        self.subjects.append(subject)
        for seq in seqs:
            if seq in self._torn:
                raise DataError(f"large message {seq}: a chunk is gone")
            yield await self._bus.get(stream, seq)


async def test_what_cannot_be_put_together_has_no_score_and_the_others_have(lab):
    await stored(lab, 4)
    wanted = [SelectedRollout("sums", seq, f"{seq:032x}") for seq in range(1, 5)]
    judge = ReplayScorer(CONFIG, ["sums"], retrying)
    found = [
        await judge.score_rollout("sums", message) async for message in fetched(Torn(lab.bus, {2, 4}), "r", wanted)
    ]
    assert [verdict.score is not None for verdict in found] == [True, False, True, False]
    assert "large message 2: a chunk is gone" in found[1].reason


@pytest.mark.parametrize(("step", "subject"), [(1, "rl.rollout.r.sums"), (20, None)])
async def test_what_lies_close_together_is_asked_for_by_its_subject(lab, step, subject):
    await stored(lab, 100)
    wanted = [SelectedRollout("sums", seq, "") for seq in range(1, 101, step)]
    bus = Torn(lab.bus, {wanted[0].seq, wanted[2].seq})
    assert [message.seq async for message in fetched(bus, "r", wanted)] == [found.seq for found in wanted]
    assert bus.subjects == [subject] * 3
