"""ScoredData becomes a rollout group that says what was sent, or is refused with the reason."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from turn_groups import group, ref

from lachesis.pipeline.common.trainability import TrainerLimits
from lachesis.pipeline.extensions.atropos.gateway.logic.scored import to_scored
from lachesis.pipeline.extensions.atropos.logic.scored_data import ScoredData, read_scored_data
from lachesis.pipeline.extensions.atropos.logic.scored_groups import GroupOrigin, to_group
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.columns import view
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.rollout import RolloutGroup
from lachesis.schemas.sequences import TEACHER_COLUMN

ORIGIN = GroupOrigin(
    id="0" * 32, run="r", env="words", producer="gateway-words-1", epoch=5, counter=6, policy_version="3-a-b",
    tokenizer_hash="tok", started_ns=7, name="words_0", longest=64, most=8,
)  # fmt: skip


def converted(data):
    return to_group(read_scored_data(json.dumps(data).encode()), ORIGIN)


def test_it_says_what_was_sent(make_scored):
    data = make_scored(
        2,
        advantages=[[0.0, 0.0, 1.0, 1.0, 1.0, 1.0], [0.0, 0.0, -1.0, -1.0, -1.0, -1.0]],
        ref_logprobs=[[0.0] * 2 + [-0.25] * 4] * 2,
        overrides=[{"note": "cut off"}, {}],
        group_overrides={"group": 1},
    )
    group = decode(RolloutGroup, encode(converted(data)))
    for sent, mask, logprobs, sequence in zip(
        data["tokens"], data["masks"], data["inference_logprobs"], group.sequences, strict=True
    ):
        assert sequence.tokens.tolist() == sent
        assert sequence.loss_mask.tolist() == [label != -100 for label in mask]
        assert sequence.logprobs.tolist() == [0.0 if value == 1.0 else value for value in logprobs]
    assert [s.token_advantages.tolist() for s in group.sequences] == data["advantages"]
    assert group.sequences.rewards == {"environment": [0.0, 1.0]}
    assert view(group.sequences.columns["ref_logprobs"].data, "float32", 12, "x")[2] == np.float32(-0.25)
    assert [[m.content for m in talk] for talk in group.messages] == [["q", "a"]] * 2
    assert (group.policy_versions, group.tokenizer_hash, group.started_ns) == (["3-a-b"], "tok", 7)
    assert group.metadata["overrides"] == [{"note": "cut off"}, {}]
    assert group.sequences.excluded_samples == []
    assert group.metadata["group_overrides"] == {"group": 1}
    assert "policy_versions" in group.metadata["gateway"]["assumed"]
    assert group.generation == {"temperature": 1.0}


def test_a_sample_that_is_too_long_is_left_out_with_all_that_is_its_own(make_scored):
    data = make_scored(
        4,
        advantages=[[float(n)] * 6 for n in range(4)],
        overrides=[{"n": n} for n in range(4)],
    )
    for name in ("tokens", "masks", "inference_logprobs", "advantages"):
        data[name][1] = [7 if name in {"tokens", "masks"} else -1.0] * 65
    found = converted(data)
    assert found.sequences.n_samples == 3
    assert [sequence.tokens.tolist() for sequence in found.sequences] == [data["tokens"][n] for n in (0, 2, 3)]
    assert [set(sequence.token_advantages) for sequence in found.sequences] == [{0.0}, {2.0}, {3.0}]
    assert found.sequences.rewards["environment"] == [data["scores"][n] for n in (0, 2, 3)]
    assert found.metadata["overrides"] == [{"n": n} for n in (0, 2, 3)]
    (failed,) = found.metadata["failed_samples"]
    assert (failed["sample"], failed["error"].partition(",")[0]) == (1, "65 tokens")
    assert "environments.words.longest_tokens" in failed["error"]


def test_a_group_that_is_too_long_but_for_one_sample_is_refused(make_scored):
    data = make_scored(2)
    for name in ("tokens", "masks", "inference_logprobs"):
        data[name][1] = [7 if name != "inference_logprobs" else -1.0] * 65
    with pytest.raises(SchemaError, match=r"tokens\[1\]: 65 tokens, where 1 to 64 are allowed"):
        converted(data)


@pytest.mark.parametrize(
    ("overrides", "of_group", "excluded"),
    [
        ([{"set_advantage_to_zero": True}, {}], None, [0]),
        ([{"set_advantage_to_zero": False}, {"set_advantage_to_zero": 1}], {}, [1]),
        ([{}, {}], {"set_advantage_to_zero": True}, [0, 1]),
        (None, {"set_advantage_to_zero": False}, []),
    ],
)
def test_an_advantage_set_to_zero_excludes_the_sample_from_training_alone(make_scored, overrides, of_group, excluded):
    plain = converted(make_scored(2))
    group = decode(RolloutGroup, encode(converted(make_scored(2, overrides=overrides, group_overrides=of_group))))
    assert group.sequences.excluded_samples == excluded
    assert replace(group.sequences, excluded_samples=[]) == plain.sequences, "it is rated and counted as any other"
    assert group.v == (3 if excluded else 1)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        (
            {"overrides": [{}, {"temperature": 0.5}]},
            r"overrides\[1\].temperature: 0.5.*training.learner.temperature, 0.7",
        ),
        ({"group_overrides": {"temperature": 1}}, "group_overrides.temperature: 1,"),
        ({"group_overrides": {"temperature": {"a": []}}}, "group_overrides.temperature: "),
        ({"overrides": [{"temperature": 0.7}, {"temperature": None}], "group_overrides": {"temperature": 0.7}}, None),
        ({"generation_params": {"temperature": 0.5}}, "sampled at temperature 0.5.*is 0.7"),
        ({"generation_params": {"temperature": 0.7, "top_p": 0.9}}, "sampled with top_p 0.9"),
        ({"generation_params": {"temperature": 0.7, "top_k": 20}}, "sampled with top_k 20"),
        ({"generation_params": {"repetition_penalty": 1.1}}, "sampled with repetition_penalty 1.1"),
        ({"generation_params": {"logit_bias": {"5": -100}}}, "sampled with logit_bias"),
        ({"generation_params": {"temperature": 0.7, "top_p": 1, "top_k": -1, "min_p": 0.0, "logit_bias": {}}}, None),
    ],
)
def test_a_temperature_that_the_trainer_would_ignore_is_refused_by_name(make_scored, changes, refused):
    changes = {"generation_params": {"temperature": 0.7}} | changes
    data = read_scored_data(json.dumps(make_scored(2, **changes)).encode())
    to_group(data, ORIGIN)  # whose trainer is not known
    of_trainer = replace(ORIGIN, limits=ORIGIN.limits._replace(temperature=0.7))
    if refused is None:
        to_group(data, of_trainer)
    else:
        with pytest.raises(SchemaError, match=refused):
            to_group(data, of_trainer)


def test_groups_of_one_prompt_are_of_one_item(make_scored):
    first, second, other = make_scored(seed=1), make_scored(seed=1, length=9), make_scored(seed=2)
    assert converted(first).item == converted(second).item != converted(other).item


def test_text_is_taken_for_numbers_as_there(make_scored):
    data = make_scored(1, scores=["1"])
    data["tokens"][0] = [str(token) for token in data["tokens"][0]]
    assert converted(data).sequences.rewards == {"environment": [1.0]}


def test_a_first_token_is_never_trained_on(make_scored):
    data = make_scored(1, prompt=0)
    (sequence,) = converted(data).sequences
    assert sequence.loss_mask.tolist() == [False] + [True] * 5
    assert sequence.logprobs[0] == 0


def test_the_teachers_ragged_arrays_come_out_with_what_is_missing_marked(make_scored):
    ids, logprobs = [[[], [5], [5, 6], [7], [8], [9]]], [[[], [-1.0], [-1.0, -2.0], [-3.0], [-4.0], [-5.0]]]
    columns = converted(make_scored(1, distill_token_ids=ids, distill_logprobs=logprobs)).sequences.columns
    assert view(columns["distill_token_ids"].data, "int32", 6, "x", 2).tolist()[:4] == [
        [-1, -1], [5, -1], [5, 6], [7, -1],
    ]  # fmt: skip
    assert view(columns["distill_logprobs"].data, "float32", 6, "x", 2)[2].tolist() == [-1.0, -2.0]


def test_a_teachers_logprobs_are_those_of_the_tokens_themselves(make_scored):
    """The trainer of the run reads one for each token; where the token is no alternative, there is none."""
    sent = make_scored(1)
    (tokens,) = sent["tokens"]
    ids = [[[], *([other, token] for other, token in zip([9, 8, 7, 6], tokens[1:5], strict=True)), [tokens[5] + 1]]]
    logprobs = [[[], *([-9.0, -0.5 * t] for t in range(1, 5)), [-3.0]]]
    data = read_scored_data(json.dumps({**sent, "distill_token_ids": ids, "distill_logprobs": logprobs}).encode())
    group = decode(RolloutGroup, encode(to_group(data, replace(ORIGIN, limits=TrainerLimits()))))
    assert list(group.sequences.columns) == [TEACHER_COLUMN]
    values = view(group.sequences.columns[TEACHER_COLUMN].data, "float32", 6, "x")
    np.testing.assert_array_equal(values, np.float32([np.nan, -0.5, -1.0, -1.5, -2.0, np.nan]))
    assert list(to_group(data, ORIGIN).sequences.columns) == [TEACHER_COLUMN, "distill_token_ids", "distill_logprobs"]


def test_reference_logprobs_are_named_as_ignored_where_the_trainer_has_its_own(make_scored):
    data = read_scored_data(json.dumps(make_scored(1, ref_logprobs=[[0.0] * 2 + [-0.25] * 4])).encode())
    group = to_group(data, replace(ORIGIN, limits=TrainerLimits()))
    assert group.sequences.columns == {}
    assert group.metadata["gateway"]["ignored"] == ["ref_logprobs"]
    assert "ignored" not in to_group(data, ORIGIN).metadata["gateway"]


def test_messages_with_parts_and_tool_calls(make_scored):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    talk = [{"role": "user", "content": [{"type": "text", "text": "q"}]}, {"role": "assistant", "content": None,
            "tool_calls": [call], "reward": 1.0}]  # fmt: skip
    (said,) = converted(make_scored(1, messages=[talk])).messages
    assert json.loads(said[0].content) == talk[0]["content"]
    assert said[1].content == ""
    assert (said[1].tool_calls[0].name, said[1].tool_calls[0].arguments) == ("f", '{"a": 1}')


WRONG = {
    "no logprobs": ({"inference_logprobs": None}, "inference_logprobs: missing"),
    "a score is not a number": ({"scores": [float("nan"), 0, 0, 0]}, "NaN"),
    "a score is infinite": ({"scores": [float("inf"), 0, 0, 0]}, "NaN and Infinity"),
    "a score is missing": ({"scores": [None, 0, 0, 0]}, "scores"),
    "too few scores": ({"scores": [1.0]}, "scores: 1 entries for 4 sequences"),
    "too few masks": ({"masks": [[-100] * 6]}, "masks: 1 entries"),
    "a mask is short": ({"masks": [[-100] * 6] * 3 + [[-100] * 5]}, r"masks\[3\]: 5 entries for 6 tokens"),
    "a mask is neither": ({"masks": [[-100, -100, 1, 1, 1, 1]] * 4}, r"masks\[0\]\[2\]: 1, where only -100"),
    "logprobs are short": ({"inference_logprobs": [[-1.0] * 5] * 4}, r"inference_logprobs\[0\]: 5 values for 6 tokens"),
    "a trained token has a prompt's logprob": ({"inference_logprobs": [[1.0] * 6] * 4}, "logprobs: positive"),
    "a logprob beyond float32": ({"inference_logprobs": [[-1e300] * 6] * 4}, "too large for a 32-bit float"),
    "advantages are short": ({"advantages": [[1.0]] * 4}, r"advantages\[0\]: 1 values"),
    "a message without content": ({"messages": [[{"role": "user"}]] * 4}, "'role' and 'content'"),
    "a conversation is missing": ({"messages": [[]]}, "messages: 1 entries"),
    "one half of the teacher": ({"distill_token_ids": [[[]] * 6] * 4}, "one came without the other"),
    "a teacher's logprob above 0": (
        {"distill_token_ids": [[[1]] * 6] * 4, "distill_logprobs": [[[0.5]] * 6] * 4}, "distill_logprobs: 0.5 is above"
    ),
    "no sequence": ({"tokens": [], "masks": [], "scores": []}, "the group is empty"),
    "an empty sequence": ({"tokens": [[]] * 4, "masks": [[]] * 4}, "0 tokens, where 1 to 64"),
    "a token beyond 32 bits": ({"tokens": [[1 << 31] * 6] * 4}, "tokens"),
    "a negative token": ({"tokens": [[-1] * 6] * 4}, "tokens"),
    "deep metadata": ({"group_overrides": {"a": json.loads("[" * 60 + "]" * 60)}}, "nested deeper"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_refused_and_said(make_scored, case):
    changes, text = WRONG[case]
    with pytest.raises(SchemaError, match=text):
        converted(make_scored(**changes))


def test_what_is_not_to_be_trained_on_may_come_without_logprobs(make_scored):
    sent = make_scored(2)
    origin = replace(ORIGIN, needs_logprobs=False)
    group, known = (
        to_group(read_scored_data(json.dumps(data).encode()), origin)
        for data in ({**sent, "inference_logprobs": None}, sent)
    )
    assert group == known.replace(v=2, sequences=replace(known.sequences, logprobs=None))


def test_more_sequences_than_a_batch_and_longer_ones_than_allowed_are_refused(make_scored):
    with pytest.raises(SchemaError, match="16 sequences, but a batch has 8"):
        converted(make_scored(16))
    with pytest.raises(SchemaError, match="65 tokens, where 1 to 64"):
        converted(make_scored(2, length=65))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(ScoredData.__struct_fields__), json_values), st.booleans())
def test_whatever_is_sent_is_converted_or_refused(changes, whole):
    data = {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1], "inference_logprobs": [[1.0, -1.0]]} | changes
    raw = json.dumps(data if whole else changes).encode()
    try:
        group = to_group(read_scored_data(raw), ORIGIN)
    except SchemaError:
        return
    assert decode(RolloutGroup, encode(group)) == group


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"messages": [[{"role": "user", "content": [{"seed": 1 << 70}]}]] * 4}, r"messages: \[3\]"),
        ({"generation_params": {"seed": 1 << 70}}, "generation_params: seed is an integer of 71 bits; 64 is the most"),
        ({"group_overrides": {"n": [-(1 << 70)]}}, r"group_overrides: n\[0\]"),
        ({"images": [[1 << 70]]}, r"images: \[0\]\[0\]"),
        ({"tokens": [[1 << 70]] * 4}, r"tokens\[0\]\[0\]"),
        ({"env_id": 1 << 70}, "env_id"),
    ],
)  # fmt: skip
def test_an_integer_beyond_64_bits_is_refused_with_its_place(make_scored, changes, text):
    with pytest.raises(SchemaError, match=text):
        read_scored_data(json.dumps(make_scored(**changes)).encode())


def test_many_digits_behind_the_point_are_a_number(make_scored):
    row = b"[1.0, 1.0, -0.00012345678901234567890, -1, -2, -3]"
    raw = json.dumps(make_scored(inference_logprobs=None)).encode()[:-1].replace(b'"inference_logprobs": null, ', b"")
    found = read_scored_data(raw + b', "inference_logprobs": [' + b",".join([row] * 4) + b"]}")
    assert found.inference_logprobs[0][2] == -0.00012345678901234568


TRAINER = replace(ORIGIN, limits=TrainerLimits("tok", 200))
UNUSABLE = {
    "an image": ({"images": ["aGk="]}, "images: not taken by the gateway"),
    "a token id": ({"tokens": [[1, 2, 3, 4, 5, 200]] * 4, "masks": [[-100, 2, 3, 4, 5, 200]] * 4,
                    "inference_logprobs": [[1.0] + [-1.0] * 5] * 4}, "token id 200 in sequence 0 is none of the 200"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNUSABLE)
def test_what_the_trainer_cannot_use_is_refused_by_name(make_scored, case):
    changes, text = UNUSABLE[case]
    data = read_scored_data(json.dumps(make_scored(**changes)).encode())
    with pytest.raises(SchemaError, match=text):
        to_group(data, TRAINER)
    observed = replace(ORIGIN, limits=TrainerLimits("tok", None, reads=None))
    assert to_group(data, observed).sequences.n_tokens == 24


def test_rewards_of_turns_are_taken_if_they_are_those_of_the_turns(make_scored):
    assert converted(make_scored(turn_rewards=[[1.0]] * 4)).sequences.turn_rewards == [[1.0]] * 4
    with pytest.raises(SchemaError, match="turn_rewards: 2 for sample 0, where the loss mask lets in 1 runs"):
        converted(make_scored(turn_rewards=[[1.0, 0.0]] * 4))


def test_advantages_of_turns_reach_a_trainer_of_the_api_by_token():
    rows = to_scored(ref(), group(), None)["advantages"]
    assert rows == [[0.0, 20.0, 20.0], [0.0, 10.0, 0.0, 40.0, 40.0], [0.0, -1.0]]
