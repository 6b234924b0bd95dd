"""Makes an environment of an agent, which works on tasks through the recording endpoint.

The agent is a program that is started for each sample, or runs elsewhere. Guarantees that each sample is one session,
recorded by the endpoint; that an agent which ends without what its sample needs costs that sample alone, and is named;
that an outage of inference is never the agent's fault nor a reward; and that a missing reward is no reward of 0.
"""

import base64
import hmac
import os
import secrets
import shlex
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import msgspec

from lachesis.pipeline.common.loopback import LOOPBACK
from lachesis.pipeline.common.private_file import shared_token
from lachesis.pipeline.environment.dataset import Dataset
from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.environment.load import load_environment
from lachesis.pipeline.environment.rollout import ENVIRONMENT_REWARD
from lachesis.pipeline.environment.session import Session
from lachesis.pipeline.errors import EnvironmentCodeError, ServerAwayError
from lachesis.pipeline.extensions.endpoint.agent_session import AgentSession, Trained
from lachesis.pipeline.extensions.endpoint.peers import check_peers
from lachesis.pipeline.extensions.endpoint.program import (
    ProgramEnd,
    delete_left_folders,
    program_environment,
    run_program,
)
from lachesis.pipeline.extensions.endpoint.rendering import PromptRenderer
from lachesis.pipeline.extensions.endpoint.server import EndpointServer, LiveSession
from lachesis.pipeline.tasks.item_keys import Keys
from lachesis.pipeline.tasks.task import Task
from lachesis.schemas.errors import ConfigError

__all__ = ["Agent"]

_RECORDED = "endpoint"
"""Key of the session's state."""
_NOTICED_S = 10.0
"""Seconds after which a notice says that samples wait."""
_FUNCTION_PROGRAM = Path(__file__).with_name("function_program.py")
_SCRIPTS = {".cjs", ".js", ".mjs", ".pl", ".py", ".rb", ".sh", ".ts"}
"""Endings of files that a command runs."""
_MARGIN_S = 30.0
"""Seconds beyond an agent's time in which its sample ends, its processes included."""


