"""Answers the page's API with plain data from a run's streams and folder, bounded in size and time.

Takes the query of a request and returns data that is encoded as JSON, in which None means "not known". Writes nothing.
"""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from lachesis.pipeline.bus.embedded import read_endpoint
from lachesis.pipeline.config.run import NATS_FOLDER, RunConfig
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.notices.text import notice_lines
from lachesis.pipeline.offline.compare.logic import compare
from lachesis.pipeline.offline.replay.revisions import conversation, read_revision, revision_names
from lachesis.schemas.errors import ConfigError, LachesisError
from lachesis.services.observe.comparison import env_name, report
from lachesis.services.observe.group_detail import TokenWindow, read_group_detail
from lachesis.services.observe.group_reader import read_group_page
from lachesis.services.observe.groups import GroupFilter, GroupOrder
from lachesis.services.observe.health import checked_environments, read_health
from lachesis.services.observe.live_run_state import read_run_state, run_state_of_folder
from lachesis.services.observe.progress import newest_figures
from lachesis.services.observe.run_state import FOLDER_FIELDS, STATUS_FIELDS, RunState, StateName, project
from lachesis.services.observe.runs import look_at_folder
from lachesis.services.observe.series import CurveReader
from lachesis.services.web.shared_history import SharedHistory
from lachesis.services.web.token_texts import TokenTexts

__all__ = ["MAX_COMPARED", "MAX_GROUPS", "MAX_TEXT_CHARS", "Query", "RunApi", "bounded", "shown_state"]

MAX_GROUPS = 100
"""Groups of one page at most."""
_GROUPS = 25
_SEARCH_S = 5.0
"""Seconds after which a page of groups is answered with what was found."""
MAX_TOKENS = 8192
"""Tokens of one answer at most."""
MAX_TEXT_CHARS = 20_000
"""Characters of one text at most; what is cut off is counted."""
_MAX_ANSWER_CHARS = 2_000_000
_VALUE_CHARS = 8
"""For the bound of an answer each value counts as so many characters, beside its text."""
MAX_COMPARED = 50_000
"""Groups of a revision that is compared here; `lachesis compare` has no such bound."""
_DISPUTED = 8
_SNAPSHOT_S = 2.0
"""Seconds for which a snapshot is looked for, and then shown to everybody."""
_PAGE_FIELDS = tuple(dict.fromkeys((*FOLDER_FIELDS, *STATUS_FIELDS)))
_RANGES = ("score", "disagreement", "advantage", "step", "policy_step")

Query = Mapping[str, list[str]]
"""The parameters of a request: name to values."""


def bounded(value: Any, chars: int = _MAX_ANSWER_CHARS) -> Any:
    """Return plain data with long texts cut, and without what is beyond `chars` characters in all. Pure."""
    left = chars

    def cut(one: Any) -> Any:
        nonlocal left
        left -= _VALUE_CHARS
        if isinstance(one, str):
            kept = one[: max(0, min(MAX_TEXT_CHARS, left))]
            left -= len(kept)
            return kept if len(kept) == len(one) else f"{kept}... [{len(one) - len(kept)} more characters]"
        if isinstance(one, dict):
            return {cut(str(key)): cut(item) for key, item in one.items() if left > 0}
        if isinstance(one, list):
            return [cut(item) for item in one if left > 0]
        return one

    return cut(value)


def shown_state(in_folder: StateName, snapshot: RunState) -> str:
    """Return how a run stands: by its folder, or if no `up` here started it, by its services. Pure."""
    if in_folder not in {"unknown", "elsewhere"}:
        return in_folder
    if snapshot.finished:
        return "finished"
    if any(service.instances for service in snapshot.services):
        return "running"
    if snapshot.ended:
        return "stopped"
    return in_folder if snapshot.problems else "silent"


