"""Settings of MLflow."""

from typing import Annotated

import msgspec
from msgspec import Meta

from lachesis.pipeline.common.paths import Address

__all__ = ["MlflowConfig"]


class MlflowConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Logging to MLflow (the extra `mlflow`); credentials come from MLflow's own environment variables."""

    uri: Address | None = None
    """Tracking server or store. Default None: what MLFLOW_TRACKING_URI says."""
    experiment: Annotated[str, Meta(min_length=1)] = "lachesis"
    """Name of the experiment, which is made where there is none. Default lachesis."""
