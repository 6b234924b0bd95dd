"""The fold's digest and state: what is in them, and what is not."""

import msgspec
import pytest

from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.normalizer.config.shaping import RewardConfig
from lachesis.pipeline.normalizer.logic.reward import RewardRule
from lachesis.pipeline.offline.replay.logic.fold import RewardFold
from lachesis.schemas.annotations import GroupScore, Stamp
from lachesis.schemas.errors import SchemaError


def fold() -> RewardFold:
    normalization = NormalizationConfig(window=4, warmup_groups=0, warmup_samples=0)
    return RewardFold("sums", normalization, RewardRule(AdvantageConfig(), RewardConfig()))


def score(n: int, **changes: object) -> GroupScore:
    plain = GroupScore(group=f"{n:032x}", seq=n, item="i", policy_step=0, scores=[0.0, float(n)],
                       ratings={"a": [0.0, 1.0]}, lengths=[1, 2])  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


def digest(*scores: GroupScore | None, steps: int = 1) -> str:
    folded = fold()
    for n, one in enumerate(scores, 1):
        folded.add_group(n, f"{n:032x}", one, "why not")
        if n % steps == 0:
            folded.step()
    folded.step()
    return folded.digest


def test_the_digest_names_scores_ratings_and_rewards_and_neither_stamps_nor_commits() -> None:
    plain = digest(score(1), score(2), None)
    assert digest(score(1, stamps=[Stamp("replay", 1, 2, 3)]), score(2), None) == plain
    assert digest(score(1, excluded=[1]), score(2), None) == plain
    assert digest(score(1), score(2), None, steps=3) == plain
    assert digest(score(1, ratings={"a": [0.0, 0.5]}), score(2), None) != plain
    assert digest(score(1, scores=[0.0, 1.5]), score(2), None) != plain
    assert digest(score(1), score(2), score(3)) != plain
    assert digest(score(1), None, score(2)) != plain


def test_a_score_that_cannot_be_normalized_leaves_its_group_without_a_reward() -> None:
    folded = fold()
    folded.add_group(1, f"{1:032x}", score(1, scores=[0.0, 1e13]))
    folded.add_group(2, f"{2:032x}", score(2))
    done = folded.step()
    assert [reward.seq for reward in done.rewards] == [2]
    assert [(item.seq, item.reason[:5]) for item in done.unscored] == [(1, "group")]
    assert [item.seq for item in done.scores] == [1, 2]


def test_only_the_open_window_is_in_the_state() -> None:
    folded = fold()
    for n in range(1, 11):
        folded.add_group(n, f"{n:032x}", score(n))
    folded.step()
    assert [seq for seq, *_ in msgspec.msgpack.decode(folded.state())["open"]] == [9, 10]


@pytest.mark.parametrize("state", [b"", b"\xc1", msgspec.msgpack.encode({"normalizer": []}), b"\x90"])
def test_a_state_that_is_none_is_refused(state: bytes) -> None:
    with pytest.raises(SchemaError):
        fold().restore(None, [state])
    with pytest.raises(SchemaError):
        fold().restore(state, [])
