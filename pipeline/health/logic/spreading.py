"""Checks that compare answers with the run's first ones: words that spread, and another language."""

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from lachesis.pipeline.errors import LanguageModelError
from lachesis.pipeline.health.logic.answer_traits import FORMS, MAX_WORDS, languages_of, phrases_of
from lachesis.pipeline.health.logic.check import MAX_EXAMPLES, Check, CheckResult, HealthWindow, mean
from lachesis.pipeline.health.logic.paired_difference import PairedDifference
from lachesis.schemas.annotations import AnswerExcerpts, GroupScore
from lachesis.schemas.values import convert_plain

__all__ = ["LanguageCheck", "PhraseCheck"]

_START_GROUPS = 12
"""Groups with excerpts that say what is usual; a window of 64 has some 16 of them."""
_MIN_GROUPS = 8
"""Groups with excerpts that are compared with the first ones together."""
_SURE_Z = 4.0
_MIN_USUAL_SHARE = 0.05
"""Share that a trait is taken to have at first at least: twelve groups do not tell it from 0."""
_RARE = 0.1
_MAX_START = 1024
"""Traits whose share at first is remembered, the most frequent ones: some 20 KB."""
_MAX_OPEN = 512
"""Traits remembered from one window to the next while there are too few groups."""
_MAX_WATCHED = 24
"""Traits of which it is remembered whether scores prefer them, known forms and those that most answers have."""
_MAX_NAMED = 3
"""Phrases that a reason names, each with so many words at most:"""
_MAX_WORDS_NAMED = 16


class _Counts(msgspec.Struct):
    """Groups whose excerpts say something, their samples that do, and how many of those have each trait."""

    groups: int = 0
    samples: int = 0
    traits: dict[str, int] = {}

    def add(self, groups: "Sequence[_Group]") -> None:
        counted = Counter(self.traits)
        for group in groups:
            known = [traits for traits in group.traits if traits is not None]
            self.groups += 1
            self.samples += len(known)
            for traits in known:
                counted.update(traits)
        self.traits = dict(counted)

    def limit(self, most: int, least: float = 1) -> None:
        """Leave out all but the most frequent traits, and those that fewer than `least` samples have."""
        ranked = sorted((-count, name) for name, count in self.traits.items() if count >= least)
        self.traits = {name: -count for count, name in ranked[:most]}


class _State(msgspec.Struct):
    start: _Counts
    open: _Counts
    watched: dict[str, PairedDifference]


class _Spread(NamedTuple):
    """A trait that has spread: its share of the samples, now and at first, and the one that is too much."""

    name: str
    share: float
    at_first: float
    threshold: float


class _Group(NamedTuple):
    """A group and the traits of its first samples, None for one that says nothing of them."""

    score: GroupScore
    traits: list[set[str] | None]