class RunApi:
    """The answers about one run; `config` is its configuration."""

    def __init__(self, config: RunConfig, history: SharedHistory) -> None:
        self._config = config
        self._history = history
        self._curves = CurveReader(config.path)
        self._reading_curves = anyio.Lock()
        self._tokens = TokenTexts(config)
        self._snapshot: RunState | None = None
        self._snapshot_s = float("-inf")
        self._taking_snapshot = anyio.Lock()
        self._comparing = anyio.Lock()  # one at a time: each holds two revisions in memory

    async def run(self, query: Query) -> Any:
        """Return the state of the run by its folder and, where the server says more, by its server."""
        _check_names(query)
        in_folder = await anyio.to_thread.run_sync(look_at_folder, self._config.run, self._config.path)
        snapshot = await self._newest_snapshot()
        lines = notice_lines(snapshot.notices, time.time_ns())
        return bounded(
            msgspec.to_builtins(
                project(_merged(in_folder, snapshot), _PAGE_FIELDS)
                | {
                    "now_ns": time.time_ns(),
                    "state": shown_state(in_folder.state, snapshot),
                    "goes_on": in_folder.is_live or not (snapshot.ended or snapshot.finished),
                    "environments": list(self._config.environments),
                    "raters": _raters(self._config, snapshot),
                    "notices": [
                        {"text": text, "stops": one.stops} for one, text in zip(snapshot.notices, lines, strict=True)
                    ],
                }
            )
        )

    async def series(self, query: Query) -> Any:
        """Return the curves over optimizer steps, out of the log of figures."""
        _check_names(query)
        async with self._reading_curves:
            charts = await anyio.to_thread.run_sync(self._curves.read)
        return {"charts": msgspec.to_builtins(charts)}

    async def alerts(self, query: Query) -> Any:
        """Return where each environment stands by its health checks."""
        _check_names(query)
        async with self._history.borrow() as (bus, _):
            try:
                names = await checked_environments(bus, self._config)
            except ConfigError:
                names = []  # none was checked yet
            found = [await read_health(bus, self._config, name) for name in names[:MAX_GROUPS]]
        return bounded({"environments": msgspec.to_builtins(found)})

    async def groups(self, query: Query) -> Any:
        """Return a page of groups, as `lachesis rollouts` lists them."""
        _check_names(query, "env", "state", "item", "text", *_RANGES, "rating", "highest", "lowest", "limit", "before")
        wanted = GroupFilter.parse(
            envs=query.get("env", ()),
            states=query.get("state", ()),
            item=_one(query, "item"),
            text=_one(query, "text"),
            ranges={name: _one(query, name) for name in _RANGES},
            ratings=query.get("rating", ()),
        )
        order = GroupOrder.parse(_one(query, "highest"), _one(query, "lowest"))
        limit = _count(query, "limit", MAX_GROUPS) or _GROUPS
        before = _count(query, "before")
        async with self._history.borrow() as (bus, _):
            page = await read_group_page(
                bus, self._config, wanted, limit=limit, before=before, seconds=_SEARCH_S, order=order
            )
        return bounded({"groups": msgspec.to_builtins(page.rows), "before": page.before})

    async def revisions(self, query: Query) -> Any:
        """Return the names of the run's revisions."""
        _check_names(query)
        async with self._history.borrow() as (bus, _):
            return {"revisions": await revision_names(bus, self._config.run)}

    async def comparison(self, query: Query) -> Any:
        """Return what `lachesis compare A B` says of revisions `a` and `b`.

        At most `MAX_COMPARED` groups of each are compared.
        """
        _check_names(query, "a", "b")
        names = _one(query, "a"), _one(query, "b")
        if names[0] is None or names[1] is None:
            raise ConfigError("two revisions are needed: a and b")
        async with self._history.borrow() as (bus, _), self._comparing:
            a, b = [await read_revision(bus, self._config, name, MAX_COMPARED) for name in names if name]
            found = await anyio.to_thread.run_sync(partial(compare, self._config.run, a, b, disputed=_DISPUTED))
            said = [await conversation(bus, one.seq, one.sample) for one in found.disputed]
        shown = report(found, said)
        texts = [
            {"group": one.group, "title": text.title, "lines": text.lines}
            for one, text in zip(found.disputed, shown.texts, strict=True)
        ]
        histograms = [
            {
                "title": env_name(found, env),
                "a": env.a,
                "b": env.b,
                "edges": env.edges,
                "counts": [env.counts_a, env.counts_b],
            }
            for env in found.envs
            if env.edges
        ]
        answer = {"findings": shown.findings, "tables": shown.tables, "disputed": texts, "histograms": histograms}
        return bounded(msgspec.to_builtins(answer))

    async def group(self, query: Query, name: str) -> Any:
        """Return one group with all that is known of it.

        `sequence` and `start` say which tokens; else the first of every sequence.
        """
        _check_names(query, "sequence", "start")
        sequence, start = _count(query, "sequence", least=0), _count(query, "start", least=0)
        window = TokenWindow(limit=MAX_TOKENS, sequence=sequence, start=start or 0)
        async with self._history.borrow() as (bus, _):
            detail = await read_group_detail(bus, self._config, name, window)
        texts = await self._tokens.texts(detail.tokenizer_hash, [columns.ids for columns in detail.tokens])
        answer = msgspec.to_builtins(detail)
        tokens = answer.pop("tokens")  # their number is bounded
        for number, columns in enumerate(tokens):
            columns["texts"] = None if isinstance(texts, str) else [text[:MAX_TEXT_CHARS] for text in texts[number]]
        return {**bounded(answer), "tokens": tokens, "texts_reason": texts if isinstance(texts, str) else None}

    async def _newest_snapshot(self) -> RunState:
        """Return the snapshot, at most `_SNAPSHOT_S` old; of a run that has ended the one that there is."""
        async with self._taking_snapshot:
            newest = self._snapshot
            if newest is not None and (self._is_recent() or (newest.ended and await self._stands_still())):
                return newest
            try:
                async with self._history.borrow() as history:
                    found = await read_run_state(history, self._config, anyio.current_time() + _SNAPSHOT_S)
            except LachesisError as error:
                found = run_state_of_folder(self._config, str(error))
                if not newest_figures(self._config.path):
                    raise
            self._snapshot, self._snapshot_s = found, anyio.current_time()
            return found

    def _is_recent(self) -> bool:
        return anyio.current_time() - self._snapshot_s < _SNAPSHOT_S

    async def _stands_still(self) -> bool:
        """Whether only this process has started a server on the run's store since the run ended."""
        if self._history.reads_store:
            return True
        try:
            await anyio.to_thread.run_sync(read_endpoint, self._config.path / NATS_FOLDER)
        except StartupError:
            return self._config.nats is None
        return False


