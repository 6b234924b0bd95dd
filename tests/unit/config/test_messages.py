"""Every setting that a message names is one that exists: the messages are read from the source."""

import ast
import functools
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

import lachesis.schemas
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import _hints, _is_struct

ROOT = Path(lachesis.schemas.__file__).resolve().parents[1]
DOTTED = re.compile(r"(?<![\w/.$<`@*-])[a-z_]+(?:\.(?:[a-z_*]+|NAME|ROLE|<role>))+\b(?![\w(/:@-])")
ENDS = {
    "json", "toml", "conf", "py", "log", "nk", "jsonl", "parquet", "md", "txt", "pem", "jinja", "html", "safetensors",
}  # fmt: skip
"""What follows a dot in the name of a file."""
OTHERS = {
    # of a rollout or an event, of Python, of NATS; shown as examples of a notation
    "groups.item", "session.generate", "key.path", "items.skill", "queue.wait", "a.b", "e.g", "params.dataset",
    "params.items", "params.python", "self.server",
}  # fmt: skip
SETTING_OF_OTHERS = {
    "max_payload", "max_file", "max_storage", "max_streams", "max_consumers", "max_stream_bytes",  # nats-server's
    "verify_and_map",
    "save_pretrained", "safe_serialization", "difficulty_key", "answer_tag", "skill_key",  # of libraries; parameters
    "answer_form", "answer_words", "late_reward_s", "evaluation_port",
    "tie_word_embeddings",  # of a model's config.json
}  # fmt: skip


@functools.cache
def known() -> frozenset[str]:
    """Return every path of the configuration; a free name in it is `*`."""
    paths: set[str] = set()

    def walk(hint: Any, path: str) -> None:
        if path:
            paths.add(path)
        if _is_struct(hint):
            for name, inner in _hints(hint).items():
                walk(inner, f"{path}.{name}" if path else name)
        elif get_origin(hint) is dict:
            walk(get_args(hint)[1], f"{path}.*")
        elif get_origin(hint) is list:
            walk(get_args(hint)[0], path)

    walk(run_config_type(), "")
    return frozenset(paths)


def exists(name: str) -> bool:
    """Whether a name in a message is a setting; what a message fills in (`*`) and what it writes NAME for is any."""
    wanted = re.sub(r"NAME|ROLE|<role>", "*", name)
    parts = wanted.split(".")
    for path in known():
        there = path.split(".")
        if len(there) == len(parts) and all(
            theirs == "*" or fnmatchcase(theirs, ours) for theirs, ours in zip(there, parts, strict=True)
        ):
            return True
    free = {path.removesuffix(".*") for path in known() if path.endswith(".*")}
    return any(name.startswith(f"{path}.") for path in free if path not in {"environments", "evaluation", "inference"})


@functools.cache
def messages() -> list[tuple[str, str]]:
    """Return place and text of every string with a blank in it that is no docstring; `*` for what it fills in."""
    found = []
    for file in sorted(file for part in ("schemas", "pipeline", "services") for file in (ROOT / part).rglob("*.py")):
        tree = ast.parse(file.read_text())
        skip = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                skip |= {id(part) for part in node.values}
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skip:
                text = node.value
            else:
                continue
            if " " in text:
                found.append((f"{file.relative_to(ROOT)}:{node.lineno}", text))
    return found


def named_settings(text: str) -> Iterator[str]:
    """Yield what a message names as a setting: dotted names whose first part is a table, or whose last is a setting."""
    tables = {path for path in known() if "." not in path}
    leaves = {path.rpartition(".")[2] for path in known()} - {"*"}
    for match in DOTTED.finditer(text):
        name = match[0]
        first, last = name.split(".")[0], name.rpartition(".")[2]
        if name in OTHERS or last in ENDS:
            continue
        if first in tables or last in leaves or any(part in tables for part in name.split(".")[:-1]):
            yield name


@pytest.mark.slow
def test_every_setting_that_a_message_names_exists() -> None:
    found = [(place, name) for place, text in messages() for name in named_settings(text)]
    assert len({name for _, name in found}) > 60, "the search finds nothing any more"
    wrong = [f"{place}: {name}" for place, name in found if not exists(name)]
    assert wrong == []


@pytest.mark.slow
def test_settings_that_are_advised_to_be_raised_lowered_or_set_exist() -> None:
    advice = re.compile(r"\b(?:raise|lower|set|unset|correct)\s+(?:its |the |an? |account's )*([a-z]+_[a-z_]+)\b(?!\.)")
    leaves = {part for path in known() for part in path.split(".")}
    wrong = [
        f"{place}: {name}"
        for place, text in messages()
        for name in advice.findall(text)
        if name not in leaves | SETTING_OF_OTHERS
    ]
    assert wrong == []


def test_the_search_sees_what_it_should() -> None:
    assert list(named_settings("raise bus.streams.replicas or lower streams.*_bytes")) == [
        "bus.streams.replicas",
        "streams.*_bytes",
    ]
    assert not exists("bus.streams.replicas")
    assert not exists("streams.rollout_bytes")
    assert not exists("environments.NAME.sample")
    for name in ("streams.*_bytes", "environments.NAME.samples", "inference.<role>.port", "advantage.weights.*"):
        assert exists(name), name
