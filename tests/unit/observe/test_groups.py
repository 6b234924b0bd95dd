"""Groups as people look at them: rows, filters, one with its samples, and reading them newest first."""

import json
import time
from contextlib import aclosing
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig, TrainingConfig
from lachesis.pipeline.errors import NotFoundError
from lachesis.schemas import subjects
from lachesis.schemas.annotations import Commit, GroupReward, GroupScore, RewardEvent, ScoreEvent
from lachesis.schemas.codec import encode
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.ledger import TrainReport
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.rollout import Message, ToolCall
from lachesis.schemas.sequences import VersionSpan
from lachesis.services.observe import group_reader
from lachesis.services.observe.group_detail import TokenWindow, read_group_detail
from lachesis.services.observe.group_reader import follow_groups, newest_groups, read_group, read_group_page
from lachesis.services.observe.groups import GroupFilter, GroupOrder, GroupRow, NumberRange, has_text, left_out_samples

CONFIG = RunConfig(run="r", environments={name: EnvironmentConfig(kind="x") for name in ("sums", "words")})
ROW = GroupRow(
    group="0" * 32, seq=7, env="sums", item="Add 1 and 2", stored_ns=1, policy_step=3, samples=2, tokens=8,
    state="trained", reason=None, step=5, score=0.5, low=0.0, high=1.0, disagreement=None, advantage=1.5,
    ratings={"short": 0.25, "right": None},
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [("0.2:0.5", (0.2, 0.5), (0.1, 0.6)), ("0.2:", (0.2, 9), (0.1,)), (":3", (-1, 3), (4,)), ("3", (3, 3.0), (2, 4))],
)
def test_a_range_is_written_low_to_high(text: str, inside: tuple[float, ...], outside: tuple[float, ...]) -> None:
    found = NumberRange.parse(text)
    assert all(value in found for value in inside)
    assert not any(value in found for value in (*outside, None))


