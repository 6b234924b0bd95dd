"""Runs untrusted programs: a root of their own, no network, no surviving processes.

README.md says why and how.
"""

from lachesis.pipeline.scorer.sandbox.sandbox import Sandbox, SandboxLimits

__all__ = ["Sandbox", "SandboxLimits"]
