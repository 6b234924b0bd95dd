"""Hostile inputs from good ones, by seed: msgpack and JSON with wrong leaves, and bytes cut, flipped and spliced.

Everything is drawn from the `random.Random` given in, so that a seed names its inputs for ever.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

__all__ = ["mutate_bytes", "mutate_json", "mutate_msgpack", "mutate_text"]

INTEGERS = [
    0,
    1,
    -1,
    7,
    255,
    2**31 - 1,
    2**31,
    2**32,
    2**53 + 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**31),
    -(2**63),
]
FLOATS = [0.0, -0.0, 1e-320, 1e-45, 0.5, 1e12, 1e38, 1e39, 1e300, -1e308, float("nan"), float("inf"), -float("inf")]
TEXTS = [
    "", " ", ".", "*", ">", "-", "a.b", "..", "/", "../../etc/passwd", "\0", "\n", "\r\nNats-Msg-Id: x", "\x1b[2J", "é",
    "\u0663", "\U0001d7db", "\u202e", "\ud7ff", "NaN", "null", "0" * 40, "f" * 32, "9" * 5000, "a" * 70_000,
    "%s%n", "{}", "1-a-b",
    "9" * 18 + "-a-b", "data:", "http://[", "http://127.0.0.1:99999", "$(id)", "rl.rollout.*.>", "__class__",
]  # fmt: skip
BYTES = [b"", b"\0", b"\xff" * 4, b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\xff" * 31, b"\x80" * 4096, bytes(65_536)]
# length prefixes that promise what does not follow, extension types, deep nesting, a map as its own key
MSGPACK = [
    b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\x7f\xff\xff\xff", b"\xdb\xff\xff\xff\xfe", b"\xdc\xff\xff",
    b"\xc1", b"\xd6\xff\xff\xff\xff\xff", b"\xd8\x05" + bytes(16), b"\xc7\x0c\xff" + b"\xff" * 12, b"\x81\x90\x01",
    b"\x91" * 200 + b"\xc0", b"\x91" * 990 + b"\xc0", b"\x91" * 100_000 + b"\xc0", b"\x81\xa1a" * 900 + b"\xc0",
    b"\xa4\xff\xfe\xfd\xfc", b"\xa3\xed\xa0\x80", b"\xca\x7f\xc0\x00\x00", b"\xcb\x7f\xf0" + bytes(6),
    b"\x82\xa1a\x01\xa1a\x02", b"\x81\x01\x02", b"\xd5\x01ab",
]  # fmt: skip
JSON = [
    b"NaN", b"Infinity", b"1e999", b"-1e999", b"9" * 30, b"9" * 4000, b"9" * 5000, b"1e400000", b"0.1" + b"1" * 400,
    b"[" * 200 + b"]" * 200, b"[" * 100_000, b'{"a":' * 900 + b"1" + b"}" * 900, b'"\\ud800"', b'"\xff\xfe"',
    b'{"a":1,"a":2}', b"[]", b"{}", b"null", b"-0", b'"\\u0000"', b"tru",
]  # fmt: skip


def mutate_msgpack(rng: random.Random, good: bytes) -> bytes:
    """Return `good`, which is msgpack, with some nodes replaced, and in one of four cases its bytes damaged as well."""
    data = _mutate_tree(rng, good, msgspec.msgpack, MSGPACK)
    return mutate_bytes(rng, data) if rng.random() < 0.25 else data


def mutate_json(rng: random.Random, good: bytes) -> bytes:
    """As `mutate_msgpack`, of JSON."""
    data = _mutate_tree(rng, good, msgspec.json, JSON)
    return mutate_bytes(rng, data) if rng.random() < 0.25 else data


def mutate_text(rng: random.Random, good: bytes) -> bytes:
    """Return text with tokens exchanged, doubled and replaced, or its bytes damaged."""
    words = good.split(b" ")
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(words))
        words[place] = rng.choice(
            [rng.choice(TEXTS).encode(errors="replace"), str(rng.choice(INTEGERS)).encode(), rng.choice(words), b""]
        )
    data = b" ".join(words)
    return mutate_bytes(rng, data) if rng.random() < 0.4 else data


def mutate_bytes(rng: random.Random, good: bytes) -> bytes:
    """Return the bytes with one to four of: a flipped bit, a cut, a part repeated, removed or overwritten."""
    data = bytearray(good)
    for _ in range(rng.randint(1, 4)):
        kind = rng.randrange(7)
        at = rng.randrange(len(data) + 1)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:at] = data[at : at + rng.randint(1, 64)] * rng.choice([1, 2, 50])
        elif kind == 3:
            del data[at : at + rng.randint(1, 16)]
        elif kind == 4:
            data[at : at + rng.randint(0, 8)] = rng.randbytes(rng.randint(1, 8))
        elif kind == 5:
            data[at:at] = rng.choice(MSGPACK[:8] + JSON[:4])
        else:
            data[at : at + 8] = rng.choice([b"\xff" * 8, bytes(8), b"\x7f" + b"\xff" * 7])
    return bytes(data)


def _mutate_tree(rng: random.Random, good: bytes, codec: Any, fragments: list[bytes]) -> bytes:
    tree = codec.decode(good)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        tree = _replace(tree, rng.choice(_places(tree)), partial(_worse, rng, tree, fragments))
    try:
        encoded: bytes = codec.encode(tree)
    except (TypeError, ValueError, OverflowError, RecursionError):  # JSON has no bytes as keys, no lone surrogates
        return mutate_bytes(rng, good)
    return encoded


Path = tuple[Any, ...]


def _places(tree: Any, path: Path = ()) -> list[Path]:
    """Return the path of every node, of long lists only the first few."""
    found = [path]
    if isinstance(tree, dict):
        for key, value in tree.items():
            found += _places(value, (*path, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree[:8]):
            found += _places(value, (*path, index))
    return found


def _replace(tree: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    if not path:
        return change(tree)
    copy = tree.copy()
    copy[path[0]] = _replace(tree[path[0]], path[1:], change)
    return copy


def _worse(rng: random.Random, tree: Any, fragments: list[bytes], old: Any) -> Any:
    """Return something in place of `old`: near it as often as far from it."""
    if rng.random() < 0.5:
        near = _near(rng, old)
        if near is not None:
            return near
    strangers: list[Any] = [
        INTEGERS,
        FLOATS,
        TEXTS,
        BYTES,
        [None, True, [], {}, [None], {"v": 99}, [[]] * 100, {"": {}}],
    ]
    kind = rng.randrange(len(strangers) + 2)
    if kind < len(strangers):
        return rng.choice(strangers[kind])
    if kind == len(strangers):
        return msgspec.Raw(rng.choice(fragments))
    node = tree  # some other node of the same message: a wrong type that is right elsewhere
    for step in rng.choice(_places(tree)):
        node = node[step]
    return node


def _near(rng: random.Random, old: Any) -> Any:
    """Return a value of the same type that is a little wrong, None where there is none."""
    near: list[Any] = [None]
    if isinstance(old, bool):
        near = [not old]
    elif isinstance(old, int):
        near = [old + 1, old - 1, -old, old * 2, *INTEGERS]
    elif isinstance(old, float):
        near = [-old, old * 1e30, *FLOATS]
    elif isinstance(old, str):
        near = [old + "x", old[:-1], old * 3, old.upper(), old.replace("-", " "), *TEXTS]
    elif isinstance(old, bytes):
        near = [mutate_bytes(rng, old), old[:-1], old + b"\0", old * 2, old[::-1], b"\xff" * len(old), bytes(len(old))]
    elif isinstance(old, list):
        near = [old[:-1], old + old[-1:], old * 2, old[::-1], [*old, None], old[1:]]
    elif isinstance(old, dict) and old:
        key = rng.choice(list(old))
        without = {name: value for name, value in old.items() if name != key}
        near = [without, {**old, "unknown": [1]}, {**without, f"{key}_": old[key]}, {**old, key: None}]
    return rng.choice(near)