class Agent(Environment):
    """Tasks of a file (`path`) or of another environment (`tasks`), on which an agent works.

    `command`: the program of one sample, with its arguments; those that name a file in `folder` are made absolute,
    for each sample runs in a new folder. `function`: a function of Python instead, `module:name` or
    `path/to/file.py:name`, which is called with the task in a process of its own, of the interpreter `python`; what
    it returns is the reward. Without both, agents that run elsewhere take samples by POST /sessions at `host` and
    `port`, with the token in `token_file`, which is made if there is none. `task_params`: parameters of the tasks: of
    a data set (kind dataset) with `path`, or of the environment `tasks`. `reward`: "raters" (the default of a
    command), or "program" (that of a function), where the agent reports it. `overdue_reward`: that of a sample whose
    agent has reported none within `time_limit_s`; by default such a sample is left out. `late_reward_s`: seconds
    after the agent's end in which its reward may still be reported, by what judges it elsewhere; with `port` and
    `token_file` also across a kill. `trained`: "all" sequences of a sample, those of sub-agents and of histories that
    were rewritten, too, or the "longest" alone. `max_calls`: calls of the model in one session. `output_bytes`: what
    a program may write. `evaluation_port`: `port` of the evaluator, which serves held-out tasks from a process of its
    own; 0: a free one. `peers`: addresses of the endpoints of the environment's other replicas, to which requests of
    their sessions are passed on. `variables`: further ones of its process. `hold_s`: seconds for which a request for a
    session waits.

    Raises `ConfigError` if these contradict one another.
    """

    def __init__(
        self,
        *,
        command: str | list[str] | None = None,
        function: str | None = None,
        python: str | None = None,
        path: str | list[str] | None = None,
        tasks: str | None = None,
        task_params: dict[str, Any] | None = None,
        reward: Literal["raters", "program"] | None = None,
        overdue_reward: float | None = None,
        late_reward_s: float = 0.0,
        trained: Trained = "all",
        time_limit_s: float = 600.0,
        max_calls: int = 200,
        output_bytes: int = 1 << 20,
        folder: str = ".",
        variables: dict[str, str] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        evaluation_port: int = 0,
        token_file: str | None = None,
        peers: list[str] | None = None,
        hold_s: float = 60.0,
        success_threshold: float = 1.0,
    ) -> None:
        if (path is None) == (tasks is None):
            raise ConfigError("agent: give either path, a file of tasks, or tasks, another environment")
        if command is not None and function is not None:
            raise ConfigError("agent: give either command, a program, or function, a function of Python")
        if python is not None and function is None:
            raise ConfigError("agent: python is the interpreter of function; name that of a command in it")
        if function is not None:
            command = _function_command(function, Path(folder), python or sys.executable)
        if reward is None:
            reward = "raters" if function is None else "program"
        if command is None and token_file is None:
            raise ConfigError(
                "agent: give command, the program of a sample, function, a function of Python, or token_file, with "
                "whose token agents that run elsewhere start their sessions"
            )
        if command is not None and host not in LOOPBACK:
            raise ConfigError(f"agent: host is {host!r}; programs run on this machine, so leave it out")
        if time_limit_s <= 0 or max_calls < 1 or output_bytes < 1 or hold_s <= 0:
            raise ConfigError("agent: time_limit_s, max_calls, output_bytes and hold_s must be above 0")
        if overdue_reward is not None and reward != "program":
            raise ConfigError('agent: overdue_reward is for reward = "program"; raters judge what there is')
        if late_reward_s < 0 or (late_reward_s and reward != "program"):
            raise ConfigError('agent: late_reward_s must be 0 or more, and is for reward = "program"')
        given = task_params or {}
        self._tasks = load_environment(tasks, given) if tasks is not None else Dataset(path=path, **given)
        self._command = None if command is None else _command(command, Path(folder))
        self._reports = reward == "program"
        self._how_to_report = "a function returns it" if function is not None else "POST $LACHESIS_SESSION_URL/reward"
        self._overdue_reward = overdue_reward
        self._late_reward_s = late_reward_s
        self._waiting: dict[AgentSession, tuple[str, float]] = {}
        """What each session waits for that is neither its agent nor the model, and since when."""
        self._trained: Trained = trained
        self._time_limit_s = time_limit_s
        self._max_calls = max_calls
        self._output_bytes = output_bytes
        self._variables = variables or {}
        self._host, self._port, self._token_file, self._hold_s = host, port, token_file, hold_s
        self._peers = _checked_peers(peers or [], is_elsewhere=command is None)
        self._evaluation_port = evaluation_port
        self._server: EndpointServer | None = None
        self._secret: str | None = None
        self._renderer = PromptRenderer()
        wait_s = 0.0 if self._command is not None else time_limit_s  # until an agent takes the sample
        self.rollout_timeout_s = wait_s + time_limit_s + late_reward_s + _MARGIN_S
        self.turn_timeout_s = self.rollout_timeout_s  # its limit is time_limit_s, however quick others were
        self.success_threshold = success_threshold
        self.doubts = [*self._tasks.doubts, *_missing_files(self._command or [], Path(folder))]
        if late_reward_s and (token_file is None or not port):
            self.doubts.append(
                "late_reward_s is set without port and token_file: a session has another address after a kill, so a "
                "reward that is reported then is lost, and its sample left out"
            )

    def __len__(self) -> int:
        return len(self._tasks)

    def begin_evaluation(self) -> str | None:
        """Leave `port` to the environment's process. See `Environment`."""
        self._port = self._evaluation_port
        if self._command is not None or self._port:
            return None
        return (
            "its agents run elsewhere, and do not know where the evaluator serves held-out tasks; set evaluation_port "
            "in its params and let some agents take samples there, or set evaluate.held_out = 0"
        )

    def task(self, index: int) -> Task:
        return self._tasks.task(index)

    def item_keys(self) -> Keys:
        """Return those of the tasks."""
        return self._tasks.item_keys()

    @property
    def waits_for(self) -> str | None:
        """See `Environment`."""
        now_s = anyio.current_time()
        found = [(what, now_s - since_s) for what, since_s in self._waiting.values()]
        parts = []
        for what in dict.fromkeys(what for what, _ in found):
            ages = [age_s for one, age_s in found if one == what]
            if max(ages) >= _NOTICED_S:
                parts.append(f"{len(ages)} samples wait for {what}, the first for {max(ages):.0f} s")
        return "; ".join(parts) or None

    @contextmanager
    def _waits(self, recorded: AgentSession, what: str) -> Iterator[None]:
        self._waiting[recorded] = what, anyio.current_time()
        try:
            with recorded.session.requests.waiting():
                yield
        finally:
            del self._waiting[recorded]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve the endpoint. See `Environment`."""
        if self._server is not None:
            yield
            return
        await anyio.to_thread.run_sync(delete_left_folders)
        self._secret = None if self._token_file is None else shared_token(Path(self._token_file))
        server = EndpointServer(self._host, self._port, token=self._secret, hold_s=self._hold_s, peers=self._peers)
        try:
            async with self._tasks.running(), server.running():
                self._server = server
                yield
        except OSError as error:
            raise ConfigError(f"agent: cannot listen on port {self._port} of {self._host}: {error.strerror}") from error
        finally:
            self._server = None

    async def rollout(self, task: Task, session: Session) -> None:
        """Let an agent work on a task. See `Environment`."""
        async with self.running():
            server = self._server
            assert server is not None  # noqa: S101 - it runs
            recorded = AgentSession(session, self._renderer, max_calls=self._max_calls)
            session.state[_RECORDED] = recorded
            live = LiveSession(
                recorded,
                self._shown(task),
                self._reports,
                ENVIRONMENT_REWARD,
                may_be_late=self._late_reward_s > 0,
                outlives_kills=self._command is None,
                key=self._key(session),
            )
            with server.serving(live) as url:
                async with recorded.answering():
                    end: ProgramEnd | None = None
                    if self._command is None:
                        await self._elsewhere(server, live)
                    else:
                        end = await self._program(self._command, url, live)
                    self._note_outage(recorded, end)
                if session.failure is None:
                    await self._wait_for_late_reward(recorded, end)
            if session.failure is not None:
                return
            if end is not None:
                session.notes["agent"] = msgspec.to_builtins(end)
            try:
                self._settle(recorded, end)
                recorded.fill(self._trained)
            except EnvironmentCodeError as error:
                recorded.left_out = str(error)
                session.ended.set()  # so that the report of its reward is answered
                raise

    def reward(self, task: Task, session: Session) -> Any:
        """Return what the agent reported, or the reward of the tasks' own environment. See `Environment`."""
        recorded: AgentSession = session.state[_RECORDED]
        return recorded.rewards if recorded.rewards is not None else self._tasks.reward(task, session)

    async def score(self, task: Task, session: Session) -> float | None:
        """Return the score of the tasks' own environment, unless the agent reports it. See `Environment`."""
        if self._reports:
            return await super().score(task, session)
        return await self._tasks.score(task, session)

    def _shown(self, task: Task) -> dict[str, Any]:
        """Return what agents see of a task: what raters compare with only if no rater judges."""
        messages = [{"role": message.role, "content": message.content} for message in task.messages]
        shown = {"item": task.item, "prompt": messages[-1]["content"] if messages else "", "messages": messages}
        return shown | ({"task": task.task} if self._reports else {})

    def _key(self, session: Session) -> str:
        """Return the session's key; it stays the same where another process can go on with the sample."""
        if self._secret is None or session.calls is None:
            return secrets.token_urlsafe(24)
        mac = hmac.digest(self._secret.encode(), session.calls.name.encode(), "sha256")
        return base64.urlsafe_b64encode(mac).decode().rstrip("=")

    async def _wait_for_late_reward(self, recorded: AgentSession, end: ProgramEnd | None) -> None:
        """Wait until the reward of an agent that has ended is reported, if it may come."""
        failed = end is not None and end.has_failed
        if recorded.rewards is not None or failed or not recorded.tree.calls:
            return
        if self._late_reward_s:
            recorded.agent_ended.set()
            with self._waits(recorded, "their rewards, as late_reward_s allows"):
                async with recorded.answering():  # such calls as were answered before
                    with anyio.move_on_after(self._late_reward_s):
                        await recorded.ended.wait()

    async def _program(self, command: Sequence[str], url: str, live: LiveSession) -> ProgramEnd:
        environ = program_environment(os.environ, url, live.key, self._variables)
        return await run_program(
            command,
            environ,
            msgspec.json.encode(live.task),
            time_limit_s=self._time_limit_s,
            output_bytes=self._output_bytes,
            ended=live.recorded.ended.wait,
        )

    async def _elsewhere(self, server: EndpointServer, live: LiveSession) -> None:
        """Wait until an agent has taken the session and ended it, or its time is up.

        After a kill its agent, which has the key, may go on; another one may take it only after a while.
        """
        with anyio.move_on_after(self._time_limit_s) as waiting:
            if live.recorded.is_resumed:
                with anyio.move_on_after(self._hold_s), self._waits(live.recorded, "the agents that they had before"):
                    await live.taken.wait()
            await server.offer(live)
            with self._waits(live.recorded, "an agent that takes them by POST /sessions"):
                await live.taken.wait()
        if waiting.cancelled_caught:
            live.recorded.session.failure = ServerAwayError(  # its sample alone is lost: others may have an agent
                f"no agent has started a session within {self._time_limit_s:g} s: is one running? It has to "
                f"POST to {server.url}/sessions"
            )
            return
        with anyio.move_on_after(self._time_limit_s):
            async with anyio.create_task_group() as tasks:

                async def end_with(event: anyio.Event) -> None:
                    await event.wait()
                    tasks.cancel_scope.cancel()

                tasks.start_soon(end_with, live.recorded.ended)
                tasks.start_soon(end_with, live.recorded.agent_ended)

    def _note_outage(self, recorded: AgentSession, end: ProgramEnd | None) -> None:
        """Let a sample be lost, and no other, whose agent's time was up while it waited for a server that is away."""
        unsettled = recorded.rewards is None and recorded.session.failure is None
        if unsettled and _is_overdue(end) and recorded.requests.is_server_away:
            recorded.session.failure = ServerAwayError(
                "inference: the server was away while an agent waited for it, until its time (time_limit_s) was up"
            )

    def _settle(self, recorded: AgentSession, end: ProgramEnd | None) -> None:
        """Raise what an agent's end means for its sample, if that does not stand."""
        if recorded.rewards is not None:
            return
        how = "had not ended within its time (time_limit_s)" if end is None else end.describe()
        if _is_overdue(end) and not any(recorded.tree.paths()):
            raise EnvironmentCodeError(f"the agent had no answer of the model by then; it {how}")
        if not self._reports:
            if end is not None and end.has_failed:
                raise EnvironmentCodeError(f"the agent {how}")
            return
        if _is_overdue(end) and self._overdue_reward is not None:
            recorded.report({ENVIRONMENT_REWARD: self._overdue_reward})
            return
        late = f" and none came within {self._late_reward_s:g} s (late_reward_s)" if self._late_reward_s else ""
        raise EnvironmentCodeError(f"the agent reported no reward{late} ({self._how_to_report}); it {how}")


