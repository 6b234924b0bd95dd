"""What a model's chat template does to an environment's prompts is found out before a run."""

import re
from typing import Any

import pytest

from lachesis import Environment, Message, Session, Task, tool
from lachesis.pipeline.environment.prompts import PromptReport, check_prompts
from lachesis.pipeline.model.tokenizer import build_character_tokenizer

KEEPS = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ 'a' if enable_thinking else 'b' }}"
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }};{% endfor %}"
)
DROPS = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ m.content }};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


class Prompts(Environment):
    roles: tuple[str, ...] = ("user",)
    long = False

    def __len__(self) -> int:
        return 40

    def task(self, index: int) -> Task:
        said = "x" * (90 if self.long and index % 4 == 1 else 1)
        return Task(item=f"t{index}", prompt=[Message(role=role, content=said) for role in self.roles])

    def reward(self, task: Task, session: Session) -> float:
        return 1.0


class Tools(Prompts):
    @tool
    def add(self, a: int) -> int:
        """Return a."""
        return a


async def report(env: Environment, template: str, max_context: int | None = 64, **parameters: Any) -> PromptReport:
    tokenizer = build_character_tokenizer(max_length=128)
    tokenizer.chat_template = template
    return await check_prompts(
        env, tokenizer, parameters=parameters, max_context=max_context, max_new_tokens=8, look_s=60.0
    )


@pytest.mark.parametrize(
    ("kind", "prompt", "fatal", "said"),
    [
        (Prompts, ("{% for m in messages %}", "user"), True, "the chat template is wrong in line 1"),
        (Prompts, (STRICT, "system", "user"), True, "item 't0'.*roles must alternate.*roles: system, user"),
        (Prompts, (STRICT, "user", "user"), True, "roles must alternate.*roles: user, user"),
        (Tools, (STRICT, "user"), True, "goes on by a tool.*roles must alternate.*user, assistant, tool"),
        (Prompts, (DROPS, "system", "user"), False, "drops messages of the role system in silence"),
        (Tools, (DROPS, "user"), True, "drops messages of the role tool in silence"),
    ],
)
async def test_what_a_template_refuses_or_drops_is_named_once(
    monkeypatch: pytest.MonkeyPatch, kind: Any, prompt: tuple[str, ...], fatal: bool, said: str
) -> None:
    template, *roles = prompt
    monkeypatch.setattr(kind, "roles", tuple(roles))
    (problem,) = (await report(kind(), template)).problems
    assert problem.fatal == fatal
    assert re.search(said, problem.text), problem.text


async def test_a_template_that_keeps_everything_is_fine() -> None:
    for env in (Prompts(), Tools()):
        found = await report(env, KEEPS, enable_thinking=True)
        assert found.problems == []
        assert found.text == "40 of 40 prompts take up to 8 tokens of a context of 64"


async def test_a_parameter_that_a_template_does_not_read_is_named() -> None:
    (problem,) = (await report(Prompts(), KEEPS, enable_thinkin=False)).problems
    assert "does not read 'enable_thinkin', did you mean 'enable_thinking'?" in problem.text
    assert problem.fatal  # the server refuses it


async def test_prompts_beyond_the_context_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prompts, "long", True)
    (problem,) = (await report(Prompts(), KEEPS)).problems
    assert problem.text.startswith("10 of 40 prompts leave no room for an answer in the context of 64 tokens")
    assert "' has 97 tokens" in problem.text
    assert not problem.fatal
    assert (await report(Prompts(), KEEPS, None)).problems == []
    assert "30 leave less than max_new_tokens = 8" in (await report(Prompts(), KEEPS, 12)).text
    monkeypatch.setattr(Prompts, "roles", ("user",) * 4)
    (problem,) = (await report(Prompts(), KEEPS, 20)).problems
    assert problem.fatal
