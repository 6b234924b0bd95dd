"""All of `training.inputs` together: made for a model, called for each sequence and for each pass.

Guarantees that a sequence which an input cannot use is refused by the input's name, whatever its code raises.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from lachesis.pipeline.common.paths import code_name
from lachesis.pipeline.common.user_code import argument_problem, load_attribute, log_failure, refuse_ending
from lachesis.pipeline.model.logprobs import NOTHING_FURTHER, PassInputs
from lachesis.pipeline.model.policy import PolicyModel
from lachesis.pipeline.trainer.config import INPUTS_FOR_ONE_ROW, MODEL_INPUTS, ModelInputConfig
from lachesis.pipeline.trainer.inputs.images import Images
from lachesis.pipeline.trainer.inputs.model_input import ModelInput, SequenceParts
from lachesis.pipeline.trainer.inputs.routed_experts import RoutedExperts
from lachesis.pipeline.trainer.inputs.sampling_mask import SamplingMask
from lachesis.pipeline.trainer.packed_batch import PackedBatch
from lachesis.schemas.columns import view
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.schemas.rollout import Attachment, RolloutGroup

__all__ = ["ModelInputs", "load_inputs"]


class _Member(NamedTuple):
    name: str
    input: ModelInput
    columns: frozenset[str]
    attachments: bool


class ModelInputs:
    """All inputs of a model, in the order of the configuration; none by default."""

    def __init__(self, members: Sequence[_Member] = ()) -> None:
        self._members = list(members)

    def __bool__(self) -> bool:
        """Whether the model has any."""
        return bool(self._members)

    @property
    def needs_padding(self) -> str | None:
        """Name the input that takes padded rows alone; None: there is none."""
        return next((one.name for one in self._members if one.name not in INPUTS_FOR_ONE_ROW), None)

    def prepare_group(self, group: RolloutGroup) -> list[tuple[Any, ...]]:
        """Return the prepared inputs of each sequence of a group.

        Raises `DataError`, naming the input that cannot use it.
        """
        if not self._members:
            return [()] * len(group.sequences)
        wanted = frozenset[str]().union(*(one.columns for one in self._members))
        total, held = group.sequences.n_tokens, group.sequences.columns
        columns = {
            name: view(held[name].data, held[name].dtype, total, name, held[name].width)
            for name in wanted & held.keys()
        }
        if group.attachments:
            group = group.with_texts()  # they name the attachments of each sample
        cuts = group.sequences.cuts()
        samples = group.sequences.sample_index or range(len(group.sequences))
        prepared = []
        for i, (sequence, sample) in enumerate(zip(group.sequences, samples, strict=True)):
            own = {name: values[cuts[i] : cuts[i + 1]] for name, values in columns.items()}
            parts = SequenceParts(sequence.tokens, sequence.loss_mask, own, _attachments(group, sample))
            prepared.append(tuple(_prepared(one, parts, i) for one in self._members))
        return prepared

    def of(self, batch: PackedBatch) -> PassInputs:
        """Return the inputs of a pass over `batch`."""
        if not self._members or not batch.prepared:
            return NOTHING_FURTHER
        arguments: dict[str, Any] = {}
        allowed_BTW = None
        for one, of_pass in self._of_pass(batch):
            arguments |= one.input.arguments(*of_pass)
            found_BTW = one.input.allowed(*of_pass)
            if found_BTW is not None and allowed_BTW is not None:
                raise ConfigError(f"training.inputs: {one.name} is the second one that says which tokens are allowed")
            allowed_BTW = allowed_BTW if found_BTW is None else found_BTW
        return PassInputs(arguments, allowed_BTW)

    @contextmanager
    def during(self, batch: PackedBatch) -> Iterator[None]:
        """Let the inputs change the forward and backward pass over `batch`."""
        with ExitStack() as contexts:
            for one, of_pass in self._of_pass(batch):
                of_rows = of_pass
                if batch.in_one_row is not None and isinstance(one.input, RoutedExperts):
                    in_one = one.input.in_one_row(of_pass[0], batch.in_one_row.lengths)
                    of_rows = ([in_one], batch.in_one_row.tokens, of_pass[2])
                contexts.enter_context(one.input.during(*of_rows))
            yield

    def _of_pass(self, batch: PackedBatch) -> Iterator[tuple[_Member, tuple[list[Any], int, torch.device]]]:
        """Yield each input with what its methods take of a pass; nothing for a batch without sequences."""
        width, device = batch.tokens_BT.shape[1], batch.tokens_BT.device
        for place, one in enumerate(self._members if batch.prepared else ()):
            yield one, ([row[place] for row in batch.prepared], width, device)


def _attachments(group: RolloutGroup, sample: int) -> list[Attachment]:
    if not group.messages:
        return group.attachments
    return [group.attachments[i] for message in group.messages[sample] for i in message.attachments]


def load_inputs(configs: Sequence[ModelInputConfig], policy: PolicyModel, trained: Any) -> ModelInputs:
    """Return the inputs for the passes of `trained`: the model of `policy`, or its sharded form.

    Raises `ConfigError` when one cannot be loaded, or does not go with the model.
    """
    return ModelInputs([_member(config, policy, trained) for config in configs])


def _member(config: ModelInputConfig, policy: PolicyModel, trained: Any) -> _Member:
    made: ModelInput
    if config.input == RoutedExperts.NAME:
        made = RoutedExperts(trained)
    elif config.input == SamplingMask.NAME:
        made = SamplingMask(trained)
    elif config.input == Images.NAME:
        made = Images(trained, policy.image_processor)
    else:
        made = _own(config, trained)
    return _Member(code_name(config.input), made, config.reads_columns, config.reads_attachments)


def _own(config: ModelInputConfig, model: Any) -> ModelInput:
    place, _, name = config.input.rpartition(":")
    found = load_attribute(place, name, "model input")
    if not inspect.isclass(found) or not issubclass(found, ModelInput):
        raise ConfigError(f"training.inputs {config.input!r}: {name} is no subclass of lachesis.ModelInput")
    problem = argument_problem(found, config.params, positional=1)
    if problem is not None:
        raise ConfigError(f"training.inputs {config.input!r}, params: {problem}")
    return found(model, **config.params)


def _prepared(member: _Member, parts: SequenceParts, index: int) -> Any:
    columns: Mapping[str, NDArray[Any]] = {
        name: values for name, values in parts.columns.items() if name in member.columns
    }
    own = parts._replace(columns=columns, attachments=parts.attachments if member.attachments else ())
    try:
        with refuse_ending("its code"):
            return member.input.prepare(own)
    except DataError as error:
        raise DataError(f"{member.name}: sequence {index}: {error}") from error
    except Exception as error:
        if member.name in MODEL_INPUTS:
            raise
        log_failure(f"{member.name}, prepare of sequence {index}", error)
        raise DataError(f"{member.name}: sequence {index}: {type(error).__name__}: {error}") from error