def _is_overdue(end: ProgramEnd | None) -> bool:
    """Return whether an agent that has reported nothing was given its whole time; None: it runs elsewhere."""
    return end is None or end.why == "overdue"


def _checked_peers(peers: list[str], *, is_elsewhere: bool) -> list[str]:
    """Return the addresses of other replicas' endpoints. Raises `ConfigError` for others, and where none are of use."""
    if peers and not is_elsewhere:
        raise ConfigError("agent: peers is for agents that run elsewhere: programs find the endpoint that starts them")
    check_peers(peers)
    return peers


def _function_command(place: str, folder: Path, python: str) -> list[str]:
    """Return the command that calls a function. Raises `ConfigError` for a place that cannot be one."""
    source, _, name = place.rpartition(":")
    if not source or not name.isidentifier():
        raise ConfigError(f"agent: function is {place!r:.120}; write module:name or path/to/file.py:name")
    if source.endswith(".py"):
        path = (folder / source).absolute()
        if not path.is_file():
            raise ConfigError(f"agent: function is {place!r:.120}, and there is no file {path}")
        place = f"{path}:{name}"
    return [python, str(_FUNCTION_PROGRAM), str(folder.absolute()), place]


def _command(command: str | list[str], folder: Path) -> list[str]:
    """Return a command whose arguments that name a file in `folder` are absolute. Raises `ConfigError`."""
    try:
        words = shlex.split(command) if isinstance(command, str) else list(command)
    except ValueError as error:
        raise ConfigError(f"agent: command {command!r:.80} cannot be read: {error}") from error
    if not words:
        raise ConfigError("agent: command is empty")
    return [str((folder / word).absolute()) if word and (folder / word).is_file() else word for word in words]


def _missing_files(command: Sequence[str], folder: Path) -> Iterator[str]:
    """Yield a sentence for each word of a command that seems to be a file in `folder`, where there is none."""
    for word in command:
        if Path(word).suffix in _SCRIPTS and not word.startswith("-") and not Path(word).is_file():
            yield f"command names {word!r}, and there is no such file in {folder.absolute()} (folder)"
