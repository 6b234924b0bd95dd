"""`lachesis serve` as a process: OpenAI's routes over HTTP, the key, and Ctrl-C."""

import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from lachesis.pipeline.model.policy import build_tiny_policy, save_policy
from lachesis.schemas.errors import ConfigError
from lachesis.services.cli.serve import ServedModel, find_served_model

ASKED = [{"role": "user", "content": "say 1"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_policy(build_tiny_policy(0, width=16, layers=1), tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def served(folder: Path) -> "Iterator[tuple[subprocess.Popen[str], list[str]]]":
    """A served model that wants a key, and the two lines that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lachesis", "serve", "tiny", "--key-file", "a key"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder.parent,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        yield process, [process.stdout.readline().strip() for _ in range(2)]
        process.kill()


@pytest.mark.slow
def test_an_openai_client_is_answered_with_the_key_alone_until_ctrl_c(
    served: tuple[subprocess.Popen[str], list[str]], folder: Path
) -> None:
    process, (said, curl) = served
    url = said.partition(" at ")[2].partition(";")[0]
    assert said.startswith("serving tiny as tiny at http://127.0.0.1:")
    key = folder.parent / "a key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    with httpx.Client(base_url=url, timeout=60) as http:
        assert http.get("/models").status_code == 401
        refused = http.post("/chat/completions", json={"model": "tiny", "messages": ASKED})
        assert refused.status_code == 401
        http.headers["Authorization"] = f"Bearer {key.read_text().strip()}"
        assert [model["id"] for model in http.get("/models").json()["data"]] == ["tiny"]
        body = {"model": "tiny", "messages": ASKED, "max_tokens": 4, "n": 2}
        found = http.post("/chat/completions", json=body).json()
        assert len(found["choices"]) == 2
        assert 0 < found["usage"]["completion_tokens"] <= 8
        with http.stream("POST", "/chat/completions", json={**body, "n": 1, "stream": True}) as stream:
            assert list(stream.iter_lines())[-2:][0] == "data: [DONE]"
        paused = http.post(url.removesuffix("/v1") + "/pause")
        assert paused.status_code == 401, "nobody changes what it serves"
    words = shlex.split(curl)
    assert words[:2] == ["curl", f"{url}/chat/completions"]
    assert words[-2] == "-d"
    assert "Authorization: Bearer $(cat 'a key')" in words
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""


@pytest.mark.slow
def test_others_are_served_with_a_key_alone(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lachesis", "serve", str(folder), "--host", "0.0.0.0"],  # noqa: S104 - it is refused
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--host 0.0.0.0: others can reach this address, so requests must bear a key" in done.stderr


def test_a_run_is_found_by_name_or_folder_and_a_model_by_its_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = Path("runs/mine/checkpoints/step-00000002").absolute()
    checkpoint.mkdir(parents=True)
    (checkpoint.parent / "latest").write_text("step-00000002\n")
    assert find_served_model("mine", None) == ServedModel("mine", str(checkpoint))
    assert find_served_model("runs/mine", "newest") == ServedModel("mine", str(checkpoint.relative_to(Path.cwd())))
    assert find_served_model("tiny", None) == ServedModel("tiny", "tiny")
    for place, which, text in (
        ("mine", "best", "no best checkpoint"),
        ("nobody", None, "there is neither a run nor a folder 'nobody'"),
        ("tiny", "best", "tiny is no run, but a model"),
    ):
        with pytest.raises(ConfigError, match=text):
            find_served_model(place, which)
