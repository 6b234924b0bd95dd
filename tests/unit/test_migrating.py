"""MIGRATING.md: every setting of ours that it names exists, every value that it gives is one, and it stays short."""

import re
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lachesis.pipeline.config.extended import run_config_type

PAGE = (Path(__file__).parents[2] / "MIGRATING.md").read_text(encoding="utf-8")
MAX_BYTES = 14_000
SHORT = {"env.": "environments.NAME.", "learner.": "training.learner."}
"""As the page says at its top."""
SECTIONS = ("Atropos", "verl", "TRL", "verifiers", "prime-rl")


def settings_named() -> list[str]:
    """Everything in code of the tables' second column, as a setting's whole place, with its value if it has one."""
    cells = re.findall(r"^\|[^|]*\|([^|]*)\|[^|]*\|$", PAGE, flags=re.MULTILINE)
    return [whole(code) for cell in cells for code in re.findall(r"`([^`]+)`", cell)]


def settings_mentioned() -> list[str]:
    """Everything else in code that is a dotted place of ours: it begins as a part of the configuration does."""
    parts = {*run_config_type().__struct_fields__, "env", "learner"} - {"run", "model"}
    elsewhere = re.sub(r"^\|[^|]*\|[^|]*\|", "", PAGE, flags=re.MULTILINE)
    codes = [code for code in re.findall(r"`([^`\n]+)`", elsewhere) if code.split(".")[0] in parts and "." in code]
    return [whole(code) for code in codes if code not in SHORT and "NAME." not in code[-5:] and code[-1] != "."]


def whole(code: str) -> str:
    for short, long in SHORT.items():
        if code.startswith(short):
            return long + code.removeprefix(short)
    return code


def struct_of(kind: Any) -> Any:
    """The struct in a type that may be optional, None where there is none."""
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    return next((one for one in options if isinstance(one, type) and issubclass(one, msgspec.Struct)), None)


def find(place: str) -> tuple[Any, str, Any]:
    """Return the struct that a setting is a field of, the field and its type."""
    owner: Any = run_config_type()
    parts = place.split(".")
    while True:
        name = parts.pop(0)
        fields = {field.encode_name: field.type for field in msgspec.structs.fields(owner)}
        assert name in fields, f"{place}: {owner.__name__} has no {name}"
        kind = fields[name]
        if typing.get_origin(kind) is dict and parts:
            assert parts.pop(0) in {"NAME", "ROLE", "policy"}, place
            kind = typing.get_args(kind)[1]
        if not parts:
            return owner, name, kind
        owner = struct_of(kind)
        assert owner is not None, f"{place}: {name} has no parts"


@pytest.mark.extension
@pytest.mark.parametrize("code", sorted({*settings_named(), *settings_mentioned()}))
def test_a_setting_that_the_page_names_exists(code: str) -> None:
    place, given, value = code.partition(" = ")
    owner, name, _ = find(place)
    if given:
        required = {"kind": "x"} if "kind" in owner.__struct_fields__ else {}
        made = msgspec.convert(required | {name: msgspec.toml.decode(f"value = {value}")["value"]}, owner)
        assert getattr(made, name) == msgspec.toml.decode(f"value = {value}")["value"]


def test_a_name_that_is_none_of_ours_would_be_found() -> None:
    with pytest.raises(AssertionError, match="BatchingConfig has no batchsize"):
        find("batching.batchsize")
    with pytest.raises(AssertionError, match="batch_size has no parts"):
        find("batching.batch_size.more")
    with pytest.raises(msgspec.ValidationError, match="did you mean 'grpo'"):
        test_a_setting_that_the_page_names_exists('advantage.estimator = "grpoo"')


def test_every_project_has_a_table_and_its_version_and_the_page_stays_short() -> None:
    for name in SECTIONS:
        assert re.search(rf"^## {name} \(.*\d+\.\d+.*\)$", PAGE, flags=re.MULTILINE), f"{name}: no version is stated"
    assert len(settings_named()) > 100
    assert len(PAGE.encode()) <= MAX_BYTES
