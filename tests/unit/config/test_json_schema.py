import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.json_schema import json_schema
from lachesis.pipeline.config.load import load
from lachesis.pipeline.config.run import RunConfig

ROOT = Path(__file__).parents[3]
EXAMPLES = (
    "deploy/compose/run.toml",
    "deploy/examples/gsm8k_1gpu.toml",
    "deploy/examples/gsm8k_8gpu.toml",
    "services/demo/demo.toml",
    "services/demo/smollm2.toml",
)


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(json_schema(run_config_type())))
    Draft202012Validator.check_schema(made)
    return made


def problems(schema: dict[str, Any], text: str) -> list[str]:
    return [error.json_path for error in Draft202012Validator(schema).iter_errors(tomllib.loads(text))]


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_configurations_of_the_repository_fit(schema: dict[str, Any], example: str) -> None:
    assert problems(schema, (ROOT / example).read_text()) == []


ACCEPTED = """
[streams]
rollouts_bytes = "1GiB"
[server]
max_file_bytes = "2GB"
[reward_config]
length_bounty = 0.01
"""


def test_what_the_loader_accepts_besides_the_types_fits(schema: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(ACCEPTED)
    load(run_config_type(), file=file)
    assert problems(schema, ACCEPTED) == []


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("batchsize = 1", "$"),
        ("[batching]\nbatch_size = 0", "$.batching.batch_size"),
        ("[streams]\nreplicas = 'three'", "$.streams.replicas"),
        ("mode = 'trian'", "$.mode"),
        ("[environments.sums]\nsamples = 4", "$.environments.sums"),  # without its kind
    ],
)
def test_a_mistake_is_found_where_it_stands(schema: dict[str, Any], text: str, path: str) -> None:
    assert problems(schema, text) == [path]


def test_every_setting_has_help_and_defaults_are_those_of_the_loader(schema: dict[str, Any]) -> None:
    without = [
        f"{name}.{field}"
        for name, definition in schema["$defs"].items()
        for field, found in definition.get("properties", {}).items()
        if not found.get("description")
    ]
    assert without == []
    assert schema["$defs"]["BatchingConfig"]["properties"]["batch_size"]["default"] == RunConfig().batching.batch_size
