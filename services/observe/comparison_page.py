"""A report as Markdown and as a page of HTML that needs nothing but itself: no script, no other file.

Texts of rollouts are not ours: they are escaped in the page and fenced in Markdown, with a fence that they do not hold.
"""

import html
import io
import re
from collections.abc import Sequence
from typing import Any

from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.offline.compare.logic import Comparison, EnvDifference
from lachesis.services.observe.comparison import Report, Table, env_name
from lachesis.services.output import printable

__all__ = ["markdown", "page"]

_STYLE = """\
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;display:block;overflow-x:auto}
td,th{padding:.2rem .7rem;text-align:left;border-bottom:1px solid #ddd}
td{font-variant-numeric:tabular-nums}pre{white-space:pre-wrap;overflow-wrap:anywhere;background:#f5f5f5;padding:.7rem}
svg{max-width:100%;height:auto}.found{background:#fff3cd;padding:.4rem .8rem}"""


def markdown(shown: Report) -> str:
    """Return the report as Markdown."""
    parts = [f"# {_cell(shown.title)}", *(f"- {_cell(finding)}" for finding in shown.findings)]
    for table in shown.tables:
        parts += ["", f"## {_cell(table.title)}", "", _row(table.header), "|" + "---|" * len(table.header)]
        parts += [_row(row) for row in table.rows]
    if shown.texts:
        parts += ["", "## Most disputed"]
    for text in shown.texts:
        parts += ["", f"### {_cell(text.title)}"]
        for role, content in text.lines:
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", content)), default=0))
            parts += ["", f"**{_cell(role)}**" if role else "", fence, _plain(content), fence]
    return "\n".join(parts) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(text: str) -> str:
    return re.sub(r"([\\|<>`*_\[\]])", r"\\\1", printable(text))


def _plain(text: str) -> str:
    """Return a text without what moves a cursor, line breaks excepted."""
    return "\n".join(printable(line) for line in text.split("\n"))


def page(shown: Report, found: Comparison) -> str:
    """Return the report as one HTML file with its plots. Raises `StartupError` without matplotlib."""
    parts = [f"<h1>{html.escape(shown.title)}</h1>"]
    parts += [f'<p class="found">{html.escape(finding)}</p>' for finding in shown.findings]
    parts += [_plot(env, env_name(found, env)) for env in found.envs if env.edges]
    parts += [_table(table) for table in shown.tables]
    parts += ["<h2>Most disputed</h2>"] if shown.texts else []
    for text in shown.texts:
        said = "\n\n".join(f"{role}: {content}" if role else content for role, content in text.lines)
        parts.append(f"<h3>{html.escape(text.title)}</h3><pre>{html.escape(_plain(said))}</pre>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(shown.title)}</title><style>{_STYLE}</style></head>\n<body>{chr(10).join(parts)}</body></html>\n"
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.header)
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f"<h2>{html.escape(table.title)}</h2><table><tr>{head}</tr>{rows}</table>"


def _plot(env: EnvDifference, title: str) -> str:
    """Return the distributions of the scores of one environment as SVG."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise StartupError(f"plots need matplotlib ({error}): {install_command('plots')}") from error
    figure: Any = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    axes.stairs(env.counts_a, env.edges, fill=True, alpha=0.5, label=env.a)
    axes.stairs(env.counts_b, env.edges, linewidth=2, label=env.b)
    axes.set(xlabel="score", ylabel="samples", title=f"{title}: scores of {env.groups} groups")
    axes.set_ylim(bottom=0)
    axes.legend()
    drawn = io.StringIO()
    with rc_context({"svg.hashsalt": title}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    svg = drawn.getvalue()
    return svg[svg.index("<svg") :]
