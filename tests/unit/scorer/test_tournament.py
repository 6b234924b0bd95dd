"""The schedule of a tournament and the strengths that follow from its games."""

import math
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.scorer.logic.tournament import pairs_of_rounds, win_chances


@given(st.integers(2, 33), st.integers(1, 40))
def test_no_pair_meets_twice_and_each_player_has_at_most_a_game_a_round(players: int, rounds: int) -> None:
    pairs = pairs_of_rounds(players, rounds)
    assert len(set(pairs)) == len(pairs)
    assert all(0 <= first < second < players for first, second in pairs)
    games = Counter(player for pair in pairs for player in pair)
    assert max(games.values()) <= rounds
    assert 2 * len(pairs) <= rounds * players
    if players % 2 == 0:
        assert set(games.values()) == {min(rounds, players - 1)}
    if rounds >= players:
        assert set(pairs) == set(combinations(range(players), 2))


@given(st.integers(2, 33), st.integers(2, 40))
def test_from_two_rounds_on_all_players_are_connected(players: int, rounds: int) -> None:
    reached, pairs = {0}, pairs_of_rounds(players, rounds)
    for _ in range(players):
        reached |= {player for pair in pairs if reached & set(pair) for player in pair}
    assert reached == set(range(players))


def test_after_a_round_robin_chances_are_the_share_of_games_won_but_for_the_draws_added() -> None:
    wins = {(0, 1): 1.0, (0, 2): 1.0, (0, 3): 0.0, (1, 2): 1.0, (1, 3): 0.5, (2, 3): 0.0}
    chances = win_chances(4, wins)
    assert chances == pytest.approx([2 / 3, 1.5 / 3, 0.0, 2.5 / 3], abs=0.06)


def test_strengths_solve_the_equations_of_bradley_and_terry() -> None:
    """At the maximum of the likelihood each player's expected wins are its wins; the oracle knows no minorization."""
    games = {(0, 1): 1.0, (1, 2): 0.5, (2, 3): 1.0, (0, 3): 0.75}
    chances = win_chances(4, games)
    # gradient ascent on logits of the same likelihood, with a tenth of a draw against strength 1
    logits = [0.0] * 4
    for _ in range(20_000):
        slope = [0.05 - 0.1 / (1 + math.exp(-logit)) for logit in logits]
        for (first, second), share in games.items():
            expected = 1 / (1 + math.exp(logits[second] - logits[first]))
            slope[first] += share - expected
            slope[second] -= share - expected
        logits = [logit + 0.5 * step for logit, step in zip(logits, slope, strict=True)]
    beats = [[1 / (1 + math.exp(b - a)) for b in logits] for a in logits]
    assert chances == pytest.approx([(sum(row) - 0.5) / 3 for row in beats], abs=1e-4)


def test_a_win_against_a_strong_player_counts_for_more() -> None:
    """0 and 3 won their only games; 0 against the better one of the other two."""
    chances = [chance for chance in win_chances(4, {(0, 1): 1.0, (1, 2): 1.0, (2, 3): 0.0}) if chance is not None]
    assert chances[0] > chances[3] + 0.1
    assert sum(chances) == pytest.approx(2.0)


def test_a_player_without_a_game_has_no_chance_and_one_game_gives_finite_ones() -> None:
    lone = win_chances(4, {(0, 1): 1.0})
    assert (lone[2], lone[3]) == (None, None)
    assert lone[0] is not None
    assert lone[0] > 0.85
    assert win_chances(3, {}) == [None] * 3
