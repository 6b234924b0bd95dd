"""The scorer stage: ensembles by environment, the environment's own rewards, success, and what cannot be scored."""

import importlib

import msgspec
import pytest
from msgspec.structs import replace
from stages import run_scorer

from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.pipeline.scorer.scorer import EnvironmentScorer, samples_of
from lachesis.schemas import keys
from lachesis.schemas.annotations import DeadLetter, GroupScore, ScoreEvent
from lachesis.schemas.codec import encode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.rollout import Attachment, Message

EXACT = ScoringConfig(raters=[RaterConfig(rater="exact_match", name="exact")])


def talk(*answers):
    return [[Message(role="user", content="1+1?"), Message(role="assistant", content=answer)] for answer in answers]


def settled(lab, count, env="sums"):
    async def condition():
        scored = sum(len(event.groups) for event in await lab.events("score", ScoreEvent, env))
        return scored + len(await lab.events("dead", DeadLetter, env)) >= count

    return condition


async def scores(lab, env="sums"):
    return [item for event in await lab.events("score", ScoreEvent, env) for item in event.groups]


async def test_groups_are_scored_by_their_environments_raters(lab):
    config = RunConfig(
        run="r",
        environments={"sums": EnvironmentConfig(kind="x", scoring=EXACT), "own": EnvironmentConfig(kind="x")},
    )
    await lab.store(lab.group(1, task={"answer": "2"}, messages=talk("2", "3")))
    await lab.store(lab.group(2, env="own", rewards={"a": [0.25, None], "b": [0.5, 1.0]}))
    async with lab.running(lambda service: run_scorer(service, config), "scorer"):
        await lab.until(settled(lab, 1))
        await lab.until(settled(lab, 1, "own"))
    (rated,), (own,) = await scores(lab), await scores(lab, "own")
    assert rated.scores == [1.0, 0.0]
    assert rated.ratings == {"exact": [1.0, 0.0]}
    assert (rated.success, rated.lengths, rated.seq, rated.index) == (0.5, [3, 3], 1, 1)
    assert own.scores == [0.75, None]  # a sum with a missing part is missing, not smaller
    assert own.ratings == {"a": [0.25, None], "b": [0.5, 1.0]}
    assert own.success == 0.0  # of the one that could be known
    events = {env: (await lab.events("score", ScoreEvent, env))[0] for env in ("sums", "own")}
    assert events["own"].ensemble == "environment"
    assert events["sums"].ensemble != "environment"


async def test_advantages_by_a_rater_that_there_is_not_refuse_to_start(lab):
    weighted = AdvantageConfig(estimator="gdpo", weights={"exact": 1.0, "style": 1.0})
    sums = EnvironmentConfig(kind="x", scoring=EXACT, advantage=weighted)
    with pytest.raises(ConfigError, match=r"environment sums: advantage\.weights names style; its raters are exact"):
        await run_scorer(Service(lab.bus, "scorer", "r"), RunConfig(run="r", environments={"sums": sums}))


async def test_a_group_nobody_can_score_is_a_dead_letter(lab):
    config = RunConfig(run="r", environments={"sums": EnvironmentConfig(kind="x")})
    await lab.store(lab.group(1, rewards={}))
    await lab.store(lab.group(2))
    async with lab.running(lambda service: run_scorer(service, config), "scorer"):
        await lab.until(settled(lab, 2))
    (letter,) = await lab.events("dead", DeadLetter)
    assert (letter.group, letter.stage) == (f"{1:032x}", "scorer")
    assert "set scoring.raters" in letter.reason


@pytest.mark.parametrize("extreme", [1e155, -1e308, 1.1e12])
async def test_an_environments_reward_beyond_all_bounds_is_a_missing_rating_and_costs_its_sample_alone(lab, extreme):
    """As a rating outside its rater's bounds. What reads scores need not survive it: it is never stored."""
    scorer = EnvironmentScorer(ScoringConfig(), None, explains=True)
    columns = {"a": [extreme, 1.0, None, 1e12, 1.0], "b": [-extreme, -1e12, 0.5, 1e12, extreme]}
    found = await scorer.score(lab.group(1, samples=5, rewards=columns), 1)
    assert found.scores == [None, 1.0 - 1e12, None, None, None]
    assert found.ratings == {"a": [None, 1.0, None, None, 1.0], "b": [None, -1e12, 0.5, None, None]}
    assert found.statuses["a"] == ["error", "ok", "abstain", "error", "ok"]
    assert found.statuses["b"] == ["error", "ok", "ok", "error", "error"]
    assert f"sample 0: reward {extreme:g}" in found.failures["a"]
    assert "within +-1e+12: scale them" in found.failures["a"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=GroupScore) == found


async def test_success_is_told_by_the_rater_that_is_named(lab):
    settings = EnvironmentConfig(kind="x", success_rater="solved", success_threshold=0.5)
    scorer = EnvironmentScorer(ScoringConfig(), settings)
    group = lab.group(1, samples=4, rewards={"solved": [0.5, 0.4, None, 1.0], "style": [9.0] * 4})
    found = await scorer.score(group, 7)
    assert found.success == pytest.approx(2 / 3)
    assert (await scorer.score(lab.group(1, rewards={"style": [9.0, 9.0]}), 7)).success is None


