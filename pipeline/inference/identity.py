"""Compares what an inference server says and does with the server that a run expects.

Guarantees that a request is sent over a new connection only after the server behind it has been compared, and that what
was generated can be compared once more before it is stored. Tokenizer, model and engine are compared by what the server
reports; the tokenizer also by the text that the server makes of known token ids. Policy versions are compared with
those that the run's trainer has published. A notice names a server that differs until it is right again.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, Protocol

import anyio
import msgspec

from lachesis.pipeline.common.tokenizer_hash import plain_text, same_tokens, with_template_parameters
from lachesis.pipeline.errors import WrongServerError
from lachesis.schemas.control import PolicyRecord, TokenProbe
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ids import PolicyVersion

__all__ = ["IdentityGuard", "ObservedServer"]

_RECORD_S = 3.0
"""Seconds that the record of a policy version, which is stored before any server has it, may take to arrive."""
_HASH_CHARS = 12
_TEXT_CHARS = 60
_MEND = "nothing that it generates is stored; start it again with the model and tokenizer that the run trains"
_MEND_HELD = "nothing that it answers is used; start it again with the model and tokenizer that it had"


class ObservedServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server's report on itself. None: it does not say."""

    model: str
    engine: str | None
    tokenizer_hash: str | None
    weight_version: str | None = None
    text: str | None = None
    """The text that it makes of the probe's token ids; None: not requested."""


class Observable(Protocol):
    """A server that can be observed: `InferenceClient`."""

    async def observe(self, probe: TokenProbe | None, *, version: bool = False) -> ObservedServer:
        """Return the server's present report on itself, over a connection of its own."""
        ...

    @property
    def where(self) -> str:
        """Its name in messages."""
        ...


class IdentityGuard:
    """Compares the servers of one role with the run's newest policy (`expect`), or with the first of them (`hold_to`).

    Without either, all pass. `model` and `engine` are those that the run starts itself; None: those of the first server
    that passes.
    """

    def __init__(self, report: Callable[[str | None], None] | None = None) -> None:
        """`report` is called with what differs, and with None once nothing does."""
        self.report: Callable[[str | None], None] = report or (lambda _: None)
        self.model: str | None = None
        self.engine: str | None = None
        self.record: PolicyRecord | None = None
        self.observed: ObservedServer | None = None
        """The last server that passed."""
        self._holds = False
        self._held_hash: str | None = None
        self._problems: dict[str, str] = {}
        self._versions: set[str] = set()
        self._published = anyio.Event()
        self._lock = anyio.Lock()
        self._asked = self._passed = self._failed = 0
        self._error: Exception | None = None

    def expect(self, record: PolicyRecord) -> None:
        """Take in the run's newest policy."""
        self.record = record
        self._versions |= {record.version, *(record.earlier or [])}
        published, self._published = self._published, anyio.Event()
        published.set()

    def hold_to(self, model: str, tokenizer_hash: str | None) -> None:
        """Let every further server be like the first one of a role that serves no policy, a teacher's say."""
        self.model, self._held_hash, self._holds = model, tokenizer_hash, True

    @property
    def vocabulary(self) -> int | None:
        """Number of token ids that the trainer knows; None: not known."""
        return None if self.record is None else self.record.vocabulary

    def tokenizer_hash(self, parameters: Mapping[str, Any]) -> str:
        """Return the hash of the tokenizer that was observed, with these parameters of its template.

        Of a server that reports none, the one whose text for the probe it made.
        """
        observed = None if self.observed is None else self.observed.tokenizer_hash
        expected = "" if self.record is None else self.record.tokenizer_hash
        return with_template_parameters(observed or expected, parameters)

    async def check(self, server: Observable, *, version: bool = False) -> None:
        """Compare the server as it is now. A comparison serves all callers that came before it began.

        `version`: compare the weights that it holds, too. Raises `WrongServerError`; `InfrastructureError` when it
        cannot be reached.
        """
        if self.record is None and not self._holds:
            return
        self._asked += 1
        asked = self._asked
        async with self._lock:
            if self._passed >= asked and not version:
                return
            if self._failed >= asked and self._error is not None:
                raise self._error
            began = self._asked
            try:
                probe = None if self.record is None else self.record.token_probe
                found = await server.observe(probe, version=version)
                self._compare(server.where, found)
                if found.weight_version is not None:
                    await self.check_versions(server, [found.weight_version])
            except Exception as error:
                self._failed, self._error = began, error
                raise
            self._passed, self.observed = began, found
            self.model, self.engine = self.model or found.model, self.engine or found.engine
            self._say("server", None)

    @property
    def problem(self) -> str | None:
        """The difference that holds now, None if there is none."""
        return next(iter(self._problems.values()), None)

    async def check_versions(self, server: Observable, versions: Iterable[str]) -> None:
        """Raise `WrongServerError` where tokens come from weights that the run's trainer has not published."""
        for version in versions:
            if not self._knows(version):
                with anyio.move_on_after(_RECORD_S):
                    while not self._knows(version):
                        await self._published.wait()
            if not self._knows(version):
                newest = "none" if self.record is None else self.record.version
                self._refuse(
                    "version",
                    f"{server.where} samples from policy {version[:80]!r}, which this run's trainer has not "
                    f"published; its newest is {newest}",
                )
        self._say("version", None)

    def _knows(self, version: str) -> bool:
        try:
            step = PolicyVersion.parse(version).step
        except SchemaError:
            return False
        record = self.record
        if record is None or record.earlier is None or version in self._versions:
            return True  # a trainer of another project does not say which it has published
        full = len(record.earlier) >= PolicyRecord.MAX_EARLIER
        return full and step < PolicyVersion.parse(record.earlier[0]).step  # too old to be listed, and to be trained on

    def _compare(self, where: str, found: ObservedServer) -> None:
        if self.record is not None:
            self._compare_tokenizer(where, found, self.record)
        said, held = found.tokenizer_hash, self._held_hash
        if said and held and not same_tokens(said, held):
            self._refuse(
                "server",
                f"{where} has another tokenizer than before: {said[:_HASH_CHARS]}, not {held[:_HASH_CHARS]}",
            )
        if self.engine is not None and found.engine != self.engine:
            self._refuse("server", f"{where} is another engine: {found.engine!r:.80}, not {self.engine!r:.80}")
        if self.model is not None and found.model != self.model:
            self._refuse("server", f"{where} serves another model: {found.model!r:.80}, not {self.model!r:.80}")

    def _compare_tokenizer(self, where: str, found: ObservedServer, record: PolicyRecord) -> None:
        said, expected = found.tokenizer_hash, record.tokenizer_hash
        if said and expected and not same_tokens(said, expected):
            self._refuse(
                "server",
                f"{where} has another tokenizer than the trainer: {said[:_HASH_CHARS]}, not {expected[:_HASH_CHARS]}",
            )
        if found.text is not None and record.token_probe is not None:
            text = plain_text(found.text)
            if text != record.token_probe.text:
                self._refuse(
                    "server",
                    f"{where} has another vocabulary than the trainer: it reads the same token ids as "
                    f"{text[:_TEXT_CHARS]!r}, not {record.token_probe.text[:_TEXT_CHARS]!r}",
                )

    def _refuse(self, what: str, text: str) -> NoReturn:
        self._say(what, f"{text}; {_MEND_HELD if self._holds else _MEND}")
        raise WrongServerError(text)

    def _say(self, what: str, problem: str | None) -> None:
        before = self.problem
        if problem is None:
            self._problems.pop(what, None)
        else:
            self._problems[what] = problem
        if self.problem != before:
            self.report(self.problem)
