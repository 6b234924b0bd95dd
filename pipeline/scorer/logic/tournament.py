"""Schedules a tournament among the answers of a group, and turns its games into strengths. Pure."""

from collections.abc import Mapping

import numpy as np

__all__ = ["Pair", "pairs_of_rounds", "win_chances"]

Pair = tuple[int, int]
"""Two places, the smaller one first."""

_DRAWS_WITH_AVERAGE = 0.1
"""Games that each player is counted to have drawn with one of average strength, so that a player who wins all of them
has a finite strength. It moves chances little: five games that were all won give .92 instead of 1."""
_MAX_ITERATIONS = 1000
_TOLERANCE = 1e-9


def pairs_of_rounds(players: int, rounds: int) -> list[Pair]:
    """Return the pairs of a tournament in which each player meets another one in each round.

    They are the first rounds of a round robin by the circle method: with an odd number of players one has no game in
    each round. No pair meets twice, so there are at most as many rounds as other players (with an odd number, one
    more). From two rounds on, all players are connected by games.
    """
    seats = players + players % 2  # the last seat stays empty with an odd number
    pairs: list[Pair] = []
    for number in range(min(rounds, seats - 1)):
        ring = [(number + place) % (seats - 1) for place in range(seats - 1)]
        games = [(ring[0], seats - 1), *((ring[place], ring[-place]) for place in range(1, seats // 2))]
        pairs += [(min(game), max(game)) for game in games if max(game) < players]
    return pairs


def win_chances(players: int, games: Mapping[Pair, float]) -> list[float | None]:
    """Return the mean chance of each player to win against another one, None for one without a game.

    `games` has for a pair the share of the game that its first player won: 1, 0, or between for a draw. Strengths are
    those of Bradley and Terry (1952), found by Hunter's minorization (2004); where all pairs met, chances are the
    shares of games that were won, but for the draws that are added. Their mean over players is 0.5.
    """
    won, met = np.zeros(players), np.zeros((players, players))
    for (first, second), share in games.items():
        won[first] += share
        won[second] += 1 - share
        met[first, second] += 1
        met[second, first] += 1
    plays = met.sum(axis=1) > 0
    if not plays.any():
        return [None] * players
    met, won = met[plays][:, plays], won[plays] + _DRAWS_WITH_AVERAGE / 2
    strengths = np.ones(len(won))
    for _ in range(_MAX_ITERATIONS):
        sums = strengths[:, None] + strengths
        new = won / ((met / sums).sum(axis=1) + _DRAWS_WITH_AVERAGE / (strengths + 1))
        done = bool(np.abs(np.log(new / strengths)).max() < _TOLERANCE)
        strengths = new
        if done:
            break
    chances = strengths[:, None] / (strengths[:, None] + strengths)
    np.fill_diagonal(chances, 0.0)
    means = iter((chances.sum(axis=1) / (len(won) - 1)).tolist())
    return [next(means) if has_game else None for has_game in plays.tolist()]
