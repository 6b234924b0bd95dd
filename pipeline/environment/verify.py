"""Checks an environment: loads, prompts, parses, scores, deterministic, resets, renders.

Only the last check needs a model, and it is made only if a model is named. For an environment's name and parameters it
returns one `EnvironmentCheck` for each check, in that order; after a failure, checks that depend on the failed one are
skipped. Answers are scripted (`FakeInference`), so a verdict depends only on the environment.
"""

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

import anyio
import msgspec

from lachesis.pipeline.common.user_code import refuse_ending
from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.environment.fake_inference import FakeInference
from lachesis.pipeline.environment.group_environment import GroupEnvironment
from lachesis.pipeline.environment.load import load_environment
from lachesis.pipeline.environment.rollout import GroupDraft, collect_group
from lachesis.pipeline.errors import EnvironmentCodeError
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.tasks.task import Task
from lachesis.schemas.errors import LachesisError
from lachesis.schemas.rollout import Message

__all__ = ["CHECKS", "EnvironmentCheck", "task_digests", "verify_environment"]

CheckName = Literal["loads", "prompts", "parses", "scores", "deterministic", "resets", "renders"]
CHECKS: tuple[CheckName, ...] = ("loads", "prompts", "parses", "scores", "deterministic", "resets")
_NEEDED: dict[CheckName, set[CheckName]] = {
    "prompts": set(),
    "parses": {"prompts"},
    "scores": {"prompts"},
    "deterministic": {"prompts", "scores"},
    "resets": {"prompts", "scores", "deterministic"},
    "renders": {"prompts"},
}
"""For each check, the checks without which its verdict would say nothing."""
_MAX_TASKS = 16
"""Tasks that are checked, spread over the pool."""
_MAX_TOKENS = 4096
_PROCESS_TIMEOUT_S = 120.0
_OWN_CODE = "not checked: it makes whole groups by its own code, with a model's tokens; try `lachesis env test`"
_ODD_ANSWERS = {
    "an empty answer": "",
    "prose": "I am not sure; let me think about it.",
    "letters of no language": "\u0000 \ud7ff \U0001f600 {]}",
    "an unfinished tool call": '<tool_call>{"name": "x", "argu',
    "a call of no known tool": '<tool_call>{"name": "no_such_tool", "arguments": {"a": 1}}</tool_call>',
    "a long answer": "9" * 3000,
}


class EnvironmentCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table. `verdict` "skipped": an earlier failure leaves nothing to check."""

    check: CheckName
    verdict: Literal["ok", "fail", "skipped"]
    text: str
    """What was seen; of a failure what is wrong, where, and how to mend it."""


class _Failure(Exception):  # noqa: N818 - a finding, not an error
    """Raised when a check fails; its text is the finding."""


async def verify_environment(
    name: str,
    params: Mapping[str, Any] | None = None,
    look_at_prompts: Callable[[Environment], Awaitable[str]] | None = None,
) -> list[EnvironmentCheck]:
    """Return all checks of the environment `name`, a built-in one or `module:Class`.

    `look_at_prompts` renders its prompts for a model, which makes one check more, "renders"; it returns what was seen,
    and raises ConfigError or DataError where something is wrong. A fault of the environment is a failed check, never an
    exception.
    """
    given = dict(params or {})
    found: list[EnvironmentCheck] = []

    def make() -> Environment:
        return load_environment(name, given)

    try:
        env = make()
        text = "; ".join([f"{type(env).__name__}, {len(env)} tasks", *env.doubts])
        if isinstance(env, GroupEnvironment):
            await env.check_setup()
            found.append(EnvironmentCheck(check="loads", verdict="ok", text=f"{text}; it is set up"))
            return found + [_skipped(check, _OWN_CODE) for check in CHECKS[1:]]
        found.append(EnvironmentCheck(check="loads", verdict="ok", text=text))
    except Exception as error:  # noqa: BLE001 - the boundary to other people's code
        mend = "" if isinstance(error, LachesisError) else "; mend its module or __init__, which ran when it was loaded"
        found.append(EnvironmentCheck(check="loads", verdict="fail", text=f"{name}: {_said(error)}{mend}"))
        return found + [_skipped(check) for check in CHECKS[1:]]
    steps: list[tuple[CheckName, Callable[[], Any]]] = [
        ("prompts", lambda: _check_prompts(env)),
        ("parses", lambda: _check_parses(env)),
        ("scores", lambda: _check_scores(env)),
        ("deterministic", lambda: _check_deterministic(name, given, make)),
        ("resets", lambda: _check_resets(make)),
    ]
    if look_at_prompts is not None:
        steps.append(("renders", lambda: look_at_prompts(env)))
    failed: set[CheckName] = set()
    for check, look in steps:
        if failed & _NEEDED[check]:
            found.append(_skipped(check))
            continue
        try:
            with refuse_ending("its code"):
                found.append(EnvironmentCheck(check=check, verdict="ok", text=await look()))
        except _Failure as failure:
            failed.add(check)
            found.append(EnvironmentCheck(check=check, verdict="fail", text=str(failure)))
        except Exception as error:  # noqa: BLE001 - the boundary to other people's code
            failed.add(check)
            found.append(EnvironmentCheck(check=check, verdict="fail", text=f"{type(env).__name__}: {_said(error)}"))
    return found


def task_digests(name: str, params: Mapping[str, Any]) -> list[str]:
    """Return what the tasks of an environment are, one text a task, for a comparison between processes."""
    env = load_environment(name, params)
    return [_encoded(env.task(index)).hex() for index in _indices(env)]


def _skipped(check: CheckName, text: str = "not checked: mend the failure above first") -> EnvironmentCheck:
    return EnvironmentCheck(check=check, verdict="skipped", text=text)


def _indices(env: Environment) -> list[int]:
    count = len(env)
    return sorted({place * (count - 1) // max(1, _MAX_TASKS - 1) for place in range(_MAX_TASKS)})


def _encoded(task: Task) -> bytes:
    return msgspec.msgpack.encode(task)


async def _check_prompts(env: Environment) -> str:
    indices = _indices(env)
    items: dict[str, int] = {}
    for index in indices:
        where = f"{type(env).__name__}.task({index})"
        try:
            task = env.task(index)
        except Exception as error:
            raise _Failure(f"{where} raised {_said(error)}; it must work for 0 <= index < len") from error
        _check_task(where, task)
        if task.item in items:
            raise _Failure(
                f"{where} and task({items[task.item]}) have the same item {task.item!r}; name each task differently, "
                "since the curriculum remembers it by that"
            )
        items[task.item] = index
    return f"{len(indices)} of {len(env)} tasks have a prompt and an item of their own"


def _check_task(where: str, task: object) -> None:
    if not isinstance(task, Task):
        raise _Failure(f"{where} returned a {type(task).__name__}; return lachesis.Task(item=..., prompt=...)")
    if not isinstance(task.item, str) or not task.item:
        raise _Failure(f"{where}.item is {task.item!r}; give it a text that names the task")
    if not isinstance(task.prompt, str) and not all(isinstance(one, Message) for one in task.prompt):
        raise _Failure(f"{where}.prompt is {task.prompt!r:.80}; give text, or a list of lachesis.Message")
    messages = task.messages
    if not any(message.content.strip() for message in messages):
        raise _Failure(f"{where}.prompt is empty; give the model something to answer")
    if messages[-1].role == "assistant":
        raise _Failure(f"{where}.prompt ends with the assistant's words; end it where the model shall speak")
    try:
        _encoded(task)
    except (TypeError, ValueError, OverflowError) as error:
        raise _Failure(f"{where}.task cannot be stored: {error}; use texts, numbers, lists and dictionaries") from error


async def _check_parses(env: Environment) -> str:
    task = env.task(0)
    for kind, answer in _ODD_ANSWERS.items():
        try:
            await _play(env, task, [answer])
        except EnvironmentCodeError as error:
            if error.__cause__ is None or isinstance(error.__cause__, EnvironmentCodeError):
                continue  # about the reward, not about reading an answer: the next check reports it
            raise _Failure(
                f"{kind} to item {task.item!r} made it raise: {error}; an answer that cannot be read is worth a "
                "reward of your choice (0, say), and a ToolError tells the model what was wrong"
            ) from error
        except LachesisError as error:
            raise _Failure(f"{kind} to item {task.item!r}: {error}") from error
    return f"handles {len(_ODD_ANSWERS)} odd answers: {', '.join(_ODD_ANSWERS)}"


async def _check_scores(env: Environment) -> str:
    seen: list[dict[str, float | None]] = []
    for index in _indices(env)[:4]:
        task = env.task(index)
        for answer in _plain_answers(task):
            try:
                seen += (await _play(env, task, [answer])).rewards
            except LachesisError as error:
                raise _Failure(
                    f"the answer {answer!r:.60} to item {task.item!r}: {error}; reward() must return a finite number, "
                    "None where that cannot be known, or these by name"
                ) from error
    values = [value for rewards in seen for value in rewards.values()]
    if not values:
        return "leaves rewards to raters: name them in the run's [scoring]"
    known = sorted({value for value in values if value is not None})
    if not known:
        raise _Failure(
            f"{type(env).__name__}.reward returned None for all of {len(seen)} answers; return a number where it can "
            "tell"
        )
    return f"{len(seen)} answers have rewards from {known[0]:g} to {known[-1]:g}"


async def _check_deterministic(name: str, params: Mapping[str, Any], make: Callable[[], Environment]) -> str:
    first, second = make(), make()
    kind = type(first).__name__
    mend = "draw from random.Random(seed) of its own, by the index, and read no clock"
    for index in _indices(first):
        if not _encoded(first.task(index)) == _encoded(first.task(index)) == _encoded(second.task(index)):
            raise _Failure(f"{kind}.task({index}) is another task at the next call or in a second instance; {mend}")
    here = [_encoded(first.task(index)).hex() for index in _indices(first)]
    for index, mine, other in zip(_indices(first), here, await _digests_elsewhere(name, params), strict=True):
        if mine != other:
            raise _Failure(
                f"{kind}.task({index}) is another task in another process; {mend}; hash() of texts and the order of "
                "a set differ between processes"
            )
    for answer in _plain_answers(first.task(0)):
        one, two = [(await _play(env, env.task(0), [answer])).rewards for env in (make(), make())]
        if one != two:
            raise _Failure(
                f"{kind}.reward gave {_shown(one)} and {_shown(two)} for the same answer {answer!r:.60} to task(0); "
                "let it depend on task and session alone"
            )
    return "same tasks in two instances and two processes, same reward for the same answer"


async def _digests_elsewhere(name: str, params: Mapping[str, Any]) -> list[str]:
    code = (
        f"import json, sys; sys.path[:] = json.loads(sys.argv[3]); from {__name__} import task_digests; "
        "found = task_digests(sys.argv[1], json.loads(sys.argv[2])); print('\\n' + json.dumps(found))"
    )
    given = [msgspec.json.encode(value).decode() for value in (params, sys.path)]
    command = [sys.executable, "-P", "-c", code, name, *given]
    with anyio.move_on_after(_PROCESS_TIMEOUT_S):
        ended = await anyio.run_process(command, check=False)
        if ended.returncode:
            said = ended.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
            raise _Failure(f"loads here, but not in another process: {said[-1][:300]}")
        found: list[str] = msgspec.json.decode(ended.stdout.splitlines()[-1])
        return found
    raise _Failure(f"another process did not make its tasks within {_PROCESS_TIMEOUT_S:g} s")


async def _check_resets(make: Callable[[], Environment]) -> str:
    env = make()
    task = env.task(0)
    answers = [*_plain_answers(task), "23"]
    alone = [(await _play(make(), task, [answer])).rewards for answer in answers]
    again = [(await _play(env, task, [answer])).rewards for answer in [*answers, *answers]]
    together = (await _play(env, task, answers)).rewards
    for answer, expected, repeated in zip([*answers, *answers], [*alone, *alone], again, strict=True):
        if expected != repeated:
            raise _Failure(_leak(env, answer, expected, repeated, "after other samples"))
    for answer, expected, beside in zip(answers, alone, together, strict=True):
        if expected != [beside]:
            raise _Failure(_leak(env, answer, expected, [beside], "beside other samples"))
    return "a sample's reward is the same alone, after others and beside others"


def _leak(env: Environment, answer: str, alone: Sequence[Any], later: Sequence[Any], when: str) -> str:
    return (
        f"{type(env).__name__}: the answer {answer!r:.60} to task(0) is worth {_shown(alone)} alone and "
        f"{_shown(later)} {when}; one instance serves many samples: keep a sample's state in session.state, not in self"
    )


async def _play(env: Environment, task: Task, answers: Sequence[str]) -> GroupDraft:
    """Return the group of these answers, each given in every turn of its sample."""
    inference = FakeInference(lambda _, call: answers[call % len(answers)])
    async with env.running():
        draft = await collect_group(env, task, inference, len(answers), SamplingParams(max_tokens=_MAX_TOKENS))
    if draft.failures:
        raise EnvironmentCodeError(f"{type(env).__name__}: {draft.failures[0].error}")
    return draft


def _plain_answers(task: Task) -> list[str]:
    answer = task.task.get("answer")
    return ["1", str(answer)] if isinstance(answer, str | int | float) and str(answer) != "1" else ["1"]


def _shown(rewards: Sequence[Mapping[str, float | None]]) -> str:
    return ", ".join(f"{name} {value}" for one in rewards for name, value in one.items()) or "nothing"


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, LachesisError) else f"{type(error).__name__}: {error}"
