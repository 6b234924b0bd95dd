"""Pictures of `lachesis top` and of a `lachesis trace` waterfall, made from a run that is going on.

    .venv/bin/python tests/benchmarks/screenshots.py --config run.toml --set run=NAME [--out deploy/images]

`trace` shows the slowest rollout that `top` names.
"""

import argparse
from io import StringIO
from pathlib import Path

import anyio
from rich.console import Console, RenderableType

from lachesis.services.cli import top, trace
from lachesis.services.cli.options import Options

WINDOW_S = 15.0


def draw(picture: RenderableType, title: str, file: Path, width: int) -> None:
    """Write what a terminal of `width` columns would show."""
    console = Console(record=True, width=width, file=StringIO(), force_terminal=True, highlight=False)
    console.print(picture)
    file.write_text(console.export_svg(title=title))
    print(f"{file}: {file.stat().st_size} bytes")


def main() -> None:
    """Look at the run and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="sets")
    parser.add_argument("--out", type=Path, default=Path("deploy/images"))
    given = parser.parse_args()
    config = Options(file=given.config, sets=tuple(given.sets)).config()
    overview = anyio.run(top._top, config, True, WINDOW_S)
    draw(top.render(overview, 150), "lachesis top", given.out / "top.svg", 150)
    slowest = overview.slow[0].group
    timeline = anyio.run(trace._find, config, slowest)
    draw(trace.render(timeline, 120), f"lachesis trace {slowest[:13]}", given.out / "trace.svg", 120)


if __name__ == "__main__":
    main()
