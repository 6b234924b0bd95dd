import base64
import json
import zlib
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from lachesis.schemas.annotations import Commit, GroupReward, RewardEvent, Stamp
from lachesis.schemas.asyncapi import asyncapi, documents, json_schema
from lachesis.schemas.codec import Event, decode, encode
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.ledger import Batch, GroupRef, LedgerEntry, Outcome, ProducerMark
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.rollout import Message, RolloutGroup, Sequences, VersionSpan

CHECKED_IN = Path(__file__).parents[3] / "deploy" / "schema"
GROUP = new_group_id()


def rollout() -> RolloutGroup:
    sequences = Sequences(
        offsets=as_bytes([0, 3], "int32"),
        tokens=as_bytes([5, 6, 7], "int32"),
        loss_mask=pack_mask([False, True, True]),
        logprobs=as_bytes(np.array([0, -0.5, -1]), "float32"),
        finish_reasons=["stop"],
        version_spans=[VersionSpan(0, 0, 0)],
    )
    return RolloutGroup(
        id=GROUP, run="r", env="words", item="7", producer="p", epoch=1, counter=0, policy_versions=["0-a-b"],
        sequences=sequences, tokenizer_hash="t", started_ns=1, messages=[[Message(role="user", content="hi")]],
    )  # fmt: skip


def reward() -> RewardEvent:
    group = GroupReward(
        group=GROUP, seq=1, item="7", policy_step=0, verdict="trainable", scores=[1.0, None], rewards=[0.5, None],
        advantages=[0.5, None], snapshot="s", mean=0.5, std=None, range=None, n_valid=1,
        stamps=[Stamp("scorer", 1, 2, 3)],
    )  # fmt: skip
    commit = Commit(term="t", index=0, cursors={"EVENTS": 4}, delta=b"\x80", crc32=zlib.crc32(b"\x80"))
    return RewardEvent(run="r", env="words", revision="live", advantage="grpo", commit=commit, groups=[group])


def entry() -> LedgerEntry:
    ref = GroupRef(group=GROUP, seq=1, env="words", sequences=2, tokens=9, policy_step=0, advantages=[1.0, None])
    return LedgerEntry(
        run="r", trainer="main", index=0, previous="0" * 64, watermark=0, resolved=b"\x01", events_cursor=1,
        batch=Batch(number=0, groups=[ref], sequences=2, tokens=9), next_batch=1,
        outcomes=[Outcome(2, None, "dead", 0, "undecodable")], producers={"p@1": ProducerMark(1, [0, 1])},
    )  # fmt: skip


@pytest.mark.parametrize("event", [rollout(), reward(), entry()], ids=lambda event: type(event).__name__)
def test_events_are_valid_under_their_schema(event: Event) -> None:
    assert decode(type(event), encode(event)) == event  # a sample that is no event would prove nothing
    as_json = json.loads(msgspec.json.encode(event))
    validator = jsonschema.Draft202012Validator(json_schema(type(event)))
    validator.validate(as_json)
    for field in json_schema(type(event))["$defs"][type(event).__name__]["required"]:
        assert list(validator.iter_errors({k: v for k, v in as_json.items() if k != field})), field


def test_the_schema_of_a_column_says_what_its_bytes_hold() -> None:
    tokens = json_schema(RolloutGroup)["$defs"]["Sequences"]["properties"]["tokens"]
    assert (tokens["x-msgpack"], tokens["x-dtype"]) == ("bin", "int32")
    data = base64.b64decode(json.loads(msgspec.json.encode(rollout()))["sequences"]["tokens"])
    assert np.frombuffer(data, np.dtype(tokens["x-dtype"]).newbyteorder("<")).tolist() == [5, 6, 7]
    optional = json_schema(RolloutGroup)["$defs"]["Sequences"]["properties"]["token_advantages"]
    assert optional["anyOf"][0]["x-dtype"] == "float32"


def test_every_reference_leads_somewhere() -> None:
    document = asyncapi()
    references = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            references.extend(value for key, value in node.items() if key == "$ref")
            node = list(node.values())
        for inner in node if isinstance(node, list) else []:
            walk(inner)

    walk(document)
    assert len(references) > 50
    for reference in references:
        place: Any = document
        for step in reference.removeprefix("#/").split("/"):
            place = place[step]


@pytest.mark.slow
def test_every_schema_is_a_schema() -> None:
    for name, text in documents().items():
        if name.endswith(".schema.json"):
            jsonschema.Draft202012Validator.check_schema(json.loads(text))


def test_parameters_are_those_of_the_address() -> None:
    for channel in asyncapi()["channels"].values():
        in_braces = {part[1:-1] for part in channel["address"].split(".") if part.startswith("{")}
        assert channel["parameters"].keys() == in_braces


def test_descriptions_do_not_depend_on_the_python_version() -> None:
    """Before 3.13 a docstring keeps the indentation of its source."""
    assert "\\n    " not in documents()["asyncapi.json"]


def test_the_checked_in_files_are_those_of_this_tree() -> None:
    found = {path.name: path.read_text(encoding="utf-8") for path in CHECKED_IN.iterdir()}
    assert found == documents(), "run `lachesis schema --out deploy/schema`"