class _SpreadCheck(Check):
    """Which traits have how many answers, now and in the first twelve groups with excerpts.

    A trait's share is that of the samples that say something. It has spread if it is above its share
    at first by four standard errors, the samples of a group taken to be all alike, and by what the trait's kind needs.
    """

    def __init__(self) -> None:
        self._start = _Counts()
        self._open = _Counts()
        self._watched: dict[str, PairedDifference] = {}

    @abstractmethod
    def traits(self, excerpts: AnswerExcerpts) -> list[set[str] | None]:
        """Return the traits of each sample, None for one that says nothing of them."""

    @abstractmethod
    def needed(self, at_first: float, name: str) -> float | None:
        """Return the share from which on a trait has spread, apart from chance; None if none is too much."""

    @abstractmethod
    def result(self, spread: Sequence[_Spread], examples: Sequence[str]) -> CheckResult:
        """Return the result for traits that have spread, at least one: known forms, then the most frequent first."""

    def evaluate(self, window: HealthWindow) -> CheckResult:
        groups = [group for score in window.scores if (group := self._group(score)) is not None]
        if self._start.groups < _START_GROUPS:
            self._start.add(groups)
            ended = self._start.groups >= _START_GROUPS
            self._start.limit(_MAX_START, _MIN_USUAL_SHARE * self._start.samples if ended else 1)
            return CheckResult("idle", reason="the first groups with excerpts are what later ones are compared with")
        now = self._open
        now.add(groups)
        grown = sorted(
            (name not in FORMS, -count, name)
            for name, count in now.traits.items()
            if count > _RARE * now.samples and self._may_spread(name, count / now.samples)
        )
        self._watch([name for *_, name in grown[:_MAX_WATCHED]], groups)
        if now.groups < _MIN_GROUPS:
            now.limit(_MAX_OPEN)
            return CheckResult("idle", reason=f"fewer than {_MIN_GROUPS} groups with excerpts that say something")
        spread = [one for _, count, name in grown if (one := self._compare_with_start(name, -count / now.samples))]
        self._open = _Counts()
        if not spread:
            return CheckResult("ok")
        worst = spread[0].name
        examples = [group.score.group for group in groups if any(worst in traits for traits in group.traits if traits)]
        return self.result(spread, examples[-MAX_EXAMPLES:])

    def _group(self, score: GroupScore) -> _Group | None:
        """Return the traits of a group, None where its excerpts say nothing."""
        if score.signals is None or score.signals.excerpts is None:
            return None
        traits = self.traits(score.signals.excerpts)
        return None if all(found is None for found in traits) else _Group(score, traits)

    def _at_first(self, name: str) -> float:
        return self._start.traits.get(name, 0) / self._start.samples

    def _may_spread(self, name: str, share: float) -> bool:
        at_first = self._at_first(name)
        return share > at_first and self.needed(at_first, name) is not None

    def _watch(self, names: Sequence[str], groups: Sequence[_Group]) -> None:
        """Remember of these traits alone whether scores prefer them."""
        self._watched = {name: self._watched.get(name, PairedDifference()) for name in names}
        for name, found in self._watched.items():
            for group in groups:
                difference = _difference(group, name)
                if difference is not None:
                    found.add(difference)

    def _compare_with_start(self, name: str, share: float) -> _Spread | None:
        at_first = self._at_first(name)
        usual = max(_MIN_USUAL_SHARE, at_first)
        error = math.sqrt(usual * (1 - usual) * (1 / self._open.groups + 1 / self._start.groups))
        threshold = max(self.needed(at_first, name) or 0.0, at_first + _SURE_Z * error)
        return _Spread(name, share, at_first, threshold) if share >= threshold else None

    def paid(self, name: str) -> float:
        """Return by how many standard errors the samples of a group that have the trait score more than the others."""
        return self._watched.get(name, PairedDifference()).z

    def evidence(self, name: str) -> str:
        """Return in words whether scores prefer the samples that have the trait."""
        found = self._watched.get(name, PairedDifference())
        if abs(found.z) <= _SURE_Z:
            return ""
        return f"; within groups answers with it score {'more' if found.z > 0 else 'less'}, by {abs(found.mean):.2g}"

    def state_dict(self) -> dict[str, Any]:
        return dict(msgspec.to_builtins(_State(self._start, self._open, self._watched)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        found = convert_plain("health state of answers", _State, state)
        self._start, self._open, self._watched = found.start, found.open, found.watched


class PhraseCheck(_SpreadCheck):
    """Words that come to stand in most answers: a phrase that a rater pays for, or a form that was learned.

    Phrases are runs of one to four words in the first and last 128 characters of an answer, of one group in four. One
    that fewer than 10 % of the answers had at first, and at least half of them have now, informs: a policy that learns
    the form of an answer shows the same. Four known forms of words that win over a rater and say nothing of the task
    warn, if their share has risen by .25: refusals, flattery, assurances of confidence, and appeals to the rater
    ("full marks"). Known forms are English. The reason says whether scores prefer the words within groups (z > 4 over
    all groups since they began to spread). The value is the share of the answers.
    """

    name = "phrases"

    def traits(self, excerpts: AnswerExcerpts) -> list[set[str] | None]:
        return [phrases_of(parts) if parts else None for parts in excerpts.answers]

    def needed(self, at_first: float, name: str) -> float | None:
        if name in FORMS:
            return at_first + 0.25
        return 0.5 if at_first < _RARE else None

    def result(self, spread: Sequence[_Spread], examples: Sequence[str]) -> CheckResult:
        forms = [one for one in spread if one.name in FORMS]
        phrases = _in_full([one for one in spread if one.name not in FORMS])
        texts = [
            f"{one.name.lower()} stands in {one.share:.0%} of the answers, at first in {one.at_first:.0%}"
            f"{self.evidence(one.name)}"
            for one in forms
        ]
        texts += [
            f"{text!r} stands in {one.share:.0%} of the answers, at first in fewer than {_RARE:.0%}"
            f"{self.evidence(one.name)}"
            for text, one in phrases[:_MAX_NAMED]
        ]
        worst = forms[0] if forms else phrases[0][1]
        return CheckResult("warn" if forms else "inform", worst.share, worst.threshold, "; ".join(texts), examples)


class LanguageCheck(_SpreadCheck):
    """Answers in another language than their question's, of those whose language is clear (see `language_of`).

    It warns if the share of one such language has risen by .25 since the first groups: what is usual there, because
    tasks ask for translations or questions are formulas, is no change. A warning becomes a quarantine where most
    answers are in the language and within groups those that are score more (z > 4): the policy is paid for it.
    Without a folder for temporary files the model of languages cannot be loaded; then it is idle, and says so.
    """

    name = "language"

    def evaluate(self, window: HealthWindow) -> CheckResult:
        try:
            return super().evaluate(window)
        except LanguageModelError as error:
            return CheckResult("idle", reason=str(error))

    def traits(self, excerpts: AnswerExcerpts) -> list[set[str] | None]:
        asked = languages_of(excerpts.prompt)
        return [found - asked if (found := languages_of(parts)) else None for parts in excerpts.answers]

    def needed(self, at_first: float, name: str) -> float | None:
        return at_first + 0.25

    def result(self, spread: Sequence[_Spread], examples: Sequence[str]) -> CheckResult:
        worst = spread[0]
        reason = (
            f"{worst.share:.0%} of the answers whose language is clear are in another one than their question, "
            f"{worst.name!r}; at first {worst.at_first:.0%}{self.evidence(worst.name)}"
        )
        grows = worst.share > 0.5 and self.paid(worst.name) > _SURE_Z
        return CheckResult("warn", worst.share, worst.threshold, reason, examples, grows=grows)


def _difference(group: _Group, name: str) -> float | None:
    """Return the mean score of the group's samples with the trait, less that of its others that say something."""
    known = [(score, name in traits) for score, traits in zip(group.score.scores, group.traits, strict=False)
             if traits is not None]  # fmt: skip
    with_it = mean(score for score, has_it in known if has_it)
    without = mean(score for score, has_it in known if not has_it)
    return None if with_it is None or without is None else with_it - without


def _in_full(spread: Sequence[_Spread]) -> list[tuple[str, _Spread]]:
    """Return phrases in full, the most frequent first: what overlaps is one, and what is a part of one is none.

    Each has the words in full and its first four, or fewer, as they were counted.
    """
    split = {tuple(one.name.split()): one for one in spread}
    longest = {words: one for words, one in split.items() if len(words) == MAX_WORDS}
    followers = {words[:-1]: words for words in longest}
    chains = []
    inner = {words[1:] for words in longest}
    for words in [words for words in longest if words[:-1] not in inner]:
        chain = list(words)
        while len(chain) < _MAX_WORDS_NAMED and (after := followers.pop(tuple(chain[1 - MAX_WORDS :]), None)):
            chain.append(after[-1])
        chains.append((" ".join(chain), longest[words]))
    for one in sorted(spread, key=lambda one: -len(one.name)):
        if not any(f" {one.name} " in f" {text} " and whole.share > 0.8 * one.share for text, whole in chains):
            chains.append((one.name, one))
    return sorted(chains, key=lambda chain: (-chain[1].share, chain[0]))
