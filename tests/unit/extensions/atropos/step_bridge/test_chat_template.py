"""What chat templates write around messages, and the texts found again in it: templates of five families."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.extensions.atropos.step_bridge.text import ChatTemplate
from lachesis.schemas.errors import DataError

Chat = Sequence[dict[str, Any]]


def chatml(chat: Chat, prompted: bool) -> str:
    """Qwen2.5's: a system message of its own where there is none."""
    if chat[0]["role"] != "system":
        chat = [{"role": "system", "content": "You are Qwen, a helpful assistant."}, *chat]
    text = "".join(f"\x01{one['role']}\n{one['content']}\x02\n" for one in chat)
    return text + "\x01assistant\n" * prompted


def qwen3(chat: Chat, prompted: bool) -> str:
    """Without thinking: an empty thought before each new answer."""
    text = "".join(f"\x01{one['role']}\n{one['content']}\x02\n" for one in chat)
    return text + "\x01assistant\n<think>\n\n</think>\n\n" * prompted


def llama(chat: Chat, prompted: bool) -> str:
    text = "\x03" + "".join(f"\x04{one['role']}\x05\n\n{one['content'].strip()}\x02" for one in chat)
    return text + "\x04assistant\x05\n\n" * prompted


def gemma(chat: Chat, prompted: bool) -> str:
    """No system message, no tools."""
    names = {"user": "user", "assistant": "model"}
    text = "\x03" + "".join(f"\x01{names[one['role']]}\n{one['content'].strip()}\x02\n" for one in chat)
    return text + "\x01model\n" * prompted


def mistral(chat: Chat, prompted: bool) -> str:
    parts = {"user": "[INST] {} [/INST]", "assistant": " {}\x02"}
    return "\x03" + "".join(parts[one["role"]].format(one["content"]) for one in chat)


def template(write: Callable[[Chat, bool], str]) -> ChatTemplate:
    async def tokenize(messages: Chat, *, add_generation_prompt: bool = True) -> list[int]:
        return [ord(character) for character in write(messages, add_generation_prompt)]

    async def detokenize(ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    return ChatTemplate(tokenize, detokenize)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


FAMILIES = [chatml, qwen3, llama, gemma, mistral]


@pytest.mark.parametrize("write", FAMILIES)
@pytest.mark.parametrize("said", ["4", "I think:\nfour.", "user"])
async def test_the_texts_of_a_conversation_are_found_again(write: Callable[[Chat, bool], str], said: str) -> None:
    found = template(write)
    chat = [user("What is 2+2?\n\nSay a number.")]
    prompt = write(chat, True)
    assert await found.first_observation(prompt) == chat[0]["content"]
    sample = await found.sample(said)
    action = "".join(map(chr, sample.token_ids.tolist()))
    assert action.removesuffix("\x02") == (said if write is not mistral else f" {said}".removeprefix(" "))
    assert action.endswith("\x02"), "the token that ends an answer is part of it"
    following = write([*chat, assistant(said), user("Sure?")], True)
    new = following.partition(f"{said}\x02")[2]
    assert await found.next_observation(new, sample.token_ids.tolist()) == "Sure?"
    cut = sample.token_ids.tolist()[:-1]
    assert await found.next_observation(f"\x02{new}", cut) == "Sure?", "the answer was cut before its end"


@pytest.mark.parametrize("write", [chatml, qwen3, llama])
async def test_a_system_message_and_examples_stay_without_what_is_written_around_them(
    write: Callable[[Chat, bool], str],
) -> None:
    chat = [{"role": "system", "content": "Be brief."}, user("1+1?"), assistant("2"), user("2+2?")]
    assert await template(write).first_observation(write(chat, True)) == "Be brief.\n1+1?\n2\n2+2?"


async def test_a_prompt_that_is_no_conversation_stays_as_it_is() -> None:
    assert await template(chatml).first_observation("Once upon a time") == "Once upon a time"
    assert await template(chatml).next_observation(" there was", [ord("x")]) == " there was"


async def test_a_tools_message_is_an_observation() -> None:
    chat = [user("2+2?"), assistant("calc"), {"role": "tool", "content": "4"}]
    new = chatml(chat, True).partition("calc\x02")[2]
    assert await template(chatml).next_observation(new, [*map(ord, "calc\x02")]) == "4"


async def test_an_answer_that_the_template_rewrites_is_refused() -> None:
    def without_thoughts(chat: Chat, prompted: bool) -> str:
        chat = [{**one, "content": one["content"].rpartition("</think>")[2]} for one in chat]
        return "" if not chat[-1]["content"] else chatml(chat, prompted)

    with pytest.raises(DataError, match="SampledText"):
        await template(without_thoughts).sample("<think>hm</think>")


async def test_an_engine_that_is_away_for_a_moment_teaches_nothing_about_its_template() -> None:
    away = [True]

    def write(chat: Chat, prompted: bool) -> str:
        if chat[0]["role"] == "system" and away:
            away.clear()
            raise InfrastructureError("the engine does not answer")
        return llama(chat, prompted)

    found, chat = template(write), [{"role": "system", "content": "Be brief."}, user("1+1?")]
    with pytest.raises(InfrastructureError):
        await found.first_observation(llama(chat, True))
    assert await found.first_observation(llama(chat, True)) == "Be brief.\n1+1?"
