"""Names of a run's files that are needed before anything of a configuration is imported."""

from typing import Final

__all__ = ["EFFECTIVE_FILE", "RUN_FILE"]

RUN_FILE: Final = "run.toml"
EFFECTIVE_FILE: Final = "run.effective.toml"
