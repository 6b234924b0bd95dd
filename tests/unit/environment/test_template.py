"""The tokens between turns, on real tokenizers and chat templates."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lachesis.pipeline.environment.inference_requests import as_chat
from lachesis.pipeline.environment.template import TurnRenderer, render_turn
from lachesis.pipeline.model.tokenizer import ALPHABET, build_character_tokenizer
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.rollout import Message

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def byte_pair_tokenizer(template: str = CHATML) -> Any:
    """Byte-level BPE with merges, so that text has more than one tokenisation."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    corpus = ["the answer is higher or lower", "assistant user tool", "aaa bbb ab ba"] * 20
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


def through(tokenizer: Any) -> Any:
    async def tokenize(messages: Sequence[Message]) -> list[int]:
        chat = [as_chat(message) for message in messages]
        ids: list[int] = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        return ids

    return tokenize


TOKENIZERS = {"characters": lambda: build_character_tokenizer(max_length=4096), "chatml": byte_pair_tokenizer}
TEXT = st.text(alphabet=ALPHABET[:95], min_size=1, max_size=12)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(question=TEXT, answer=TEXT, observation=TEXT, role=st.sampled_from(["user", "tool"]))
async def test_the_pieces_make_the_rendered_conversation(
    kind: str, question: str, answer: str, observation: str, role: str
) -> None:
    tokenizer = TOKENIZERS[kind]()
    tokenize = through(tokenizer)
    opening = [Message(role="user", content=question)]
    new = [Message(role=role, content=observation)]
    generated = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    suffix = await render_turn(tokenize, opening, new, generated[-1])
    whole = await tokenize([*opening, Message(role="assistant", content=answer), *new])
    assert [*await tokenize(opening), *generated, *suffix] == whole


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=30, deadline=None)
@given(question=TEXT, observations=st.lists(TEXT, min_size=2, max_size=3), role=st.sampled_from(["user", "tool"]))
async def test_later_turns_are_rendered_once_and_as_if_each_were_the_first(
    kind: str, question: str, observations: list[str], role: str
) -> None:
    tokenizer = TOKENIZERS[kind]()
    opening = [Message(role="user", content=question)]
    last = tokenizer.eos_token_id
    rendered: list[Sequence[Message]] = []

    async def counted(messages: Sequence[Message]) -> list[int]:
        rendered.append(messages)
        return await through(tokenizer)(messages)

    turns = TurnRenderer()
    for observation in observations:
        new = [Message(role=role, content=observation)]
        assert await turns.render(counted, opening, new, last) == await render_turn(
            through(tokenizer), opening, new, last
        )
    assert len(rendered) == len(observations) + 1


async def test_a_template_that_renders_the_opening_by_what_follows_is_rendered_twice_again() -> None:
    counting = byte_pair_tokenizer("{{ messages | length }} " + CHATML)
    opening, turns = [Message(role="user", content="?")], TurnRenderer()
    for count in (1, 2, 3):
        new = [Message(role="user", content="lower")] * count
        found = await turns.render(through(counting), opening, new, counting.eos_token_id)
        assert found == await render_turn(through(counting), opening, new, counting.eos_token_id)


async def test_text_tokenised_otherwise_than_the_tokenizer_would_stays_as_generated() -> None:
    tokenizer = byte_pair_tokenizer()
    generated = [token for letter in "answer" for token in tokenizer.encode(letter)] + [tokenizer.eos_token_id]
    assert generated[:-1] != tokenizer.encode("answer")
    suffix = await render_turn(
        through(tokenizer),
        [Message(role="user", content="?")],
        [Message(role="user", content="lower")],
        generated[-1],
    )
    assert tokenizer.decode(suffix) == "\n<|im_start|>user\nlower<|im_end|>\n<|im_start|>assistant\n"


async def test_a_turn_that_ended_on_another_token_is_closed_by_the_template() -> None:
    tokenizer = byte_pair_tokenizer()
    suffix = await render_turn(
        through(tokenizer), [Message(role="user", content="?")], [Message(role="tool", content="1")], last_token=7
    )
    assert tokenizer.decode(suffix).startswith("<|im_end|>\n<|im_start|>tool\n1")


async def test_a_template_that_insists_on_the_first_message_is_served() -> None:
    strict = byte_pair_tokenizer(
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('the user must begin') }}{% endif %}" + CHATML
    )
    suffix = await render_turn(
        through(strict), [Message(role="user", content="?")], [Message(role="tool", content="1")], strict.eos_token_id
    )
    assert strict.decode(suffix) == "\n<|im_start|>tool\n1<|im_end|>\n<|im_start|>assistant\n"


async def test_a_template_that_drops_earlier_answers_is_refused() -> None:
    dropping = byte_pair_tokenizer(CHATML.replace("for message in messages", "for message in messages[-1:]"))
    with pytest.raises(ConfigError, match="renders two different assistant messages alike"):
        await render_turn(
            through(dropping), [Message(role="user", content="?")], [Message(role="user", content="x")], 1
        )
