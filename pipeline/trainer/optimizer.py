"""Chooses AdamW by the device: whether it has one fused kernel, and where its step counters are."""

from __future__ import annotations

import torch

__all__ = ["has_fused_adamw", "place_step_counters"]

_FUSED_ON = frozenset({"cpu", "cuda"})


def has_fused_adamw(device: str) -> bool:
    """Return whether AdamW is one kernel on a device of this type ("cpu", "cuda")."""
    return device in _FUSED_ON


def place_step_counters(optimizer: torch.optim.Optimizer) -> None:
    """Move AdamW's step counters beside the weights if it is fused, else to the CPU.

    Checkpoints and other ranks have them on the CPU.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if state:
                wanted = parameter.device if group["fused"] else torch.device("cpu")
                state["step"] = state["step"].to(wanted)
