"""A comparison as tables and texts, before it becomes a terminal's output, Markdown or a page. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lachesis.pipeline.offline.compare.logic import METRICS, Comparison, DisputedSample, EnvDifference, RevisionFigures
from lachesis.pipeline.offline.compare.statistics import Distribution
from lachesis.pipeline.scorer.logic.intervals import MIN_GROUPS
from lachesis.schemas.rollout import Message

__all__ = ["DisputedText", "Report", "Table", "env_name", "report"]

_MAX_TEXT_CHARS = 1200


@dataclass(frozen=True, slots=True)
class Table:
    """Cells are text; the first column names the row."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class DisputedText:
    """A sample that the revisions differ on: what each rater gave it, and what was said in it (role, text)."""

    title: str
    lines: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Report:
    """What every form of the report shows, in this order."""

    title: str
    findings: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    texts: list[DisputedText] = field(default_factory=list)


def report(found: Comparison, said: Sequence[list[Message] | None]) -> Report:
    """Return the report; `said` are the conversations of `found.disputed`, None where they cannot be read."""
    a, b = found.a, found.b
    return Report(
        title=f"Run {found.run}: {a.name} and {b.name}",
        findings=_findings(found),
        tables=[
            Table(
                "Metrics (A is the first, B the second)",
                ("metric", "value", "meaning"),
                [(name, number(found.metrics[name]), meaning) for name, meaning in METRICS.items()],
            ),
            Table(
                "Environments, of the groups that both have",
                ("env", "groups", "trainable in both", "sign flips", "verdict changes", "rank", "rank within", "shift"),
                [
                    (
                        env_name(found, env),
                        str(env.groups),
                        str(env.comparable),
                        str(env.flipped),
                        str(env.verdict_changes),
                        number(env.rank_correlation),
                        number(env.rank_within),
                        number(env.mean_shift),
                    )
                    for env in found.envs
                ],
            ),
            Table(
                "Revisions",
                ("", "groups", "unscored", "zero variance", "alpha", "score and length", "rating, s"),
                [_revision_row(one) for one in (a, b)],
            ),
            *_part_tables(found),
            Table(
                "Distributions",
                ("", "n", "missing", "mean", "std", "min", "25 %", "median", "75 %", "max"),
                [
                    (f"{what} of {one.name}", *_distribution(values))
                    for one in (a, b)
                    for what, values in (("scores", one.scores), ("rewards", one.rewards))
                ],
            ),
            Table(
                "Raters",
                ("rater", "mean", "missing", "alpha of all", "alpha without it", "at odds", "with length", "alone"),
                [
                    (
                        f"{rater.rater} of {one.name}",
                        number(rater.ratings.mean if rater.ratings else None),
                        str(rater.ratings.missing) if rater.ratings else "all",
                        number(one.alpha),
                        number(rater.alpha_without),
                        "-" if rater.at_odds is None else "yes" if rater.at_odds else "no",
                        number(rater.length),
                        number(rater.length_bias),
                    )
                    for one in (a, b)
                    for rater in one.raters
                ],
            ),
        ],
        texts=[_text(one, messages, found) for one, messages in zip(found.disputed, said, strict=True)],
    )


def number(value: float | None) -> str:
    """Return a number with four digits; what is undefined as a dash."""
    return "-" if value is None else f"{value:.4g}"


def env_name(found: Comparison, env: EnvDifference) -> str:
    """Return an environment, with the parts of the revisions that are compared where these have several."""
    parts = [part for part, whole in ((env.a, found.a), (env.b, found.b)) if part != whole.name]
    return f"{env.env} ({', '.join(parts)})" if parts else env.env


def _part_tables(found: Comparison) -> list[Table]:
    if not found.parts:
        return []
    return [
        Table(
            "Parts, of a revision whose scoring was changed while it went on",
            ("part", "env", "rollouts", "groups", "by", "raters", "score", "zero variance", "alpha"),
            [
                (
                    part.name,
                    part.env,
                    f"{part.first} to {part.last}",
                    str(part.figures.groups),
                    "the configuration" if part.promoted is None else f"promotion of {part.promoted}",
                    ", ".join(f"{name} {version}" for name, version in part.raters.items()) or "the environment",
                    number(part.figures.scores.mean if part.figures.scores else None),
                    number(part.figures.zero_variance),
                    number(part.figures.alpha),
                )
                for part in found.parts
            ],
        )
    ]


def _findings(found: Comparison) -> list[str]:
    said = [found.significance.sentence]
    said += [
        f"the scoring of {name} was changed, so its {len(parts)} parts are compared apart "
        f"({', '.join(f'{part.name} of {part.env} from rollout {part.first}' for part in parts)})"
        for name in (found.a.name, found.b.name)
        if (parts := [part for part in found.parts if part.name.rpartition("/")[0] == name])
    ]
    if found.parts:
        said += [f"{env_name(found, env)}: {env.significance.sentence}" for env in found.envs]
    said += [f"{one.name} is not complete: its replay still runs, or was paused" for one in (found.a, found.b)
            if not one.complete]  # fmt: skip
    for one in (found.a, found.b):
        said += [
            f"rater {rater.rater} of {one.name} is at odds with the others: alpha is {number(one.alpha)} with it and "
            f"{number(rater.alpha_without)} without; its correlation with length is {number(rater.length)}"
            for rater in one.raters
            if rater.at_odds
        ]
        if one.alpha is None and one.raters:
            said.append(f"{one.name} has no alpha: {one.alpha_reason}")
        elif one.alpha is not None and one.alpha_interval is None:
            said.append(
                f"{one.name}: nothing says how sure its alpha of {number(one.alpha)} is; an interval takes "
                f"{MIN_GROUPS} groups or more, and ratings that differ"
            )
    return said


def _revision_row(one: RevisionFigures) -> tuple[str, ...]:
    interval = one.alpha_interval
    alpha = number(one.alpha)
    if one.alpha is not None:
        alpha += f" ({number(interval.low)} to {number(interval.high)})" if interval else " (no interval)"
    return (
        one.name,
        str(one.groups),
        str(one.unscored),
        number(one.zero_variance),
        alpha,
        number(one.length),
        number(one.seconds),
    )


def _distribution(values: Distribution | None) -> tuple[str, ...]:
    if values is None:
        return ("0", *["-"] * 8)
    quantiles = (values.low, values.q25, values.median, values.q75, values.high)
    return (str(values.n), str(values.missing), *(number(x) for x in (values.mean, values.std, *quantiles)))


def _text(one: DisputedSample, messages: list[Message] | None, found: Comparison) -> DisputedText:
    title = (
        f"{one.env}, group {one.group}, sample {one.sample}: score {number(one.score_a)} in {found.a.name}, "
        f"{number(one.score_b)} in {found.b.name}; advantage {number(one.advantage_a)}, {number(one.advantage_b)}"
    )
    rated = [
        (f"rated by {revision.name}", ", ".join(f"{name} {number(value)}" for name, value in sorted(ratings.items())))
        for revision, ratings in ((found.a, one.ratings_a), (found.b, one.ratings_b))
        if ratings
    ]
    if messages is None:
        return DisputedText(title, [*rated, ("", "its rollout was trimmed, or cannot be read")])
    return DisputedText(title, [*rated, *((message.role, _cut(message.content)) for message in messages)])


def _cut(text: str) -> str:
    return (
        text
        if len(text) <= _MAX_TEXT_CHARS
        else f"{text[:_MAX_TEXT_CHARS]} ... ({len(text) - _MAX_TEXT_CHARS} characters more)"
    )
