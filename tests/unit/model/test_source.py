"""Where a model is looked for, and what is said where it is not; the hub is a local HTTP server."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from lachesis.pipeline.model import source
from lachesis.pipeline.model.source import ModelSource, check_hub, find_model
from lachesis.schemas.errors import ConfigError


def make_model(folder: Path, *leave_out: str) -> Path:
    folder.mkdir(parents=True)
    contents = {
        "config.json": json.dumps({"model_type": "llama"}),
        "model.safetensors": "\x02\0\0\0\0\0\0\0{}",
        "tokenizer.json": "{}",
        "tokenizer_config.json": json.dumps({"chat_template": "{{ messages }}"}),
    }
    for name, text in contents.items():
        if name not in leave_out:
            (folder / name).write_text(text)
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(source, "check_hub", lambda *_: "absent")
    make_model(tmp_path / "models" / "smollm2-135m")
    make_model(tmp_path / "runs" / "first" / "checkpoints" / "step-10")
    return tmp_path


def test_a_folder_is_taken_without_asking_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(source, "check_hub")
    assert find_model("models/smollm2-135m") == ModelSource("models/smollm2-135m", local_files_only=True)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("models/smolm2-135m", "there is no folder 'models/smolm2-135m'"),
        ("./models/SmolLM2", "did you mean 'models/smollm2-135m'?"),
        ("modles/smollm2-135m", "did you mean 'models/smollm2-135m'?"),
        ("smollm2-135m", "did you mean 'models/smollm2-135m'?"),
        ("/srv/nowhere/smollm2-135m", "did you mean 'models/smollm2-135m'?"),
        ("runs/first/checkpoints", "it has no config.json; below it are runs/first/checkpoints/step-10"),
        ("./zzzz", "folders with a model: models/smollm2-135m, runs/first/checkpoints/step-10"),
        ("zzzz", "has no model of that name; folders with a model: models/smollm2-135m"),
    ],
)
def test_a_wrong_path_names_the_nearest_folder(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        find_model(name)


def test_where_there_is_no_model_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ConfigError, match=re.escape(f"no folder below {tmp_path / 'empty'} holds a model")):
        find_model("./model")


def test_a_home_that_is_not_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=re.escape(f"write it without ~: '{tmp_path}/models/smollm2-135m'")):
        find_model("~/models/smollm2-135m")


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (("config.json",), "it has no config.json"),
        (("model.safetensors",), "no *.safetensors"),
        (("tokenizer.json", "tokenizer_config.json"), "no tokenizer"),
    ],
)
def test_a_folder_that_lacks_something(tmp_path: Path, missing: tuple[str, ...], said: str) -> None:
    make_model(tmp_path / "half", *missing)
    with pytest.raises(ConfigError, match=re.escape(said)):
        find_model("half")


def test_a_base_model_has_no_chat_template_and_a_file_of_its_own_is_one(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "base")
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="without a chat template"):
        find_model("base")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    find_model("base")
    (folder / "model.safetensors").unlink()
    find_model("base", weights=False)


def test_a_configuration_that_is_no_json_is_named(tmp_path: Path) -> None:
    (make_model(tmp_path / "cut") / "config.json").write_text('{"model_type": "lla')
    with pytest.raises(ConfigError, match=r"'cut/config.json' cannot be read"):
        find_model("cut")


@pytest.mark.parametrize(
    ("answer", "said"),
    [("absent", "has no model of that name"), ("refused", "set HF_TOKEN"), ("unreachable", "cannot be reached")],
)
def test_what_the_hub_says_is_told_and_a_cached_model_needs_no_hub(
    monkeypatch: pytest.MonkeyPatch, answer: str, said: str
) -> None:
    monkeypatch.setattr(source, "check_hub", lambda *_: answer)
    with pytest.raises(ConfigError, match=said):
        find_model("org/model")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: "/cache/config.json")
    assert find_model("org/model") == ModelSource("org/model", local_files_only=True)


def test_offline_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.delattr(source, "check_hub")
    with pytest.raises(ConfigError, match=r"is not used \(HF_HUB_OFFLINE\)"):
        find_model("org/model")


@pytest.fixture
def hub() -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """A hub that answers with the status that the organisation's name says, and notes the requests."""
    asked: list[tuple[str, str | None]] = []

    class Answers(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append((self.path, self.headers.get("authorization")))
            self.send_response(int(self.path.split("/")[1]))
            self.send_header("location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


def test_the_hub_is_asked_once(hub: tuple[str, list[tuple[str, str | None]]]) -> None:
    url, asked = hub
    answers = {200: "there", 307: "there", 404: "absent", 401: "absent", 403: "refused", 503: "unclear"}
    assert {code: check_hub(url, f"{code}/model", "s3cret") for code in answers} == answers
    assert asked == [(f"/{code}/model/resolve/main/config.json", "Bearer s3cret") for code in answers]


def test_a_hub_that_is_not_there_is_told_at_once() -> None:
    assert check_hub("http://127.0.0.1:1", "a/b", None) == "unreachable"