@pytest.mark.parametrize("text", ["", ":", "a:b", "1:2:3"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no range of numbers"):
        NumberRange.parse(text)


@pytest.mark.parametrize(
    ("wanted", "takes"),
    [
        ({}, True),
        ({"envs": ["words"]}, False),
        ({"states": ["stale", "trained"]}, True),
        ({"states": ["stale"]}, False),
        ({"item": "ADD 1"}, True),
        ({"item": "7"}, False),
        ({"score": NumberRange(0.5, None), "step": NumberRange(5, 5)}, True),
        ({"score": NumberRange(0.6, None)}, False),
        ({"disagreement": NumberRange(None, 9)}, False),
        ({"ratings": {"short": NumberRange(0.2, 0.3)}}, True),
        ({"ratings": {"short": NumberRange(0.3, None)}}, False),
        ({"ratings": {"short": NumberRange(0.2, None), "right": NumberRange(0, None)}}, False),
        ({"ratings": {"unknown": NumberRange(0, None)}}, False),
    ],
)
def test_a_filter_wants_all_that_it_names(wanted: dict[str, Any], takes: bool) -> None:
    assert GroupFilter(**wanted).takes(ROW) is takes


async def test_text_is_looked_for_in_what_is_said_and_in_calls(lab) -> None:
    call = Message(role="assistant", content="", tool_calls=[ToolCall(name="f", arguments='{"City": "Oslo"}')])
    group = lab.group(1, messages=[[Message(role="user", content="Where?"), call]] * 2)
    assert has_text(group, "WHERE")
    assert has_text(group, "oslo")
    assert not has_text(group, "assistant")


@pytest.mark.parametrize(
    ("metadata", "left_out"),
    [
        ({"failed_samples": [{"sample": 2, "error": "no reward", "text": ""}]}, {2: "no reward"}),
        ({"failed_samples": [{"sample": "x"}, 7]}, {}),
        ({"failed_samples": {"sample": 1}}, {}),
        ({}, {}),
    ],
)
async def test_why_samples_are_left_out_is_read_from_metadata_that_anybody_may_have_written(
    lab, metadata: dict[str, Any], left_out: dict[int, str]
) -> None:
    assert left_out_samples(lab.group(1, metadata=metadata)) == left_out


async def judge(
    lab, group, seq: int, scores: list[float | None], turn_advantages: list[list[float] | None] | None = None
) -> None:
    """Store a score by two raters, and the reward that follows."""
    about = {"group": group.id, "seq": seq, "item": group.item, "policy_step": 0}
    statuses = {"b": ["ok" if value is not None else "timeout" for value in scores]}
    score = GroupScore(
        **about, scores=scores, ratings={"a": [1.0] * len(scores), "b": scores}, lengths=[3] * len(scores),
        statuses=statuses, disagreement=(0.25, 0.5), failures={"b": "too slow"},
        figures={"a/flipped": [0.25] * len(scores), "a/unit": [None, *[1.0] * (len(scores) - 1)]},
    )  # fmt: skip
    event = ScoreEvent(run="r", env=group.env, revision="live", ensemble="e", raters={}, groups=[score])
    await lab.bus.publish(subjects.event("score", "r", "live", group.env), encode(event), msg_id=f"s{seq}")
    reward = GroupReward(
        **about, verdict="trainable", scores=scores, rewards=scores, advantages=[-2.0, 1.0][: len(scores)],
        snapshot="s", mean=0.5, std=0.5, range=1.0, n_valid=2, turn_advantages=turn_advantages or [],
    )  # fmt: skip
    commit = Commit(term="t", index=seq, cursors={}, delta=b"", crc32=0)
    event = RewardEvent(run="r", env=group.env, revision="live", advantage="grpo", commit=commit, groups=[reward])
    await lab.bus.publish(subjects.event("reward", "r", "live", group.env), encode(event), msg_id=f"w{seq}")


def test_a_rating_is_filtered_by_its_rater_whose_name_may_hold_anything() -> None:
    wanted = GroupFilter.parse(ranges={}, ratings=["a=b=0.5:", "short=1"])
    assert wanted.ratings == {"a=b": NumberRange(0.5, None), "short": NumberRange(1, 1)}
    for wrong in ("short", "=1:", "short=", "short=x:"):
        with pytest.raises(ConfigError, match="--rating"):
            GroupFilter.parse(ranges={}, ratings=[wrong], prefix="--")


def test_an_order_compares_one_figure_and_leaves_out_rows_without_it() -> None:
    order = GroupOrder.parse("short", None)
    assert order is not None
    assert (order.key(ROW), GroupOrder("short", highest=False).key(ROW)) == (0.25, -0.25)
    assert (GroupOrder("right").key(ROW), GroupOrder("unknown").key(ROW), GroupOrder("item").key(ROW)) == (None,) * 3
    assert (GroupOrder("score").key(ROW), GroupOrder("advantage").key(ROW)) == (0.5, 1.5)
    assert GroupOrder.parse(None, None) is None
    with pytest.raises(ConfigError, match="give one of them"):
        GroupOrder.parse("short", "short")


async def listed(lab, wanted: GroupFilter, **options: Any) -> list[GroupRow]:
    async with aclosing(newest_groups(lab.bus, CONFIG, wanted, **options)) as rows:
        return [row async for row in rows]


async def test_the_newest_come_first_each_once_whatever_is_read_at_a_time(lab, monkeypatch) -> None:
    groups = [lab.group(n, env="words" if n % 3 == 0 else "sums") for n in range(20)]
    seqs = [await lab.store(group) for group in groups]
    for reach in (1, 3, 100):
        monkeypatch.setattr(group_reader, "_FIRST_MESSAGES", reach)
        assert [row.seq for row in await listed(lab, GroupFilter())] == seqs[::-1]
        assert [row.seq for row in await listed(lab, GroupFilter(envs=["words"]))] == seqs[::3][::-1]
        older = await listed(lab, GroupFilter(), before=seqs[5])
        assert [row.seq for row in older] == seqs[:5][::-1]
    told: list[tuple[int, int]] = []
    await listed(lab, GroupFilter(), progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (20, 20)
    assert {row.state for row in older} == {"under way"}
    assert older[0].reason == "waits for the scorer"


async def test_a_row_says_what_became_of_the_group_and_what_everybody_made_of_it(lab) -> None:
    group = lab.group(
        1, messages=[[Message(role="user", content="q"), Message(role="assistant", content=a)] for a in "xy"]
    )
    (*_, entry) = await lab.extend_ledger([group])
    seq = entry.batch.groups[0].seq
    await judge(lab, group, seq, [0.0, None])
    (row,) = await listed(lab, GroupFilter())
    assert (row.state, row.step, row.reason) == ("batched", 1, "waits for the trainer: batch 0")
    assert (row.score, row.low, row.high, row.disagreement, row.advantage) == (0.0, 0.0, 0.0, 0.25, 2.0)
    report = TrainReport(
        run="r", trainer="main", lineage="l", term="t", step=1, ledger_index=1, chain="c", next_batch=1,
        policy_version="1-a-b", checkpoint="c", written_ns=1,
    )  # fmt: skip
    subject = subjects.state("r", "trainer", subjects.LIVE, "main")
    await lab.bus.publish(subject, encode(report), msg_id="report")
    assert [row.state for row in await listed(lab, GroupFilter(states=["trained"]))] == ["trained"]
    assert await listed(lab, GroupFilter(text="nowhere")) == []
    assert len(await listed(lab, GroupFilter(text="Y"))) == 1

    view = await read_group(lab.bus, CONFIG, group.id[-4:])
    assert [message.content for message in view.prompt] == ["q"]
    first, second = view.samples
    assert [message.content for message in (*first.messages, *second.messages)] == ["x", "y"]
    assert (first.ratings, first.statuses, first.advantage) == ({"a": 1.0, "b": 0.0}, {}, -2.0)
    assert (first.figures, second.figures) == ({"a/flipped": 0.25}, {"a/flipped": 0.25, "a/unit": 1.0})
    assert (second.ratings["b"], second.statuses, second.score) == (None, {"b": "timeout"}, None)
    assert (view.row.state, view.failures, view.verdict) == ("trained", {"b": "too slow"}, "trainable")
    assert first.logprob == pytest.approx(-1.0)
    assert msgspec.json.decode(msgspec.json.encode(view), type=type(view)) == view
    with pytest.raises(NotFoundError, match="no rollout of run r"):
        await read_group(lab.bus, CONFIG, "f" * 32)


async def test_turns_and_branches_are_shown_with_their_rewards_and_advantages(lab) -> None:
    group = lab.group(1, samples=3)
    talk = [Message(role="user", content="q"), Message(role="assistant", content="a")]
    sequences = msgspec.structs.replace(
        group.sequences, sample_index=[0, 0, 1], rewards={"environment": [0.0, 1.0]}, turn_rewards=[[1.0, 2.0], [0.5]],
        turn_parents=[[-1, -1], [-1]],
    )  # fmt: skip
    group = group.replace(sequences=sequences, messages=[talk, talk])
    seq = await lab.store(group)
    assert [len(one.turns) for one in (await read_group(lab.bus, CONFIG, group.id)).samples] == [2, 1]
    await judge(lab, group, seq, [0.0, 1.0], [[3.0, -4.0], None])
    view = await read_group(lab.bus, CONFIG, group.id)
    assert view.row.advantage == 4.0
    first, second = view.samples
    assert (first.branches, second.branches) == (2, 1)
    assert [(one.reward, one.advantage, one.continues) for one in first.turns] == [(1.0, 3.0, -1), (2.0, -4.0, -1)]
    assert [(one.reward, one.advantage) for one in second.turns] == [(0.5, None)]
    detail = await read_group_detail(lab.bus, CONFIG, group.id, TokenWindow(limit=100))
    assert [one.advantages for one in detail.tokens] == [[0.0, 3.0, 3.0, 3.0], [0.0, -4.0, -4.0, -4.0], None]


async def test_the_calls_of_a_sample_are_shown_with_what_each_read_and_sampled(lab) -> None:
    """The first sample has two sequences: two calls, across a new policy, and one of a sub-agent between them."""
    group = lab.group(1, samples=3)
    masks = [[0, 0, 1, 1, 0, 1, 1], [0, 1], [0, 1, 1]]
    cuts = [0, 7, 9, 12]
    sequences = msgspec.structs.replace(
        group.sequences,
        offsets=as_bytes(cuts, "int32"),
        tokens=as_bytes([5] * 12, "int32"),
        loss_mask=pack_mask(np.array([one for mask in masks for one in mask], bool)),
        logprobs=None,
        finish_reasons=["length", "stop", "stop"],
        version_spans=[VersionSpan(0, 0, 0), VersionSpan(0, 6, 1), VersionSpan(1, 0, 1), VersionSpan(2, 0, 0)],
        sample_index=[0, 0, 1],
        rewards={"environment": [0.0, 1.0]},
        turn_rewards=[[0.0, 1.0, 2.0], [0.0]],
        turn_order=[[0, 2, 1], [0]],
    )
    versions = ["3-a-b", "4-a-c"]
    talk = [Message(role="user", content="q"), Message(role="assistant", content="a")]
    group = group.replace(sequences=sequences, messages=[talk, talk], policy_versions=versions)
    await lab.store(group)
    first, second = (await read_group(lab.bus, CONFIG, group.id)).samples
    assert [(one.sequence, one.start, one.new, one.tokens) for one in first.calls] == [
        (0, 2, 2, 2),
        (0, 5, 1, 2),
        (1, 1, 1, 1),
    ]
    assert [(one.steps, one.finish_reason, one.turn) for one in first.calls] == [
        ((3, 3), None, 0),
        ((3, 4), "length", 2),
        ((4, 4), "stop", 1),
    ]
    assert second.calls == []


async def test_the_groups_of_an_optimizer_step_are_found_by_the_ledger(lab, monkeypatch) -> None:
    """Without reading what lies after them, wherever in a long ledger the step is."""
    monkeypatch.setattr(group_reader, "_FIRST_MESSAGES", 1)
    made = [lab.group(n) for n in range(300)]
    await lab.extend_ledger(*([one] for one in made))
    read = []
    original = group_reader.read_rollouts

    async def noting(bus, config, envs, *, first, last):
        read.append((first, last))
        return await original(bus, config, envs, first=first, last=last)

    monkeypatch.setattr(group_reader, "read_rollouts", noting)
    for step in (1, 2, 150, 299, 300):
        rows = await listed(lab, GroupFilter(step=NumberRange(step, step)))
        assert [(row.group, row.step) for row in rows] == [(made[step - 1].id, step)]
    assert [last - first for first, last in read] == [0] * 5
    assert [row.step for row in await listed(lab, GroupFilter(step=NumberRange(4, 6)))] == [6, 5, 4]
    assert len(await listed(lab, GroupFilter(step=NumberRange(299, None)))) == 2
    assert len(await listed(lab, GroupFilter(step=NumberRange(None, 2)))) == 2
    for none in (NumberRange(301, 400), NumberRange(None, 0), NumberRange(-5, -1), NumberRange(float("nan"), None)):
        assert await listed(lab, GroupFilter(step=none)) == []


async def test_a_step_that_no_checkpoint_has_yet_is_said_alike_in_the_list_and_of_one_group(lab, tmp_path) -> None:
    made = [lab.group(n) for n in range(2)]
    await lab.extend_ledger(*([one] for one in made))
    figures = {"train/step": 1, "train/time": 1_700_000_000.5, "latency/trainer/proc/p50": 0.25}
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(figures)}\n")
    config = msgspec.structs.replace(CONFIG, folder=str(tmp_path))
    rows = (await read_group_page(lab.bus, config, GroupFilter(), limit=9)).rows
    assert [(row.group, row.state) for row in rows] == [(made[1].id, "batched"), (made[0].id, "trained")]
    assert [(await read_group(lab.bus, config, row.group)).row.state for row in rows] == ["batched", "trained"]
    trained = (await read_group_page(lab.bus, config, GroupFilter(states=["trained"]), limit=9)).rows
    assert [row.group for row in trained] == [made[0].id]


@pytest.mark.parametrize("ahead_ms", [-600_000, -50, 0, 10_000, 59_000])
async def test_a_group_is_found_by_its_id_whatever_its_producers_clock(lab, ahead_ms) -> None:
    now_ms = time.time_ns() // 1_000_000
    for n in range(100):
        await lab.store(lab.group(n, id=f"{now_ms:012x}{n:020x}"))
    wanted = lab.group(100, id=f"{now_ms + ahead_ms:012x}{100:020x}")
    await lab.store(wanted)
    for n in range(101, 200):
        await lab.store(lab.group(n, id=f"{now_ms:012x}{n:020x}"))
    assert (await read_group(lab.bus, CONFIG, wanted.id)).item == wanted.item


async def test_of_a_group_that_is_stored_twice_the_first_is_judged(lab) -> None:
    group = lab.group(1)
    first = await lab.store(group)
    headers = {PLAN_HEADER: Plan.of(group).pack()}
    await lab.bus.publish(subjects.rollout("r", "sums"), encode(group), msg_id="again", headers=headers)
    await judge(lab, group, first, [1.0, 0.0])
    assert [row.score for row in await listed(lab, GroupFilter())] == [None, 0.5]


async def test_followed_groups_come_as_it_is_decided_what_becomes_of_them(lab) -> None:
    await lab.extend_ledger([lab.group(1)])
    found: list[str] = []

    async def follow() -> None:
        async with aclosing(follow_groups(lab.bus, CONFIG, GroupFilter(envs=["sums"]))) as rows:
            async for row in rows:
                found.append(row.group)  # noqa: PERF401 - each as it comes

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        await anyio.wait_all_tasks_blocked()
        await lab.store(lab.group(2))
        await lab.extend_ledger([lab.group(3, env="words"), lab.group(4)])

        async def both() -> bool:
            return len(found) == 1

        await lab.until(both)
        tasks.cancel_scope.cancel()
    assert found == [f"{4:032x}"]


async def test_what_the_last_step_left_waits_for_nothing_any_more(lab) -> None:
    trained, batched, waiting = lab.group(1), lab.group(2), lab.group(3)
    await lab.extend_ledger([trained], [batched])
    await lab.store(waiting)
    report = TrainReport(
        run="r", trainer="main", lineage="l", term="t", step=1, ledger_index=1, chain="c", next_batch=1,
        policy_version="1-a-b", checkpoint="c", written_ns=1,
    )  # fmt: skip
    await lab.bus.publish(subjects.state("r", "trainer", subjects.LIVE, "main"), encode(report), msg_id="report")
    for steps, states in ((2, ["under way", "batched", "trained"]), (1, ["left over", "left over", "trained"])):
        config = msgspec.structs.replace(CONFIG, training=TrainingConfig(steps=steps))
        async with aclosing(newest_groups(lab.bus, config, GroupFilter())) as rows:
            found = [row async for row in rows]
        assert [row.state for row in found] == states
    assert [row.reason for row in found[:2]] == ["the run took its last step without it"] * 2
    view = await read_group(lab.bus, config, waiting.id)
    assert view.row.state == "left over"


async def test_listed_groups_show_the_last_message_that_all_answer_and_the_turns_of_a_sample(lab) -> None:
    def talk(*answers: str) -> list[Message]:
        said = [Message(role="system", content="Be brief."), Message(role="user", content="Where is\n Oslo?")]
        for answer in answers:
            said += [Message(role="assistant", content=answer), Message(role="user", content="Sure?")]
        return said[:-1]

    await lab.extend_ledger([lab.group(1, messages=[talk("Norway", "Yes"), talk("Sweden")]), lab.group(2)])
    page = await read_group_page(lab.bus, CONFIG, GroupFilter(), limit=5)
    assert [(row.prompt, row.turns) for row in page.rows if row.group == f"{1:032x}"] == [("Where is Oslo?", 1.5)]


async def test_what_the_policy_wrote_is_no_prompt_though_all_samples_say_it_and_what_it_was_shown_is(lab) -> None:
    """Two solved calls are shown before the task; both samples then call the tool alike, and answer."""
    call = Message(role="assistant", content="", tool_calls=[ToolCall(name="add", arguments="{}", id="1")])
    result = Message(role="tool", content="7", tool_call_id="1")
    shown = [Message(role="user", content="example"), call, result, call, result, Message(role="user", content="q")]
    talk = [*shown, call, result, Message(role="assistant", content="7")]
    group = lab.group(1, samples=2)
    masks = [[0, 1, 0, 1]] * 2
    sequences = msgspec.structs.replace(
        group.sequences,
        offsets=as_bytes([0, 4, 8], "int32"),
        tokens=as_bytes([5] * 8, "int32"),
        loss_mask=pack_mask(np.array(masks, bool).ravel()),
        logprobs=None,
        version_spans=[VersionSpan(0, 0, 0), VersionSpan(1, 0, 0)],
    )
    group = group.replace(sequences=sequences, messages=[talk, talk])
    await lab.store(group)
    view = await read_group(lab.bus, CONFIG, group.id)
    assert view.prompt == shown
    assert [sample.messages for sample in view.samples] == [talk[6:]] * 2
    (row,) = (await read_group_page(lab.bus, CONFIG, GroupFilter(), limit=5)).rows
    assert (row.prompt, row.turns) == ("q", 2)
