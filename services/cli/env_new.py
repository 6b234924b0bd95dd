"""`lachesis env new`: writes an environment to begin with, its test, and a configuration."""

import json
import keyword
import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lachesis.schemas.errors import ConfigError

__all__ = ["TemplateKind", "env_new"]


class TemplateKind(StrEnum):
    """What `lachesis env new` can write."""

    SINGLE = "single"
    TOOLS = "tools"
    DATASET = "dataset"


def env_new(
    name: Annotated[str, typer.Argument(help="What it is called: letters, digits and underscores.")],
    kind: Annotated[
        TemplateKind, typer.Option(help="One turn; several turns with tools; or a data set, without code.")
    ] = TemplateKind.SINGLE,
    folder: Annotated[Path, typer.Option(help="Where the files are written.")] = Path(),
) -> None:
    """Write an environment with its test, and a configuration to run it."""
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise ConfigError(f"name {name!r}: use small letters, digits and underscores, a letter first")
    files = {folder / file: text for file, text in _files(name, kind).items()}
    if there := ", ".join(str(path) for path in files if path.exists()):
        raise ConfigError(f"{there}: there already; choose another name, or another --folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
            print(path)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    go = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    print()
    if kind is not TemplateKind.DATASET:
        print(f"test it: {go}python -m pytest test_{name}.py")
    print(f"train:   {go}lachesis up --config {name}.toml --set model=MODEL")


def _class_name(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _files(name: str, kind: TemplateKind) -> dict[str, str]:
    if kind is TemplateKind.DATASET:
        rows = [{"question": f"What is {a} + {b}?", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"} for a, b in _SUMS]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        return {f"{name}.jsonl": lines, f"{name}.toml": _named(_DATASET_TOML, name)}
    code, test = (_SINGLE, _SINGLE_TEST) if kind is TemplateKind.SINGLE else (_TOOLS, _TOOLS_TEST)
    files = {f"{name}.py": code, f"test_{name}.py": test, f"{name}.toml": _TOML}
    return {file: _named(text, name) for file, text in files.items()}


def _named(text: str, name: str) -> str:
    return text.replace("CLASS", _class_name(name)).replace("NAME", name)


_SUMS = [(a, 10 * a + 3) for a in range(1, 21)]

_SINGLE = '''"""The environment NAME: one question, one answer."""

from lachesis import Environment, Session, Task


class CLASS(Environment):
    def __init__(self, largest: int = 99) -> None:
        self.numbers = largest + 1

    def __len__(self) -> int:
        """How many tasks there are."""
        return self.numbers**2

    def task(self, index: int) -> Task:
        """The same at every call and in every process."""
        a, b = divmod(index, self.numbers)
        return Task(
            item=f"{a}+{b}",  # the curriculum remembers a task by this
            prompt=f"What is {a}+{b}? Answer with the number alone.",
            task={"answer": str(a + b)},  # what raters see
            difficulty=float(len(f"{a}{b}")),
        )

    def reward(self, task: Task, session: Session) -> float:
        """Leave this out where raters judge."""
        return float(session.text.strip() == task.task["answer"])
'''

_SINGLE_TEST = '''"""The environment NAME, without a model: what is rewarded, and what is not."""

from functools import partial

import anyio
import pytest
from NAME import CLASS

from lachesis.testing import FakeInference, evaluate


@pytest.mark.parametrize(("answer", "rate"), [("3", 1.0), ("4", 0.0), ("three", 0.0)])
def test_the_right_answer_alone_is_rewarded(answer: str, rate: float) -> None:
    env = CLASS(largest=9)
    assert env.task(12).task == {"answer": "3"}  # 1+2
    result = anyio.run(partial(evaluate, env, FakeInference(lambda prompt, call: answer), k=1, items=[12]))
    assert result.avg_at_k == rate


def test_every_task_can_be_made() -> None:
    env = CLASS(largest=9)
    assert len({env.task(index).item for index in range(len(env))}) == len(env)
'''

_TOOLS = '''"""The environment NAME: several turns, with a tool that the model may call."""

from lachesis import Environment, Message, Session, Task, ToolError, tool


class CLASS(Environment):
    max_turns = 4

    def __len__(self) -> int:
        """How many tasks there are."""
        return 900

    def task(self, index: int) -> Task:
        """The same at every call and in every process."""
        a, b = 100 + index, 999 - index
        ask = [Message(role="system", content=self.tool_instructions())]
        ask.append(Message(role="user", content=f"What is {a}*{b}? Answer with the number alone."))
        return Task(item=f"{a}*{b}", prompt=ask, task={"answer": str(a * b)})

    @tool
    async def multiply(self, a: int, b: int) -> int:
        """Return a*b."""
        if abs(a) > 10**6 or abs(b) > 10**6:
            raise ToolError("only numbers up to a million")  # the model reads this
        return a * b

    def reward(self, task: Task, session: Session) -> float:
        """Leave this out where raters judge."""
        return float(session.text.strip() == task.task["answer"])
'''

_TOOLS_TEST = '''"""The environment NAME, without a model: a tool is called and its answer read."""

from functools import partial

import anyio
from NAME import CLASS

from lachesis.testing import FakeInference, evaluate

CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 100, "b": 999}}</tool_call>'


def played(prompt: str, call: int) -> str:
    """Call the tool, then answer what it said."""
    return "99900" if "99900" in prompt else CALL


def test_an_answer_by_the_tool_is_rewarded() -> None:
    result = anyio.run(partial(evaluate, CLASS(), FakeInference(played), k=1, items=[0]))
    assert result.avg_at_k == 1.0


def test_a_guess_is_not() -> None:
    result = anyio.run(partial(evaluate, CLASS(), FakeInference(lambda prompt, call: "1"), k=1, items=[0]))
    assert result.avg_at_k == 0.0
'''

_TOML = """# lachesis up --config NAME.toml --set model=MODEL, from this folder
[environments.NAME]
kind = "NAME.py:CLASS"
samples = 8
max_new_tokens = 64

[batching]
batch_size = 64

[training]
steps = 100
"""

_DATASET_TOML = """# lachesis up --config NAME.toml --set model=MODEL, from this folder
# Your own file takes the place of NAME.jsonl: JSON lines, JSON, CSV or Parquet; `prompt` and `answer` name its columns.
[environments.NAME]
kind = "dataset"
params = { path = "NAME.jsonl", prompt = "question", answer = "answer", answer_after = "####" }
samples = 8
max_new_tokens = 64

[scoring]
raters = [{ rater = "numeric" }]

[batching]
batch_size = 64

[training]
steps = 100
"""