async def test_a_missing_rating_is_none_and_says_why(lab):
    """A rater that cannot tell abstains: no number is made up for it."""
    raters = [RaterConfig(rater="exact_match", name="exact"), RaterConfig(rater="similarity", name="near")]
    scorer = EnvironmentScorer(ScoringConfig(raters=raters), None)
    found = await scorer.score(lab.group(1, task={}, messages=talk("2", "3")), 1)
    for name in ("exact", "near"):
        assert found.ratings[name] == [None, None]
        assert len(found.statuses[name]) == 2
        assert "ok" not in found.statuses[name]
    assert found.scores == [None, None]
    assert found.success is None


async def test_scores_depend_on_the_group_alone(lab):
    scorer = EnvironmentScorer(EXACT, None)
    group = lab.group(1, task={"answer": "2"}, messages=talk("2", "3"))
    assert await scorer.score(group, 3) == await EnvironmentScorer(EXACT, None).score(group, 3)


async def test_raters_see_the_last_answer_and_what_came_before(lab):
    conversation = [
        Message(role="system", content="be brief"),
        Message(role="user", content="1+1?"),
        Message(role="assistant", content="let me see"),
        Message(role="tool", content="2"),
        Message(role="assistant", content="2"),
        Message(role="tool", content="thank you"),
    ]
    (first, second) = samples_of(lab.group(1, messages=[conversation, conversation[:3]]))
    assert (first.completion, first.prompt) == ("2", "be brief\n1+1?\nlet me see\n2")
    assert second.completion == "let me see"
    assert first.token_count == 3


@pytest.mark.parametrize("messages", [[], [[Message(role="user", content="q")]] * 2])
async def test_a_group_without_answers_cannot_be_rated(lab, messages):
    with pytest.raises(DataError, match="messages"):
        samples_of(lab.group(1, messages=messages))


async def test_groups_whose_raters_are_away_do_not_hold_up_those_of_others(lab, monkeypatch):
    score, away = EnvironmentScorer.score, True

    async def judged(self, group, seq):
        if away and group.env == "sums":
            raise InfrastructureError("rater judge: connection refused")
        return await score(self, group, seq)

    monkeypatch.setattr(EnvironmentScorer, "score", judged)
    config = RunConfig(
        run="r",
        environments={"sums": EnvironmentConfig(kind="x"), "own": EnvironmentConfig(kind="x")},
        scoring=ScoringConfig(groups_at_once=2, patience_s=0.0),
    )
    for n in range(1, 7):
        await lab.store(lab.group(n))
    await lab.store(lab.group(7, env="own"))
    async with lab.running(lambda service: run_scorer(service, config), "scorer") as service:
        await lab.until(settled(lab, 1, "own"))
        told = {name: value for name, value in service.vitals.metrics.items() if name.endswith("/raters_away")}
        assert told == {"reward/sums/raters_away": 1, "reward/own/raters_away": 0}
        assert service.vitals.report().given_back >= 6
        away = False
        lab.bus.advance(31)
        await lab.until(settled(lab, 6))
        assert service.vitals.metrics["reward/sums/raters_away"] == 0
    assert not await lab.events("dead", DeadLetter)


JUDGE = """
import httpx
from lachesis import rater

answers = []

@rater(bounds=(0.0, 1.0))
async def judge(sample):
    answers.append(sample.item)
    if len(answers) < 30:
        raise httpx.ConnectError("connection refused")
    return 1.0
"""


async def test_a_judge_that_is_away_costs_nothing(lab, tmp_path, monkeypatch):
    """Seen: 128 groups were unscorable and their environment quarantined, 40 s after a judge had gone."""
    (tmp_path / "judge_of_ones_own.py").write_text(JUDGE)
    monkeypatch.syspath_prepend(tmp_path)
    raters = [RaterConfig(rater="judge_of_ones_own:judge", retries=1, backoff_s=0.001, breaker_failures=10_000)]
    scoring = ScoringConfig(raters=raters, patience_s=0.01)
    config = RunConfig(run="r", environments={"sums": EnvironmentConfig(kind="x", scoring=scoring)})
    for n in range(1, 4):
        await lab.store(lab.group(n))
    notes = set()

    async def all_scored():
        notes.add(service.vitals.status_text or "")
        return len(await scores(lab)) >= 3

    async with lab.running(lambda service: run_scorer(service, config), "scorer") as service:
        await lab.until(all_scored)
    assert [score.scores for score in sorted(await scores(lab), key=lambda score: score.seq)] == [[1.0, 1.0]] * 3
    assert not await lab.events("dead", DeadLetter)
    (told,) = {note.partition("rater ")[2].partition(" (gave up")[0] for note in notes if "gave up" in note}
    assert told == "judge: ConnectError: connection refused"
    assert any("away since 20" in note for note in notes)


