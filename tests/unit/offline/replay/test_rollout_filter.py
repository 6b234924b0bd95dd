"""What a command line selects, and what the planning headers say of it."""

from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from fuzz.examples import GROUP, group

from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.offline.replay.logic.rollout_filter import group_list, groups_digest, selects
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.planning_header import Plan
from lachesis.schemas.replay import Selection
from lachesis.services.cli.history_options import SelectionOptions

PLAN = Plan.of(group())  # made by policy step 3
CONFIG = RunConfig(environments={name: EnvironmentConfig(kind="m:E") for name in ("b", "a")})


@pytest.mark.parametrize(
    ("bound", "taken"),
    [
        ({}, True),
        ({"first_seq": 7}, True), ({"first_seq": 8}, False), ({"last_seq": 7}, True), ({"last_seq": 6}, False),
        ({"since_ns": 100}, True), ({"since_ns": 101}, False), ({"until_ns": 100}, True), ({"until_ns": 99}, False),
        ({"min_step": 3}, True), ({"min_step": 4}, False), ({"max_step": 3}, True), ({"max_step": 2}, False),
    ],
)  # fmt: skip
def test_bounds_are_included(bound: dict[str, int], taken: bool) -> None:
    assert selects(Selection(envs=["sums"], **bound), None, PLAN, 7, 100) is taken


def test_a_list_of_groups_selects_those_alone() -> None:
    assert selects(Selection(envs=["sums"]), {GROUP}, PLAN, 7, 100)
    assert not selects(Selection(envs=["sums"]), {"f" * 32}, PLAN, 7, 100)


def test_a_list_is_read_line_by_line_and_named_whatever_its_order() -> None:
    listed = group_list(f"{GROUP}\n\n# all of them\n{'f' * 32}  # the last\n{GROUP}\n")
    assert listed == {GROUP, "f" * 32}
    assert groups_digest(sorted(listed)) == groups_digest(sorted(listed, reverse=True)) != groups_digest([GROUP])
    for wrong in ("", "# none", "12", f"{GROUP} {GROUP}"):
        with pytest.raises(ConfigError):
            group_list(wrong)


def test_the_command_line_becomes_a_selection(tmp_path: Path) -> None:
    assert SelectionOptions().selection(CONFIG) == (Selection(envs=["a", "b"]), None)
    (tmp_path / "ids").write_text(GROUP)
    since = datetime(2026, 1, 1)  # noqa: DTZ001 - what typer gives for a time without a zone
    wanted = SelectionOptions(envs=("b", "b"), since=since, groups=tmp_path / "ids", min_step=1)
    selection, listed = wanted.selection(CONFIG)
    assert selection.envs == ["b"]
    assert selection.since_ns == int(datetime(2026, 1, 1, tzinfo=UTC).timestamp()) * 10**9
    assert (selection.groups, listed) == (groups_digest([GROUP]), {GROUP})
    assert msgspec.json.decode(msgspec.json.encode(selection), type=Selection) == selection


def test_what_can_select_nothing_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--from-seq 9 lies behind the end, 3"):
        SelectionOptions(first_seq=9, last_seq=3).selection(CONFIG)
    with pytest.raises(ConfigError, match="No such file"):
        SelectionOptions(groups=tmp_path / "none").selection(CONFIG)
    (tmp_path / "ids").write_text(f"{GROUP}\nx\n")
    with pytest.raises(ConfigError, match="line 2: 'x' is no group id"):
        SelectionOptions(groups=tmp_path / "ids").selection(CONFIG)


def test_a_subject_filter_takes_the_environments_whose_rollouts_it_matches() -> None:
    def envs(*filters: str, named: tuple[str, ...] = ()) -> list[str]:
        return SelectionOptions(subjects=filters, envs=named).selection(CONFIG)[0].envs

    assert envs("rl.rollout.run.*") == envs("rl.rollout.>") == envs("*.rollout.run.a", "rl.rollout.run.b") == ["a", "b"]
    assert envs("rl.rollout.*.b") == envs("rl.rollout.>", named=("b",)) == ["b"]
    for wrong in ("rl.rollout.other.*", "rl.score.>", "rl.rollout.run", "a"):
        with pytest.raises(ConfigError, match=r"takes none of the rollouts; they are stored on rl\.rollout\.run\.a"):
            envs("rl.rollout.>", wrong)
    with pytest.raises(ConfigError, match="no environment 'c'"):
        envs(named=("c",))