def _merged(in_folder: RunState, snapshot: RunState) -> RunState:
    """Return the state of a run by its folder, with the fields that its server says."""
    by_server = {name: getattr(snapshot, name) for name in STATUS_FIELDS if getattr(snapshot, name) is not None}
    by_server["problems"] = [*in_folder.problems, *snapshot.problems]
    return msgspec.structs.replace(in_folder, **by_server)


def _raters(config: RunConfig, snapshot: RunState) -> list[str]:
    """Return whose ratings groups have: the configured raters, then what the newest rewards name."""
    scorings = [config.scoring, *(env.scoring for env in config.environments.values() if env.scoring is not None)]
    configured = (rater.name or rater.rater for scoring in scorings for rater in scoring.raters)
    return list(dict.fromkeys([*configured, *(name for env in snapshot.rewards.values() for name in env.raters)]))


def _check_names(query: Query, *known: str) -> None:
    unknown = [name for name in query if name not in known]
    if unknown:
        raise ConfigError(f"{unknown[0][:80]!r} is no parameter here; there are {', '.join(known) or 'none'}")


def _one(query: Query, name: str) -> str | None:
    """Return the last value of a parameter, None where it is empty or not given."""
    values = query.get(name) or [""]
    return values[-1] or None


def _count(query: Query, name: str, most: int = (1 << 53) - 1, least: int = 1) -> int | None:
    text = _one(query, name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 16 and least <= int(text) <= most):
        raise ConfigError(f"{name} is {text[:80]!r}: a whole number from {least} to {most} is needed")
    return int(text)
