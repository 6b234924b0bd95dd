"""A sandbox for programs that nobody trusts: an own root, no network, no survivors; see README.md for why it is ours."""

from lachesis.pipeline.scoring.sandbox.sandbox import Limits, Sandbox

__all__ = ["Limits", "Sandbox"]
