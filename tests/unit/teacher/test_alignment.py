"""Alignment of two tokenizers by bytes: trained ones of different kinds, and texts that are cut or unlike."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lachesis.pipeline.model.tokenizer import CHAT_TEMPLATE, build_character_tokenizer
from lachesis.pipeline.teacher.logic.alignment import byte_table, common_spans, valid_text
from lachesis.pipeline.teacher.retokenize import Retokenizer, runs_of
from lachesis.pipeline.teacher.token_bytes import token_bytes
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.schemas.rollout import Message, ToolCall

CORPUS = ["the cat sat on the mat, and the dog ran after the cat", "größer, schöner: naïve café 🙂 ok", "3 + 4 = 7"] * 9
TALK = [Message(role="user", content="write"), Message(role="assistant", content="the cat")]


def wrapped(backend, eos="<end>", template=CHAT_TEMPLATE):
    backend.add_special_tokens(["<begin>", eos, "<pad>", "<|sep|>"])
    found = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<begin>",
        eos_token=eos,
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )
    found.chat_template = template
    return found


def byte_level(size, **names):
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    return wrapped(backend, **names)


def sentencepiece(size=60, **names):
    """As Llama 2's: merges of characters, with a token for each byte beside them."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(CORPUS[:1], trainers.BpeTrainer(vocab_size=size, show_progress=False))
    learned = json.loads(backend.to_str())["model"]
    places = [*learned["vocab"], "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [tuple(pair) for pair in learned["merges"]]
    vocabulary = {token: i for i, token in enumerate(places)}
    backend.model = models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return wrapped(backend, **names)


STUDENT = byte_level(262)
OTHERS = {"byte-level": byte_level(420, eos="</s>"), "sentencepiece": sentencepiece(eos="</s>")}


@pytest.fixture(params=OTHERS)
def teacher(request):
    return OTHERS[request.param]


def pair(teacher, student=STUDENT):
    return Retokenizer(student, teacher, names=("student", "teacher"))


def turn(teacher, text, student=STUDENT, *, end=True, conversation=TALK):
    """The one turn of a sequence of three prompt tokens, `text` and the end; and the sequence's tokens."""
    ids = student.encode(text, add_special_tokens=False) + [student.eos_token_id] * end
    tokens = np.array([1, 2, 3, *ids], np.int32)
    (found,) = pair(teacher, student).turns(tokens, np.arange(len(tokens)) >= 3, conversation)
    return found, tokens


def said(tokenizer, ids):
    table = token_bytes(tokenizer, "t")
    return b"".join(table[int(i)] for i in ids)


TEXTS = ["the cat sat", "größer 🙂", " leading space", "dog\n\nran", "zzzqqq", "a", "naïve café 🙂 ok the mat"]


@pytest.mark.parametrize("text", TEXTS)
def test_both_sides_of_every_span_are_the_same_bytes_and_all_tokens_are_covered(teacher, text):
    found, tokens = turn(teacher, text)
    *words, last = found.spans
    at = 3
    for span in words:
        assert span.student.start == at
        at = span.student.stop
        one, other = said(STUDENT, tokens[span.student]), said(teacher, found.token_ids[span.teacher])
        lead = b" " if span is words[0] and other == b" " + one else b""  # sentencepiece's own first space
        assert lead + one == other
    assert at == last.student.start == len(tokens) - 1
    assert found.token_ids[last.teacher] == [teacher.eos_token_id]
    assert found.token_ids[-1] == teacher.eos_token_id != STUDENT.eos_token_id


def test_the_two_vocabularies_really_differ(teacher):
    found, tokens = turn(teacher, "the cat sat on the mat")
    assert any(span.student.stop - span.student.start > 1 for span in found.spans)
    context = teacher.apply_chat_template([{"role": "user", "content": "write"}], return_dict=False)
    assert found.token_ids[: len(context)] == context
    assert found.token_ids[len(context) :] != tokens[3:].tolist()


def test_the_conversation_is_rendered_with_the_teachers_own_template():
    other = byte_level(420, template="{% for m in messages %}[{{ m['content'] }}]{% endfor %}>>")
    found, _ = turn(other, "the cat")
    assert said(other, found.token_ids).startswith(b"[write]>>the cat")


def test_a_turn_that_ends_inside_of_a_character_is_cut_there(teacher):
    ids = STUDENT.encode("ok 🙂", add_special_tokens=False)
    pieces = [said(STUDENT, [i]) for i in ids]
    assert len(pieces[-1]) < 4, "the character is one token of the student"
    tokens = np.array([1, *ids[:-1]], np.int32)
    (found,) = pair(teacher).turns(tokens, np.arange(len(tokens)) >= 1, TALK)
    covered = said(STUDENT, np.concatenate([tokens[span.student] for span in found.spans]))
    assert b"ok" in covered
    assert b"\xf0" not in covered


def test_every_turn_is_asked_about_after_what_was_said_before_it(teacher):
    talk = [*TALK, Message(role="user", content="and?"), Message(role="assistant", content="a dog")]
    first, second = (STUDENT.encode(text, add_special_tokens=False) for text in ("the cat", "a dog"))
    tokens = np.array([1, *first, 2, *second], np.int32)
    mask = np.array([False, *[True] * len(first), False, *[True] * len(second)])
    one, two = pair(teacher).turns(tokens, mask, talk)
    assert b"and?" not in said(teacher, one.token_ids)
    assert b"and?" in said(teacher, two.token_ids)
    assert two.spans[0].student.start == len(first) + 2
    (alone,) = pair(teacher).turns(tokens[: len(first) + 1], mask[: len(first) + 1], talk[:1] + talk[1:2])
    assert alone == one


def test_a_character_tokenizer_against_a_byte_level_one():
    letters = build_character_tokenizer(max_length=64, phrases=["the cat"])
    found, tokens = turn(OTHERS["byte-level"], "the cat sat", letters)
    assert b"".join(said(letters, tokens[span.student]) for span in found.spans[:-1]) == b"the cat sat"


@pytest.mark.parametrize(
    ("conversation", "text"),
    [
        ([], "0 messages of the assistant"),
        ([Message(role="user", content="q", tool_calls=[ToolCall(name="f", arguments="{}")]), TALK[1]], "tool calls"),
    ],
)
def test_what_cannot_be_rendered_is_refused_by_name(teacher, conversation, text):
    with pytest.raises(DataError, match=text):
        turn(teacher, "the cat", conversation=conversation)


def test_a_teacher_that_rewrites_text_is_refused():
    backend = Tokenizer.from_str(OTHERS["byte-level"].backend_tokenizer.to_str())
    backend.normalizer = normalizers.Lowercase()
    with pytest.raises(DataError, match="does not keep the text 'The Cat'"):
        turn(wrapped(backend), "The Cat")


def test_a_tokenizer_of_an_unknown_kind_is_refused():
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match=r"tokenizer small.*WordPiece"):
        token_bytes(wrapped(backend), "small")


