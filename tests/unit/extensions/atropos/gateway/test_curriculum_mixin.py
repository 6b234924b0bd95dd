"""The mixin for atroposlib's environments, against a gateway: it draws by its weights, and names what it sends."""

import ast
import socket
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from unit.extensions.atropos.gateway.test_curriculum import publish, weights_of

from lachesis import CurriculumMixin
from lachesis.pipeline.extensions.atropos.gateway import curriculum_mixin
from lachesis.schemas.item_names import is_item_name

pytestmark = pytest.mark.outside


class StockBase:
    """Stands for `BaseEnv`: keeps what would be sent."""

    def __init__(self, url: str, *, drops: bool = False) -> None:
        self.config = SimpleNamespace(rollout_server_url=url, ensure_scores_are_not_same=drops)
        self.sent: list[Any] = []

    async def handle_send_to_api(self, scored_data: Any, item: Any = None, do_send_to_api: bool = True) -> None:
        self.sent.append(scored_data)


class Words(CurriculumMixin, StockBase):
    env_id: int | None = None

    def __init__(self, url: str = "http://127.0.0.1:1", **options: Any) -> None:
        super().__init__(url, **options)
        self.curriculum_items = {name: {"word": name} for name in ("a", "b", "c")}


async def drawn(env: Words, n: int = 300) -> Counter[str]:
    return Counter([(await env.get_next_item())["word"] for _ in range(n)])


@pytest.mark.slow
async def test_items_are_drawn_by_the_newest_weights_and_evenly_before_there_are_any(world, tmp_path):
    file = tmp_path / "token"
    file.write_text("se/cret")
    async with world.gateway(world.config(needs_token=True, token_file=str(file)), auth=("u", "se/cret")) as http:
        env = Words(f"http://u:se%2Fcret@127.0.0.1:{http.base_url.port}")
        env.curriculum_poll_s = 0.0
        env.env_id = await world.registered(http)
        assert min((await drawn(env, 60)).values()) > 5
        await publish(world, {"a": 0.0, "b": 1.0, "gone": 5.0}, 3.0, "1-a")
        await weights_of(http, "1-a")
        found = await drawn(env)
        assert found["a"] == 0
        assert found["c"] > 1.5 * found["b"] > 0, "an item that is not listed has the weight of an unknown one"
        await publish(world, {"a": 1.0, "b": 0.0, "c": 0.0}, 0.0, "2-b")
        await weights_of(http, "2-b")
        assert set(await drawn(env, 20)) == {"a"}
        await publish(world, {"a": 0.0, "b": 0.0, "c": 0.0, "gone": 1.0}, 0.0, "3-c")
        await weights_of(http, "3-c")
        assert set(await drawn(env, 20)) == {"a"}, "weights by which none of its items can be drawn are left out"


async def test_an_unchanged_version_is_not_sent_again(world, monkeypatch):
    answers = []
    fetch = curriculum_mixin._fetch
    monkeypatch.setattr(curriculum_mixin, "_fetch", lambda *args: answers.append(fetch(*args)) or answers[-1])
    async with world.gateway() as http:
        env = Words(str(http.base_url).rstrip("/"))
        env.curriculum_poll_s = 0.0
        env.env_id = await world.registered(http)
        await drawn(env, 3)
        assert [answer is None for answer, _ in answers] == [False, True, True]
        env.curriculum_poll_s = 1000.0
        await drawn(env, 3)
        assert len(answers) == 3


async def test_a_gateway_that_is_away_or_refuses_leaves_the_weights_as_they_are(world, caplog):
    away = Words()
    away.env_id = 0
    assert set(await drawn(away)) == {"a", "b", "c"}
    assert "the last ones stay" in caplog.text
    async with world.gateway() as http:
        forgotten = Words(str(http.base_url).rstrip("/"))
        forgotten.env_id = 77
        assert set(await drawn(forgotten)) == {"a", "b", "c"}
        assert "answers 404" in caplog.text
    caplog.clear()
    assert set(await drawn(Words())) == {"a", "b", "c"}, "without a registration nobody is asked"
    assert not caplog.records
    await drawn(Words(drops=True), 1)
    assert "never hears of items that are solved" in caplog.text


async def test_every_group_that_is_sent_bears_its_items_name():
    env = Words()
    item = await env.get_next_item()
    one, two = {"tokens": []}, {"tokens": [], "group_overrides": {"group_size": 3}}
    await env.handle_send_to_api(one, item)
    await env.handle_send_to_api([two, None], item, do_send_to_api=False)
    await env.handle_send_to_api({"tokens": []}, {"word": "of the backlog, made elsewhere"})
    assert [group and group.get("group_overrides") for group in [env.sent[0], *env.sent[1], env.sent[2]]] == [
        {"curriculum_item": item["word"]}, {"group_size": 3, "curriculum_item": item["word"]}, None, None,
    ]  # fmt: skip


BAD_NAMES = [17, "", "a\n", "\ud800", "ö" * 65, "prompt-1"]


def test_a_name_is_one_where_it_is_for_the_gateway():
    for name in (*BAD_NAMES, "ö" * 64, "a b", "größe", "x" * 129):
        assert curriculum_mixin._is_name(name) == (isinstance(name, str) and is_item_name(name))


@pytest.mark.parametrize("items", [[], {}, {"a": 1, "b": 1}, *({name: {}} for name in BAD_NAMES)])
async def test_items_without_a_proper_name_of_their_own_are_refused(items):
    env = Words()
    env.curriculum_items = items
    with pytest.raises((TypeError, ValueError), match="curriculum_items"):
        await env.get_next_item()


def test_the_module_needs_nothing_but_python(tmp_path):
    source = Path(str(curriculum_mixin.__file__)).read_text()
    modules = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)])
    }
    assert modules <= sys.stdlib_module_names
    (tmp_path / "copied.py").write_text(source)
    subprocess.run(
        [sys.executable, "-I", "-c", "import sys; sys.path.append('.'); import copied"], cwd=tmp_path, check=True
    )


@pytest.mark.parametrize(
    "answer",
    [b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}", b"", b"HTTP/1.1 200 OK\r\n\r\n[]"],
)
async def test_a_broken_answer_leaves_the_weights_as_they_are(answer, caplog):
    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        env = Words(f"http://127.0.0.1:{listener.getsockname()[1]}")
        env.env_id = 0
        assert (await env.get_next_item())["word"] in {"a", "b", "c"}
        thread.join()
    assert "the last ones stay" in caplog.text


def test_it_is_imported_where_none_of_our_packages_is_installed():
    """An environment of Atropos has its own."""
    source = Path(curriculum_mixin.__file__).parents[5]
    assert (source / "lachesis").is_dir()
    done = subprocess.run(
        [sys.executable, "-S", "-c", "from lachesis import CurriculumMixin; print(CurriculumMixin.__name__)"],
        env={"PYTHONPATH": str(source)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("CurriculumMixin\n", "")
