"""A sample of several sequences in its group: each has its columns, and tokens in common are trained once."""

from typing import Any

import numpy as np

from lachesis.pipeline.environment.config import CollectConfig
from lachesis.pipeline.environment.inference_requests import InferenceRequests, ModelTurn
from lachesis.pipeline.environment.rollout import GroupDraft, build_group
from lachesis.pipeline.environment.sequence_draft import SequenceDraft, trained_calls
from lachesis.pipeline.environment.session import Session
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.tasks.task import Task
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.columns import view
from lachesis.schemas.planning_header import Plan
from lachesis.schemas.rollout import RolloutGroup
from lachesis.testing import FakeInference


def turn(tokens: list[int], version: str, experts: int, finish_reason: str = "stop") -> ModelTurn:
    """A turn whose tokens were sampled from themselves and 7, with `experts` rows of experts from the first token."""
    rows = np.arange(2 * experts, dtype=np.int16).reshape(-1, 2)
    masks = [np.array([token, 7], np.int32) for token in tokens]
    return ModelTurn(tokens, [-0.5] * len(tokens), [(0, version)], "text", finish_reason, rows, masks)


def test_calls_are_trained_in_the_last_sequence_that_has_them() -> None:
    assert trained_calls([[0, 1], [2], [0, 3], [0, 3, 4]]) == [{1}, {2}, set(), {0, 3, 4}]


def draft() -> tuple[GroupDraft, list[SequenceDraft]]:
    sampling = SamplingParams()
    requests = InferenceRequests(FakeInference(lambda *_: "x"), CollectConfig())
    task = Task(item="x", prompt="?")
    first, second = (Session.of_group(task, sample, requests, sampling) for sample in range(2))
    other = SequenceDraft()
    for one, trained in ((other, False), (first, True)):  # both begin with the prompt 1, 2 and the answer 3
        one.put([1, 2])
        one.append(turn([3], "1-lin-aaaa", 2), trained=trained)
    other.put([4])
    other.append(turn([5, 6], "2-lin-bbbb", 5, "length"))
    first.put([8])
    first.append(turn([9], "1-lin-aaaa", 4))
    first.further = [other]
    second.put([1])
    second.append(turn([2], "2-lin-bbbb", 1))
    made = GroupDraft(id="0" * 32, task=task, sessions=[first, second], rewards=[{"r": 1.0}, {"r": 0.0}], failures=[],
                      sampling=sampling, started_ns=1)  # fmt: skip
    return made, [other, first, second]


def test_a_group_holds_all_sequences_of_its_samples() -> None:
    made, sequences = draft()
    named: dict[str, Any] = {"run": "r", "env": "e", "producer": "p", "tokenizer_hash": "0" * 64}
    group = decode(RolloutGroup, encode(build_group(made, epoch=1, counter=1, **named)))
    assert group.sequences.sample_index == [0, 0, 1]
    assert group.sequences.endings == ["stop", "stop"]  # by the conversation, not by the sequence that was cut off
    assert group.sequences.lengths == [4, 1]
    assert [one.tokens.tolist() for one in group.sequences] == [one.tokens for one in sequences]
    assert [one.loss_mask.tolist() for one in group.sequences] == [one.loss_mask for one in sequences]
    assert [tuple(span) for span in map(vars_of, group.sequences.version_spans)] == [
        (0, 0, 0), (0, 4, 1), (1, 0, 0), (2, 0, 1)
    ]  # fmt: skip
    total = group.sequences.n_tokens
    mask = view(group.sequences.columns["sampling_mask"].data, "int32", total, "mask", 2)
    trained = group.sequences.mask
    tokens = view(group.sequences.tokens, "int32", total, "tokens")
    assert (mask[trained, 0] == tokens[trained]).all()
    assert (mask[~trained] == -1).all()
    experts = view(group.sequences.columns["routed_experts"].data, "int16", total, "experts", 2)
    cuts = group.sequences.cuts()
    for i, known in enumerate((5, 4, 1)):
        rows = experts[cuts[i] : cuts[i + 1]]
        assert rows[:known].ravel().tolist() == list(range(2 * known))
        assert (rows[known:] == -1).all()
    plan = Plan.of(group)
    assert (plan.samples, plan.sequences, plan.policy_step) == (2, 3, 1)


def vars_of(span: Any) -> tuple[int, int, int]:
    return span.sequence, span.start, span.version