def test_the_byte_table_is_that_of_the_tokenizers_library():
    assert sorted(byte_table()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_table().values()) == list(range(256))
    backend = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in ("a b\n", "ü", "🙂"):
        ((written, _),) = backend.pre_tokenize_str(text)
        assert bytes(byte_table()[c] for c in written) == text.encode()


def cut(data, places):
    edges = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@given(st.binary(max_size=30), st.lists(st.integers(0, 99), max_size=9), st.lists(st.integers(0, 99), max_size=9))
def test_spans_cover_both_in_order_and_none_can_be_split(data, one, other):
    student, teacher = cut(data, one), cut(data, other)
    spans = common_spans(student, teacher)
    places = [0, 0]
    for span in spans:
        assert [span.student.start, span.teacher.start] == places
        places = [span.student.stop, span.teacher.stop]
        a, b = student[span.student], teacher[span.teacher]
        assert b"".join(a) == b"".join(b) != b""
        inner = [{sum(map(len, side[:n])) for n in range(1, len(side))} - {0, sum(map(len, side))} for side in (a, b)]
        assert not inner[0] & inner[1]
    assert b"".join(student[: places[0]]) == data == b"".join(teacher[: places[1]])


@pytest.mark.slow
@given(st.text(max_size=8), st.binary(max_size=3))
def test_text_is_cut_where_it_stops_being_text(text, rest):
    found = valid_text(text.encode() + rest)
    assert found.startswith(text)
    assert (text.encode() + rest).startswith(found.encode())


def test_runs():
    assert runs_of(np.array([0, 1, 1, 0, 1], bool)) == [slice(1, 3), slice(4, 5)]
    assert runs_of(np.zeros(3, bool)) == []


def test_the_parameters_of_the_template_are_those_of_the_group():
    other = byte_level(420, template="{% for m in messages %}{{ m['content'] }}{% endfor %}{{ '!' if shouts }}>>")
    ids = STUDENT.encode("the cat", add_special_tokens=False)
    tokens = np.array([1, *ids], np.int32)
    given = {"shouts": True, "enable_thinking": False}  # the teacher's template need not read what the policy's does
    (found,) = pair(other).turns(tokens, np.arange(len(tokens)) >= 1, TALK, given)
    assert said(other, found.token_ids).startswith(b"write!>>the cat")
