"""The application of the reference server: its engine behind the routes that all engines share.

Guarantees that weights are read from one configured folder alone.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import torch
from starlette.applications import Starlette

from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.inference.engines.reference.placement import forms_of, narrow_names
from lachesis.pipeline.inference.engines.reference.shared_copy import SharedCopy
from lachesis.pipeline.inference.serving.app import ServedTokens, serving_app
from lachesis.pipeline.model.end_tokens import end_tokens
from lachesis.pipeline.model.policy import PolicyModel
from lachesis.pipeline.model.shared_memory import POINTER_FILE
from lachesis.pipeline.model.tensors import policy_tensors, vocabulary_of
from lachesis.pipeline.model.weight_files import path_inside, read_weights
from lachesis.schemas.ids import PolicyVersion

__all__ = ["build_app"]


def build_app(
    policy: PolicyModel,
    engine: Engine,
    *,
    model_name: str,
    weights_folder: str | Path,
    token: str | None = None,
    key: str | None = None,
    hosts: Container[str] | None = None,
    aliases: Sequence[str] = (),
    forms: Mapping[str, torch.Tensor] | None = None,
) -> Starlette:
    """Return the application over a running engine that owns `policy.model`.

    `weights_folder`: the only folder that weight updates may name files in. `forms`: names, shapes and dtypes that they
    must have; None: the model's own. The others: see `serving_app`.
    """
    folder = Path(weights_folder).resolve()

    shared = SharedCopy(policy.model.config, forms or forms_of(policy.model))
    narrow = narrow_names(policy.model)

    def read(path: str, version: str) -> dict[str, torch.Tensor]:
        found, wanted = path_inside(folder, path), PolicyVersion.parse(version)
        if found.name == POINTER_FILE:
            return shared.read(found, wanted)
        return read_weights(found, wanted, forms or policy_tensors(policy.model), narrow)

    return serving_app(
        ServedTokens(
            policy.tokenizer,
            policy.tokenizer_hash,
            vocabulary_of(policy.model) or len(policy.tokenizer),
            end_tokens(policy.model, policy.tokenizer),
        ),
        engine,
        model_name=model_name,
        read_weights=read,
        token=token,
        key=key,
        hosts=hosts,
        aliases=aliases,
    )
