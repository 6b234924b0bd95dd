"""Chat templates: parameters, tools, refusals, templates by file or text, and their part in the tokenizer's hash."""

from pathlib import Path
from typing import Any

import pytest

from lachesis.pipeline.common.tokenizer_hash import same_tokens, with_template_parameters
from lachesis.pipeline.model import pretrained_tokenizer
from lachesis.pipeline.model.chat_template import read_template, render_chat, template_variables
from lachesis.pipeline.model.pretrained_tokenizer import load_tokenizer
from lachesis.pipeline.model.tokenizer import build_character_tokenizer, save_tokenizer, tokenizer_hash
from lachesis.schemas.errors import ConfigError, DataError

SAY = [{"role": "user", "content": "hi"}]
THINKS = "{{ messages[0].content }}{% if not enable_thinking | default(true) %}-{% endif %}"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


@pytest.fixture
def tokenizer() -> Any:
    return build_character_tokenizer(max_length=64)


def text(tokenizer: Any, template: str, messages: Any = SAY, **given: Any) -> str:
    tokenizer.chat_template = template
    return str(tokenizer.decode(render_chat(tokenizer, messages, **given)))


def test_parameters_reach_the_template(tokenizer: Any) -> None:
    assert text(tokenizer, THINKS) == "hi"
    assert text(tokenizer, THINKS, parameters={"enable_thinking": False}) == "hi-"
    with pytest.raises(DataError, match="'tools' is not the template's to take"):
        text(tokenizer, THINKS, parameters={"tools": []})


def test_tools_that_a_template_would_drop_are_refused(tokenizer: Any) -> None:
    assert text(tokenizer, "{% for t in tools %}{{ t.function.name }}{% endfor %}", tools=TOOLS) == "add"
    with pytest.raises(DataError, match="does not read `tools`"):
        text(tokenizer, THINKS, tools=TOOLS)


def test_a_template_s_refusals_and_mistakes_are_named_with_the_roles(tokenizer: Any) -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    with pytest.raises(DataError, match=r"no system role \(roles: system, user\)"):
        text(tokenizer, refuses, [{"role": "system", "content": "x"}, *SAY])
    with pytest.raises(DataError, match="wrong in line 2"):
        template_variables("{{ a }}\n{% for m in messages %}")
    marked = "{% generation %}{{ enable_thinking }}{% endgeneration %}{{ messages }}"
    assert template_variables(marked) == {"enable_thinking"}


def test_a_template_by_text_or_file_stands_in_for_a_missing_one(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = None
    save_tokenizer(tokenizer, tmp_path)
    with pytest.raises(ConfigError, match="lacks a chat template; choose an instruct model, or give one with"):
        load_tokenizer(tmp_path)
    (tmp_path / "mine.jinja").write_text(THINKS)
    by_file, by_text = load_tokenizer(tmp_path, str(tmp_path / "mine.jinja")), load_tokenizer(tmp_path, THINKS)
    assert by_file.chat_template == by_text.chat_template == THINKS
    assert tokenizer_hash(by_file) == tokenizer_hash(by_text) != tokenizer_hash(load_tokenizer(tmp_path, "{{ 1 }}"))
    with pytest.raises(ConfigError, match=r"no\.jinja.*No such file"):
        read_template("no.jinja")
    with pytest.raises(ConfigError, match="wrong in line 1"):
        read_template("{{ a")


@pytest.mark.parametrize(
    "template", ["{% for m in messages %}{{ m.content }", {"default": THINKS, "tool_use": "{% if %}"}]
)
def test_a_template_of_a_model_whose_syntax_is_wrong_is_refused_as_it_is_loaded(
    tokenizer: Any, tmp_path: Path, template: Any
) -> None:
    save_tokenizer(tokenizer, tmp_path)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"the chat template is wrong in line 1: .*name another one with"):
        load_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path, THINKS).chat_template == THINKS


def test_a_slow_tokenizer_is_refused_by_name(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class CanineTokenizer:
        is_fast, chat_template, eos_token_id = False, THINKS, 1

    class Auto:
        @staticmethod
        def from_pretrained(*_: Any, **__: Any) -> CanineTokenizer:
            return CanineTokenizer()

    save_tokenizer(tokenizer, tmp_path)
    monkeypatch.setattr(pretrained_tokenizer, "AutoTokenizer", Auto)
    with pytest.raises(ConfigError, match=r"is a CanineTokenizer, which is slow.*tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_parameters_are_part_of_the_hash_and_hashes_without_are_read_as_before() -> None:
    plain = "a" * 64
    assert with_template_parameters(plain, {}) == plain
    off, on = (with_template_parameters(plain, {"enable_thinking": value, "b": 1}) for value in (False, True))
    assert len({plain, off, on}) == 3
    assert off == with_template_parameters(plain, {"b": 1, "enable_thinking": False})
    assert same_tokens(off, on)
    assert same_tokens(plain, on)
    assert not same_tokens("b" * 64, on)
