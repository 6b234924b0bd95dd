"""Checks that a run of wandb can be stored somewhere."""

import netrc
import os
from collections.abc import Iterator

from lachesis.pipeline.common.doctor_finding import DoctorFinding, ok, warn
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.extensions.wandb.config import WandbConfig

__all__ = ["check_key"]


def check_key(config: RunConfig) -> Iterator[DoctorFinding]:
    """Yield whether there is a key, where the run is to be in wandb. The key is not shown."""
    if config.at("training.wandb", WandbConfig()).project is None:
        return
    if os.environ.get("WANDB_MODE") in {"offline", "disabled"}:
        yield ok("wandb", f"WANDB_MODE={os.environ['WANDB_MODE']}: no key needed")
    elif os.environ.get("WANDB_API_KEY") or _is_in_netrc():
        yield ok("wandb", "there is a key")
    else:
        yield warn("wandb", "no key in WANDB_API_KEY or ~/.netrc", "wandb login, or set WANDB_MODE=offline")


def _is_in_netrc() -> bool:
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False
