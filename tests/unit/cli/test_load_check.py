"""What is said of environments, raters and a curriculum that cannot be loaded; they are the user's code."""

import io
import sys
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.model.tokenizer import build_character_tokenizer, save_tokenizer
from lachesis.schemas.errors import ConfigError
from lachesis.services.preflight.load_findings import LoadFinding
from lachesis.services.preflight.loading import check_loads, write_findings
from lachesis.services.preflight.start import check_start, refuse_failures

CODE = """
import os, sys, time
from lachesis import Environment, Message, Task, rater

class Shop(Environment):
    def __init__(self, path: str, *, size: int = 100, owner: str = "x") -> None:
        self.size = size
        if path == "missing":
            open("/no/such/file")
        if path == "exit":
            print("out of licences", file=sys.stderr, flush=True)
            os._exit(7)
        if path == "quit":
            sys.exit("no key")
        if path == "hang":
            time.sleep(1000)
        print("I print to standard output")
    def __len__(self) -> int:
        return self.size
    def task(self, index: int) -> Task:
        return Task(item=str(index), prompt=[Message(role="user", content="?")], task={"answer": "1"})

class Torn(Shop):
    def task(self, index: int) -> Task:
        raise KeyError("question")

@rater(bounds=(0.0, 1.0))
def brief(sample, *, limit: int, unit: str) -> float: ...
def unbounded(sample) -> float: ...

@rater(bounds=(0.0, 1.0))
def alarmed(sample) -> float:
    import signal
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return 1.0

@rater(bounds=(0.0, 1.0))
def column(sample) -> float:
    return float(sample.task["solution"])
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.py").write_text(CODE)
    return tmp_path


def config(kind: str = "shop.py:Shop", *, params: Any = None, raters: Any = (), **env: Any) -> RunConfig:
    environment = {"kind": kind, "params": {"path": "p"} if params is None else params, **env}
    settings = {"mode": "observe", "environments": {"shop": environment}, "scoring": {"raters": list(raters)}}
    return msgspec.convert(settings, run_config_type())


def found(settings: RunConfig, *, models: bool = False, prompts: bool = False) -> dict[str, LoadFinding]:
    out = io.BytesIO()
    write_findings(settings, out, models=models, prompts=prompts)
    lines = [msgspec.json.decode(line, type=LoadFinding) for line in out.getvalue().splitlines()]
    return {line.setting: line for line in lines}


def test_what_can_be_loaded_is_said_to_be() -> None:
    every = found(config(raters=[{"rater": "shop.py:brief", "params": {"limit": 3, "unit": "m"}}]))
    assert {one.state for one in every.values()} == {"ok"}
    assert every["environments.shop"].text == "100 tasks"
    assert every["scoring"].text == "brief"


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (100, "100 tasks, 10 of them held out"),
        (79, "79 tasks; environment shop is not evaluated: of its 79 tasks fewer than 8 would be held out; raise eva"),
    ],
)
def test_a_pool_that_is_too_small_to_be_evaluated_is_said_to_be(size: int, said: str) -> None:
    settings = config(params={"path": "p", "size": size})
    text = found(msgspec.structs.replace(settings, mode="train", model="m"))["environments.shop"].text
    assert text.startswith(said)


@pytest.mark.parametrize(
    ("rater", "state", "said"),
    [
        ("alarmed", "failed", "alarmed gave none of 4 scripted answers a rating: error, ValueError: signal only works"),
        ("alarmed", "failed", "Mend it: signal.alarm works in a process's main thread alone"),
        ("column", "doubtful", "KeyError: 'solution' (the task holds 'answer')"),
    ],
)
def test_a_rater_that_fails_on_every_scripted_answer_is_named(rater: str, state: str, said: str) -> None:
    finding = found(config(raters=[{"rater": f"shop.py:{rater}"}]))["environments.shop, tried"]
    assert finding.state == state
    assert said in finding.text


@pytest.mark.outside  # it imports torch
def test_prompts_are_rendered_for_the_policy_s_model(here: Path) -> None:
    tokenizer = build_character_tokenizer(max_length=64)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    save_tokenizer(tokenizer, here / "model")
    (here / "model" / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 64}')
    settings = msgspec.structs.replace(config(), model=str(here / "model"))
    finding = found(settings, prompts=True)["environments.shop, prompts"]
    assert finding.state == "ok"
    assert finding.text.startswith("100 of 100 prompts take up to 1 tokens of a context of 64")
    broken = msgspec.structs.replace(settings, chat_template="{% for m in messages %}")
    assert "wrong in line 1" in found(broken, prompts=True)["environments.shop, prompts"].text
    odd = msgspec.structs.replace(settings.environments["shop"], chat_template_kwargs={"enable_thinking": False})
    finding = found(msgspec.structs.replace(settings, environments={"shop": odd}), prompts=True)[
        "environments.shop, prompts"
    ]
    assert finding.state == "failed"
    assert "does not read 'enable_thinking'" in finding.text


def test_a_large_pool_without_difficulties_is_told_of_the_epoch_order() -> None:
    many = config(params={"path": "p", "size": 100_000})
    assert 'curriculum.strategy = "epoch"' in found(many)["environments.shop"].text
    in_order = msgspec.structs.replace(many, curriculum=CurriculumConfig(strategy="epoch"))
    assert "epoch" not in found(in_order)["environments.shop"].text


def test_a_strategy_is_made_for_the_tasks_that_there_are() -> None:
    easy_first = msgspec.structs.replace(
        config(params={"path": "p"}), curriculum=CurriculumConfig(strategy="easy_first")
    )
    finding = found(easy_first)["curriculum.strategy"]
    assert finding.state == "failed"
    assert "environment shop: curriculum.strategy 'easy_first' goes from easy to hard" in finding.text


@pytest.mark.parametrize(
    ("broken", "setting", "said"),
    [
        (config(params={}), "environments.shop", "missing argument 'path'"),
        (config(params={"path": "p", "sise": 3}), "environments.shop", "unknown argument 'sise'; did you mean 'size'"),
        (config(params={"path": 3}), "environments.shop", "argument 'path': Expected `str`, got `int`"),
        (config(params={"path": "missing"}), "environments.shop", "FileNotFoundError"),
        (config(params={"path": "missing"}), "environments.shop", "(shop.py, line 9)"),
        (config(params={"path": "quit"}), "environments.shop", "ends the process: SystemExit('no key')"),
        (config("shop.py:Torn"), "environments.shop", "KeyError: 'question' (shop.py, line"),
        (config(params={"path": "p", "size": 0}), "environments.shop", "has no tasks"),
        (config("shop.py:brief"), "environments.shop", "not a subclass of lachesis.Environment"),
        (config(raters=[{"rater": "shop.py:brief"}]), "scoring", "missing arguments 'limit', 'unit'"),
        (
            config(raters=[{"rater": "shop.py:brief", "params": {"limt": 1}}]),
            "scoring",
            "rater 'brief', params: unknown argument 'limt'; did you mean 'limit'?",
        ),
        (config(raters=[{"rater": "code", "params": {"tme": 1}}]), "scoring", "unknown argument 'tme'; did you mean"),
        (config(raters=[{"rater": "shop.py:unbounded"}]), "scoring", "has no bounds"),
        (
            config(raters=[{"rater": "shop.py:unbounded"}, {"rater": "shop.py:brief"}]),
            "scoring",
            "has no bounds",
        ),
        (
            config(raters=[{"rater": "length"}], success_rater="lenght"),
            "environments.shop.scoring",
            "environments.shop.success_rater is 'lenght', but its raters are length",
        ),
    ],
)
def test_what_cannot_be_loaded_is_named_with_what_it_lacks(broken: RunConfig, setting: str, said: str) -> None:
    finding = found(broken)[setting]
    assert finding.state == "failed"
    assert said in finding.text


def test_all_raters_that_cannot_be_loaded_are_told_at_once() -> None:
    text = found(config(raters=[{"rater": "shop.py:unbounded"}, {"rater": "shop.py:brief"}]))["scoring"].text
    assert "has no bounds" in text
    assert "missing arguments 'limit', 'unit'" in text


def written(folder: Path, path: str) -> list[str]:
    (folder / "run.toml").write_text(
        f'mode = "observe"\n[environments.shop]\nkind = "shop.py:Shop"\nparams = {{ path = "{path}" }}\n'
    )
    return ["--config", str(folder / "run.toml")]


@pytest.mark.slow
@pytest.mark.outside
@pytest.mark.parametrize(("path", "level"), [("p", "ok"), ("exit", "failed"), ("hang", "late")])
async def test_code_that_prints_ends_its_process_or_hangs_harms_nobody(here: Path, path: str, level: str) -> None:
    every = await check_loads(written(here, path), timeout_s=8.0 if path == "hang" else 120.0)
    by_setting = {one.setting: one for one in every}
    assert by_setting["environments.shop"].state == level
    if path == "exit":
        assert by_setting["environments.shop"].text == "loading it ended its process (code 7): out of licences"


@pytest.mark.slow
@pytest.mark.outside
async def test_doctor_and_up_say_the_same_and_how_to_mend_it(here: Path) -> None:
    findings = [one async for one in check_start(config(), written(here, "missing"), load_s=120.0)]
    failed = next(one for one in findings if one.level == "FAIL")
    assert failed.check == "environments.shop"
    assert failed.mend == "correct environments.shop.params, or the code that environments.shop.kind names"
    with pytest.raises(ConfigError, match=r"(?s)cannot start:\n  environments.shop: FileNotFound.*mend: correct env"):
        refuse_failures(findings)
    refuse_failures(one for one in findings if one.level != "FAIL")


@pytest.mark.slow
@pytest.mark.outside
async def test_up_starts_nothing_that_doctor_finds_broken(here: Path) -> None:
    arguments = [*written(here, "quit"), "--set", "inference.policy.url=http://127.0.0.1:1"]
    said = {}
    for command in ("doctor", "up"):
        done = await anyio.run_process([sys.executable, "-m", "lachesis", command, *arguments], check=False)
        said[command] = done.returncode, (done.stdout + done.stderr).decode()
    assert {command: code for command, (code, _) in said.items()} == {"doctor": 1, "up": 2}
    for _, text in said.values():
        assert "environments.shop" in text
        assert "SystemExit('no key') (shop.py, line" in text
        assert "correct environments.shop.params, or the code that environments.shop.kind names" in text
    assert not (here / "runs").exists()


@pytest.mark.slow
@pytest.mark.outside
@pytest.mark.parametrize("always", [False, True])
async def test_a_wrong_model_path_is_told_at_once_and_hides_nothing_from_doctor(here: Path, always: bool) -> None:
    settings = msgspec.structs.replace(config(params={"path": "missing"}), mode="train", model="./modle")
    arguments = [*written(here, "missing"), "--set", "mode=train", "--set", "model=./modle"]
    failed = [
        one.check
        async for one in check_start(settings, arguments, load_s=120.0, load_always=always)
        if one.level == "FAIL"
    ]
    assert failed == ["model", "environments.shop"] if always else ["model"]


@pytest.mark.slow
@pytest.mark.outside
async def test_a_kind_that_is_not_there_is_told_once(here: Path) -> None:
    settings = config(kind="shpo.py:Shop")
    arguments = [*written(here, "p"), "--set", "environments.shop.kind=shpo.py:Shop"]
    findings = [one async for one in check_start(settings, arguments, load_s=120.0, load_always=True)]
    assert [one.check for one in findings if one.level == "FAIL"] == ["environments.shop.kind"]
    assert "scoring" in {one.check for one in findings if one.level == "OK"}


def test_an_environment_that_cannot_be_loaded_has_one_finding(here: Path) -> None:
    save_tokenizer(build_character_tokenizer(max_length=64), here / "model")
    settings = msgspec.structs.replace(config(params={"path": "missing"}), model=str(here / "model"))
    of_shop = {name: one.state for name, one in found(settings, prompts=True).items() if "shop" in name}
    assert of_shop == {"environments.shop": "failed"}


def test_raters_that_cannot_be_loaded_have_one_finding() -> None:
    broken = found(config(raters=[{"rater": "shop.py:unbounded"}], success_rater="unbounded"))
    assert [name for name, one in broken.items() if one.state == "failed"] == ["scoring"]


async def test_a_check_that_does_not_end_is_not_said_to_be_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    async def late(*_: Any, **__: Any) -> list[LoadFinding]:
        return [LoadFinding(setting="environments.shop, tried", state="late")]

    monkeypatch.setattr("lachesis.services.preflight.start.check_loads", late)
    (finding,) = [one async for one in check_start(config(), [], load_s=8.0) if one.check.startswith("environments")]
    assert finding.text == "did not end within 8 s"


async def test_without_environments_nothing_is_loaded() -> None:
    (finding,) = [one async for one in check_start(RunConfig(mode="observe"), [], load_s=1.0) if one.level == "FAIL"]
    assert finding.text == "empty, so nothing would be generated"
