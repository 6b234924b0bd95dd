"""The examples of the READMEs are the files they name, short, and they work; their links lead somewhere."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from lachesis import Environment, Sample
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load as load_config
from lachesis.pipeline.environment.load import load_environment
from lachesis.pipeline.environment.rollout import collect_group
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.services.cli.commands import app
from lachesis.testing import FakeInference

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    path: path.read_text(encoding="utf-8")
    for path in [
        *ROOT.glob("*.md"),
        *(page for top in ("deploy", "pipeline", "services", "tests") for page in (ROOT / top).rglob("*.md")),
    ]
}
EXAMPLES = dict(
    found
    for text in PAGES.values()
    for found in re.findall(r"<!-- example: (\S+) -->\n```python\n(.*?)```", text, flags=re.DOTALL)
)
MOST_BYTES = 14_000
LONGEST = {"tests/examples/trainer_loop.py": 40, "tests/examples/tool_agent.py": 50, "tests/examples/own_loop.py": 32}


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_shows_an_environment_a_rater_and_a_trainer_and_stays_short() -> None:
    assert len(re.findall("<!-- example", README)) == 3
    assert len(README.encode()) <= MOST_BYTES


@pytest.mark.extension
@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_that_are_there(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", PAGES[page])
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("path", EXAMPLES)
def test_an_example_is_what_the_readme_shows_and_short(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert text == EXAMPLES[path], f"copy {path} into the README that shows it"
    assert len(text.splitlines()) <= LONGEST.get(path, 25)


@pytest.mark.parametrize("path", [path for path, text in EXAMPLES.items() if "(Environment)" in text])
async def test_an_environment_of_the_readme_makes_groups(path: str) -> None:
    name = re.search(r"class (\w+)\(Environment\)", EXAMPLES[path])
    assert name is not None
    env = load_environment(f"{ROOT / path}:{name[1]}")
    assert isinstance(env, Environment)
    task = env.task(3)
    right, wrong = str(task.task["answer"]), "no idea"
    inference = FakeInference(lambda _, call: right if call % 2 else wrong)
    draft = await collect_group(env, task, inference, 2, SamplingParams(max_tokens=64))
    assert sorted(value for rewards in draft.rewards for value in rewards.values()) == [0.0, 1.0]


def test_the_rater_of_the_readme_rates() -> None:
    brevity = load("tests/examples/brevity.py").brevity
    assert brevity.bounds == (0.0, 1.0)
    assert brevity(Sample(prompt="", completion="", token_count=40), enough=20) == 0.5


@pytest.mark.extension
@pytest.mark.parametrize(
    "text", [text for page in PAGES.values() for text in re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)]
)
def test_a_configuration_of_the_readme_is_one(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    load_config(run_config_type(), file=file, environ={}, sets=[])


def test_every_command_of_the_readme_is_there() -> None:
    table = README[README.index("| command | does |") : README.index("Most take `--config FILE`")]
    names = {
        name for cell in re.findall(r"^\| (.*?) \|", table, flags=re.MULTILINE) for name in re.findall(r"`(.*?)`", cell)
    }
    words = {word for name in names for word in name.removeprefix("lachesis ").split()[:1]}
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert words <= commands | {group.name for group in app.registered_groups}
