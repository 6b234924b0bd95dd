"""The recording endpoint: any agent that knows a base URL as an environment."""

from lachesis.pipeline.extension import EnvironmentKind, Extension

__all__ = ["EXTENSION"]

EXTENSION = Extension(
    name="endpoint",
    about="agents that request the model over HTTP, as OpenAI or Anthropic answer it",
    environments={
        "agent": EnvironmentKind(
            place="lachesis.pipeline.extensions.endpoint.environment:Agent",
            param_paths={
                "path": "file",
                "tasks": "code",
                "task_params": "params of tasks",
                "folder": "file",
                "token_file": "file",
                "function": "code",
                "python": "program",
            },
        ),
    },
)