async def test_a_scorer_says_for_which_rater_it_waits_before_it_gives_up(lab, tmp_path, monkeypatch):
    (tmp_path / "rater_that_looks.py").write_text(LOOKS)
    monkeypatch.syspath_prepend(tmp_path)
    looks = importlib.import_module("rater_that_looks")
    raters = [RaterConfig(rater="rater_that_looks:judge", retries=3, backoff_s=0.001)]
    settings = EnvironmentConfig(kind="x", scoring=ScoringConfig(raters=raters))
    config = RunConfig(run="r", environments={"sums": settings})
    await lab.store(lab.group(1))

    async def scorer(service):
        looks.status = lambda: (service.vitals.state, service.vitals.status_text)
        await run_scorer(service, config)

    async with lab.running(scorer, "scorer") as service:
        await lab.until(settled(lab, 1))
        assert service.vitals.state == "ok"
    state, text = looks.seen[0]
    assert state == "waiting"
    assert text.startswith("rater judge: ConnectError: connection refused (tried since ")


LOOKS = """
import httpx
from lachesis import rater

failures, seen, status = [], [], None

@rater(bounds=(0.0, 1.0))
async def judge(sample):
    if not failures:
        failures.append(sample.item)
        raise httpx.ConnectError("connection refused")
    seen.append(status())
    return 1.0
"""


async def test_a_missing_rating_says_in_the_log_of_events_why(lab, tmp_path, monkeypatch):
    (tmp_path / "rater_with_a_bug.py").write_text("def bug(sample):\n    raise KeyError(sample.item)\n")
    monkeypatch.syspath_prepend(tmp_path)
    raters = [RaterConfig(rater="rater_with_a_bug:bug", bounds=(0.0, 1.0))]
    settings = EnvironmentConfig(kind="x", scoring=ScoringConfig(raters=raters))
    await lab.store(lab.group(1))
    config = RunConfig(run="r", environments={"sums": settings})
    async with lab.running(lambda service: run_scorer(service, config), "scorer"):
        await lab.until(settled(lab, 1))
    (found,) = await scores(lab)
    assert found.scores == [None, None]
    assert found.failures == {"bug": "KeyError: 'item-1'"}


@pytest.mark.parametrize(("mode", "vocabulary"), [("train", 18), ("train", 19), ("observe", 18), ("train", None)])
async def test_what_the_trainer_cannot_use_is_known_from_its_policy(lab, mode, vocabulary):
    record = PolicyRecord(
        run="r", version="0-a-b", weights="w", tokenizer_hash="tok", written_ns=1, vocabulary=vocabulary
    )
    await lab.bus.put(keys.POLICY, encode(record))
    await lab.store(lab.group(1))  # ids 11 to 18
    await lab.store(lab.group(2, tokenizer_hash="other"))
    await lab.store(lab.group(3, attachments=[Attachment(mime="image/png", data=b"x")]))
    config = RunConfig(run="r", mode=mode, environments={"sums": EnvironmentConfig(kind="x")})
    async with lab.running(lambda service: run_scorer(service, config), "scorer"):
        await lab.until(settled(lab, 3))
    first, second, third = (
        score.signals.untrainable for score in sorted(await scores(lab), key=lambda score: score.seq)
    )
    assert (first is None) == (vocabulary != 18)
    assert "tokenizer 'other'" in second
    assert ("attachments" in third) == (mode == "train")


async def test_a_group_without_anything_to_train_on_says_so_and_is_scored(lab):
    def sent(n, **columns):
        group = lab.group(n)
        return group.replace(sequences=replace(group.sequences, **columns))

    await lab.store(sent(1, excluded_samples=[0]))
    await lab.store(sent(2, excluded_samples=[0, 1]))
    await lab.store(sent(3, loss_mask=pack_mask([False] * 8), logprobs=None))
    config = RunConfig(run="r", environments={"sums": EnvironmentConfig(kind="x")})
    async with lab.running(lambda service: run_scorer(service, config), "scorer"):
        await lab.until(settled(lab, 3))
    found = sorted(await scores(lab), key=lambda score: score.seq)
    assert [score.scores for score in found] == [[0.0, 1.0]] * 3
    assert found[1].lengths == [3, 3], "raters and statistics see what was generated"
    partly, wholly, masked = (score.signals.untrainable for score in found)
    assert partly is None
    assert "set_advantage_to_zero" in wholly
    assert "loss mask" in masked


async def test_a_policy_record_that_cannot_be_read_costs_no_group(lab):
    await lab.bus.put(keys.POLICY, b"\xc1")
    for n in range(1, 4):
        await lab.store(lab.group(n))
    config = RunConfig(run="r", environments={"sums": EnvironmentConfig(kind="x")})
    async with lab.running(lambda service: run_scorer(service, config), "scorer"):
        await lab.until(settled(lab, 3))
    assert not await lab.events("dead", DeadLetter)
    assert [score.signals.untrainable for score in await scores(lab)] == [None] * 3
