"""A tracker that is away delays nothing; what waits for it is sent in order, or dropped from the oldest on and said."""

from functools import partial

import anyio
import pytest
from unit.trainer.recorder import Recorder

from lachesis.pipeline.config.run import RunConfig, TrainingConfig
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.trainer.samples import ReadableSample
from lachesis.pipeline.trainer.tracker import RETRIES, Outbox
from lachesis.pipeline.trainer.tracking import CLOSE_S, open_tracking
from lachesis.schemas.errors import DataError


@pytest.fixture
def config(tmp_path):
    return RunConfig(folder=str(tmp_path), training=TrainingConfig(sample_rows=1))


async def sent(tracker, calls):
    while len(tracker.calls) < calls:  # noqa: ASYNC110 - it is called in a thread
        await anyio.sleep(0.01)


async def test_trackers_get_figures_samples_and_the_end_in_order(config):
    first, second = Recorder(), Recorder()
    async with open_tracking(config.path, config.training.sample_rows, [first, second]) as tracking:
        await tracking.resume(3)
        await tracking.log({"train/step": 4.0, "train/loss": 1.0})
        await tracking.add_figures({"eval/e/rate": 0.5})
        tracking.log_samples([ReadableSample("a", "prompt", "x" * 9000, 1.0), ReadableSample("b", "", "", None)])
    for tracker in (first, second):
        kinds = [call[0] for call in tracker.calls]
        assert kinds == ["open", "figures", "figures", "samples", "close"]
        assert [call[1] for call in tracker.calls[:-1]] == [3, 4, 4, 4]
        assert tracker.calls[2][2] == {"eval/e/rate": 0.5}
        ((sample,),) = [call[2] for call in tracker.calls if call[0] == "samples"]
        assert sample.item == "a"
        assert "[808 characters left out]" in sample.completion


async def test_a_tracker_that_is_away_holds_up_neither_steps_nor_the_others_and_is_named(config):
    notes = {}
    away, other = Recorder(*[InfrastructureError("no route")] * 2), Recorder()
    async with open_tracking(
        config.path, 16, [away, other], lambda name, text: notes.setdefault(name, []).append(text)
    ) as tracking:
        await tracking.resume(0)
        away.free.clear()
        for step in range(1, 4):
            await tracking.log({"train/step": float(step)})
        with anyio.fail_after(60):
            await sent(other, 4)
        assert away.calls == []
        away.free.set()
    assert [call[1] for call in away.calls if call[0] == "figures"] == [1, 2, 3]
    said = [text for text in notes["recorder"] if text]
    assert "send figures to recorder: no route" in said[0]
    assert "metrics.jsonl holds every figure" in said[0]
    assert notes["recorder"][-1] is None


async def test_what_does_not_fit_is_dropped_from_the_oldest_on_and_counted():
    tracker = Recorder()
    outbox = Outbox(tracker, lambda *_: None, max_bytes=100)
    sent = [outbox.put(partial(tracker.log_figures, {}, step), 40) for step in range(5)]
    assert [event.is_set() for event in sent] == [True, True, True, False, False]
    assert outbox.dropped == 3
    outbox.close()
    await outbox.send(0, lambda _: [])
    assert [call[1] for call in tracker.calls if call[0] == "figures"] == [3, 4]


async def test_one_entry_beyond_the_bound_is_sent_all_the_same():
    tracker = Recorder()
    outbox = Outbox(tracker, lambda *_: None, max_bytes=100)
    outbox.put(partial(tracker.log_figures, {}, 1), 1000)
    outbox.close()
    await outbox.send(0, lambda _: [])
    assert [call[0] for call in tracker.calls] == ["open", "figures", "close"]


async def test_what_a_tracker_refuses_is_left_out_and_logged(caplog):
    tracker = Recorder()
    outbox = Outbox(tracker, lambda *_: None)
    outbox.put(partial(tracker.log_figures, {}, 1), 1)
    outbox.put(partial(tracker.log_figures, {}, 2), 1)
    tracker.failures = [InfrastructureError("away"), None, DataError("too long a name")]
    outbox.close()
    await outbox.send(0, lambda _: [])
    assert [call[1] for call in tracker.calls[:-1]] == [0, 2]
    assert "recorder refuses what it was sent, which is left out: too long a name" in caplog.text


async def test_an_error_of_the_trainer_ends_the_context_although_a_tracker_hangs(config):
    tracker = Recorder()
    tracker.free.clear()

    async def train():
        async with open_tracking(config.path, config.training.sample_rows, [tracker]) as tracking:
            await tracking.resume(0)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await train()
    tracker.free.set()


@pytest.mark.parametrize(
    "failure", [DataError("no such project"), ValueError("Invalid project name"), AttributeError("None has no x")]
)
async def test_a_tracker_that_cannot_be_opened_gets_nothing_and_ends_nothing(failure):
    notes = {}
    tracker = Recorder(failure)
    outbox = Outbox(tracker, notes.__setitem__)
    sent = outbox.put(lambda: tracker.log_figures({}, 1), 1)
    outbox.close()
    with anyio.fail_after(60):
        await outbox.send(0, lambda _: [])
    assert sent.is_set()
    assert tracker.calls == []
    assert "recorder cannot be opened, so it gets nothing" in notes["recorder"]
    assert str(failure) in notes["recorder"]


async def test_an_error_of_a_trackers_own_code_leaves_out_one_entry():
    tracker = Recorder(None, KeyError("a bug"))
    outbox = Outbox(tracker, lambda *_: None)
    for step in (1, 2):
        outbox.put(lambda step=step: tracker.log_figures({}, step), 1)
    outbox.close()
    with anyio.fail_after(60):
        await outbox.send(0, lambda _: [])
    assert [call[:2] for call in tracker.calls] == [("open", 0), ("figures", 2), ("close",)]


def test_a_tracker_that_is_back_before_the_end_is_called_again_in_time():
    assert all(3 * RETRIES.pause_s(failures) < CLOSE_S for failures in range(1, 100))
