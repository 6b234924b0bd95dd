"""Finds a reward hack in a run's history: the rater that rises most while another falls, and what it pays for."""

import sys

import lachesis


def changes(run, share: float = 0.2) -> dict[str, float]:
    """Return by rater how its mean rating changed from the first share of the history to the last."""
    table = run.rollouts().to_table(columns=["seq", "ratings"]).sort_by("seq")
    part = max(1, int(share * table.num_rows))
    early, late = (mean_ratings(rows.to_pylist()) for rows in (table[:part], table[-part:]))
    return {rater: late[rater] - early[rater] for rater in early.keys() & late.keys()}


def mean_ratings(rows) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for row in rows:
        for one in row["ratings"] or []:
            if one["rating"] is not None:  # missing is not 0
                found.setdefault(one["rater"], []).append(one["rating"])
    return {rater: sum(values) / len(values) for rater, values in found.items()}


def paid_for(run, rater: str, groups: int = 5) -> list[tuple[str, dict[str, float | None]]]:
    """Return the answers that the rater likes best, of the newest groups in which raters disagree most."""
    newest = sorted(run.groups(limit=200).to_pylist(), key=lambda row: row["disagreement"] or 0.0, reverse=True)
    views = [run.group(row["group"]) for row in newest[:groups]]
    best = [max(view.samples, key=lambda sample: sample.ratings.get(rater) or 0.0) for view in views]
    return [(sample.messages[-1].content, sample.ratings) for sample in best]


def main(name: str) -> None:
    with lachesis.open_run(name) as run:
        found = changes(run)
        suspect = max(found, key=found.__getitem__)
        print("change of the mean rating:", {rater: round(change, 3) for rater, change in found.items()})
        print(f"{suspect} rose most; of the groups in which raters disagree most, it likes best:")
        for answer, ratings in paid_for(run, suspect):
            print(f"  {ratings}  {answer[:100]!r}")


if __name__ == "__main__":
    main(sys.argv[1])
