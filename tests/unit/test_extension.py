"""What installed packages add: found by entry points, refused by name, and used as the pipeline's own parts are."""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, get_type_hints

import anyio.to_process
import msgspec
import pytest
from every_struct import named, structs
from stages import run_inference

from lachesis.pipeline import extension
from lachesis.pipeline.bus.config import Connection, ConnectionConfig
from lachesis.pipeline.common.doctor_finding import ok
from lachesis.pipeline.config import extended
from lachesis.pipeline.config.load import field_descriptions, load, settings
from lachesis.pipeline.config.policy import load_policy
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig, TrainingConfig
from lachesis.pipeline.config.toml import to_toml
from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.known_strategies import strategy_names
from lachesis.pipeline.curriculum.logic.registry import find_strategy
from lachesis.pipeline.environment.load import environment_kinds, load_environment
from lachesis.pipeline.environment.rollout import collect_group
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.inference.config import InferenceConfig
from lachesis.pipeline.inference.directory import open_role
from lachesis.pipeline.inference.policy_context import context_of_server
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.normalizer.estimators.loader import load_estimator
from lachesis.pipeline.normalizer.known_estimators import estimator_names
from lachesis.pipeline.notices.facts import held_up_by
from lachesis.pipeline.offline.replay.frames import WorkerStart
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.pipeline.scorer.promoted import admit_promoted
from lachesis.pipeline.scorer.raters import rater_places
from lachesis.schemas import subjects
from lachesis.schemas.errors import ConfigError
from lachesis.services.agent.catalog import list_environments, select_environment
from lachesis.services.agent.draft import RunDraft
from lachesis.services.cli.commands import COMMANDS, Command, load_command
from lachesis.services.cli.up import describe_extensions
from lachesis.services.planned_processes import planned_processes
from lachesis.services.preflight import machine
from lachesis.services.preflight.machine import check_machine, needed_extras
from lachesis.services.registry import CORE, load_stage, service_of, services
from lachesis.services.run.permission_scope import scope_of
from lachesis.services.supervisor.forkserver import PRELOADED

IMPORTS = "from lachesis.pipeline.extension import *\n"
EXAMPLE = Path(__file__).parents[1] / "examples" / "extension"
CACHED = (
    extension.extensions, extension.added, extended.run_config_type, extended.training_config_type,
    extended.environment_config_type, extended.inference_config_type,
)  # fmt: skip
WHOLE = """
from typing import Any

from lachesis import RewardGroup
from lachesis.pipeline.curriculum.logic.strategy import Strategy
from lachesis.pipeline.access import Access, service_access
from lachesis.pipeline.extension import (
    EngineSpec, EnvironmentKind, Extension, ServiceSpec, Setting, TrackerSpec, TrainerSpec
)

served = []


def wanted(config: Any) -> bool:
    return config.training.plums > 3


def middle(group: RewardGroup) -> list[float]:
    return [0.0 for _ in group.rewards]


class Backwards(Strategy):
    pass


def access(scope: Any) -> dict[str, Access]:
    return {"shaker": service_access(scope, "shaker", sets=("policy",))}


async def serve(service: Any, settings: Any, model: str) -> None:
    served.append((settings.role, model))


def sized(config: Any) -> int:
    return config.training.plums


async def shake(service: Any, settings: int) -> None:
    served.append(("shaken", settings))


EXTENSION = Extension(
    name="plums",
    about="training in a tree",
    settings={"training.plums": Setting(int, 3, "Plums. Default 3.")},
    environments={"plums": EnvironmentKind(place="plums:Plums", param_paths={"tree": "file"})},
    estimators={"plum": "plums:middle"},
    strategies={"plum": "plums:Backwards"},
    raters={"plum": "plums:rate"},
    services={
        "shaker": ServiceSpec("shaker", "plums:shake", 1, "shakes", held_up=("pickers",), settings="plums:sized")
    },
    access="plums:access",
    engines={"plum": EngineSpec(serve="plums:serve", says="plum", extra="plum-engine")},
    trainers={"tree": TrainerSpec(open="plums:serve", serving="plums:serve", extra="tree", model="a:b", port="")},
    trackers={"training.plums": TrackerSpec(open="a:b", place="a:b", is_wanted=wanted, extra="j")},
)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Return what installs a module, and names what is in it as an extension of the same name."""

    def forget() -> None:
        for one in CACHED:
            one.cache_clear()

    def add(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[{extension.GROUP}]\n{name} = {name}:EXTENSION\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
        forget()

    monkeypatch.syspath_prepend(tmp_path)
    yield add
    monkeypatch.undo()
    forget()


def command_of(place: str) -> Command:
    return Command("shake", place, "Shake.", package=EntryPoint("shake", place, "lachesis.commands"))


def config(**changes: Any) -> RunConfig:
    return load(extended.run_config_type(), sets=[f"{key}={value}" for key, value in changes.items()]).config


def test_what_cannot_be_used_is_named_with_its_package(install: Callable[[str, str], None]) -> None:
    install("broken", "raise OSError('no such tree')")
    said = r"the extension 'broken' of broken cannot be loaded \(OSError: no such tree\)"
    with pytest.raises(StartupError, match=said):
        extension.extensions()


@pytest.mark.parametrize("value", ["7", "Extension(name='another', about='x')"])
def test_a_value_that_is_no_extension_of_that_name_is_refused(install: Callable[[str, str], None], value: str) -> None:
    install("wrong", f"from lachesis.pipeline.extension import Extension\nEXTENSION = {value}")
    with pytest.raises(StartupError, match="not a lachesis Extension of that name; install another version of wrong"):
        extension.extensions()


def test_two_that_add_one_name_are_refused(install: Callable[[str, str], None]) -> None:
    source = "from lachesis.pipeline.extension import Extension\n"
    for name in ("first", "second"):
        install(name, f"{source}EXTENSION = Extension(name='{name}', about='x', raters={{'ripe': '{name}:rate'}})")
    with pytest.raises(StartupError, match="'first' and 'second' both add 'ripe' to raters: uninstall one"):
        extension.extensions()


@pytest.mark.parametrize(
    ("adds", "used"),
    [
        ("settings={'batching': Setting(int, 1, '')}", extended.run_config_type),
        ("settings={'training.steps': Setting(int, 1, '')}", extended.training_config_type),
        ("engines={'vllm': EngineSpec(serve='a:b', says='a')}", extended.run_config_type),
        ("trainers={'torch': None}", extended.run_config_type),
        ("services={'scorer': ServiceSpec('scorer', 'a:b', 1, '')}", services),
        ("environments={'dataset': EnvironmentKind(place=None)}", environment_kinds),
        ("raters={'length': 'a:b'}", rater_places),
        ("estimators={'grpo': 'a:b'}", estimator_names),
        ("strategies={'epoch': 'a:b'}", strategy_names),
    ],
)
def test_a_name_of_the_pipeline_itself_is_refused(
    install: Callable[[str, str], None], adds: str, used: Callable[[], object]
) -> None:
    install("greedy", f"{IMPORTS}EXTENSION = Extension(name='greedy', about='x', {adds})")
    said = "'greedy' adds '.*' to .*, which the pipeline itself has: install another version of greedy, or uninstall it"
    with pytest.raises(StartupError, match=said):
        used()


def test_two_packages_that_offer_one_extension_are_refused(install: Callable[[str, str], None], tmp_path: Path) -> None:
    install("first", f"{IMPORTS}EXTENSION = Extension(name='first', about='x')")
    install("second", f"{IMPORTS}EXTENSION = Extension(name='first', about='x')")
    (tmp_path / "second-1.0.dist-info" / "entry_points.txt").write_text(
        f"[{extension.GROUP}]\nfirst = second:EXTENSION"
    )
    with pytest.raises(StartupError, match=r"the packages (first and second|second and first) both offer .*'first'"):
        extension.extensions()


@pytest.mark.parametrize(
    ("what", "used"),
    [
        ("check", config),
        ("plan", lambda: planned_processes(RunConfig())),
        ("access", lambda: extension.access_of(scope_of(RunConfig()))),
        ("announce", lambda: describe_extensions(RunConfig())),
    ],
)
@pytest.mark.parametrize("fails", ["raise KeyError('plum')", "yield int('plum')"])
def test_a_function_that_fails_is_named_with_its_package(
    install: Callable[[str, str], None], what: str, used: Callable[[], object], fails: str
) -> None:
    source = f"def fail(given):\n    {fails}\nEXTENSION = Extension(name='rotten', about='x', {what}='rotten:fail')"
    install("rotten", f"{IMPORTS}{source}")
    with pytest.raises(StartupError, match=rf"`{what}` of the extension 'rotten' of rotten failed .*rotten.py:\d+"):
        used()


def test_doctor_goes_on_where_an_extension_fails(
    install: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "binary", lambda _config: ok("nats-server", "not looked for"))
    source = (
        "def look(config):\n    raise OSError\nEXTENSION = Extension(name='rotten', about='x', doctor='rotten:look')"
    )
    install("rotten", f"{IMPORTS}{source}")
    (found,) = [one for one in check_machine(RunConfig()) if one.check == "extensions"]
    assert "`doctor` of the extension 'rotten' of rotten failed (OSError" in found.text


def test_permissions_of_other_services_are_refused(install: Callable[[str, str], None]) -> None:
    source = "def rows(scope):\n    return {'trainer': None}\n"
    install("sly", f"{IMPORTS}{source}EXTENSION = Extension(name='sly', about='x', access='sly:rows')")
    with pytest.raises(StartupError, match="'sly' gives permissions to 'trainer', which is no service that it adds"):
        extension.access_of(scope_of(RunConfig()))


def test_a_run_without_its_settings_does_not_need_it(install: Callable[[str, str], None], tmp_path: Path) -> None:
    install("plums", WHOLE)
    assert "plums" not in to_toml(config())
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config(**{"training.plums": 5})))
    assert load(extended.run_config_type(), file=file).config == config(**{"training.plums": 5})


def test_its_service_is_named_in_notices_and_heard_as_one_that_may_set_the_policy(
    install: Callable[[str, str], None],
) -> None:
    install("plums", WHOLE)
    assert held_up_by("shaker") == held_up_by("shaker-2") == ["pickers"]
    scope = scope_of(RunConfig())
    asked = {subjects.heartbeat(scope.run, writer) for writer in ("shaker", "trainer")}
    assert asked <= set(extension.access_of(scope)["inference"].hears)


def test_services_of_extensions_are_not_forked(install: Callable[[str, str], None]) -> None:
    install("plums", WHOLE)
    assert "shaker" in services()
    assert {name for names in PRELOADED.values() for name in names} == set(CORE)


def test_a_command_may_be_in_a_module_without_a_dot(
    install: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    install("plums", "def shake() -> None:\n    print('plums fall')")
    load_command(command_of("plums:shake [extra]")).main(args=[], standalone_mode=False)
    assert capsys.readouterr().out == "plums fall\n"


def test_a_command_of_two_packages_is_refused(install: Callable[[str, str], None], tmp_path: Path) -> None:
    for name in ("plums", "pears"):
        install(name, "def shake() -> None: ...")
        entries = f"[lachesis.commands]\nshake = {name}:shake\n"
        (tmp_path / f"{name}-1.0.dist-info" / "entry_points.txt").write_text(entries)
    with pytest.raises(StartupError, match=r"(plums and pears|pears and plums) both add the command 'shake'"):
        load_command(command_of("plums:shake"))


@pytest.mark.parametrize("place", ["no_such_module:shake", "plums:nothing", "plums:TREES"])
def test_a_command_that_cannot_be_loaded_is_named_with_its_package(
    install: Callable[[str, str], None], place: str
) -> None:
    install("plums", "TREES = 3")
    with pytest.raises(StartupError, match=r"the command 'shake' of .* cannot be loaded .*; install another version"):
        load_command(command_of(place))


def test_a_command_joins_a_group_and_one_that_fails_leaves_the_others(
    install: Callable[[str, str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install("plums", "def shake() -> None:\n    print('plums fall')")
    entries = "[lachesis.commands]\nenv.shake = plums:shake\nenv.list = plums:shake\nenv.rot = plums:nothing\n"
    (tmp_path / "plums-1.0.dist-info" / "entry_points.txt").write_text(entries)
    env = load_command(COMMANDS["env"])
    env.main(args=["shake"], standalone_mode=False)
    assert capsys.readouterr().out == "plums fall\n"
    assert env.commands["list"].help.startswith("List the built-in environments"), "a name that is taken stays"
    with pytest.raises(StartupError, match=r"the command 'env.rot' of plums cannot be loaded .*; install another"):
        env.main(args=["rot", "--fast", "7"], standalone_mode=False)


async def test_all_that_it_adds_is_used_as_the_pipelines_own(install: Callable[[str, str], None], lab: Any) -> None:
    install("plums", WHOLE)
    assert environment_kinds()["plums"] == "plums:Plums"
    assert rater_places()["plum"] == "plums:rate"
    assert load_estimator(AdvantageConfig(estimator="plum")).name == "plum@1"
    assert find_strategy(CurriculumConfig(strategy="plum")).__name__ == "Backwards"
    run = config(**{"training.plums": 5, "training.backend": "tree", "mode": "train", "model": "m"})
    assert run.at("training.plums", 0) == 5
    assert needed_extras(run) >= {"j", "tree"}
    assert service_of(run, "trainer", "").backend == service_of(run, "inference", "policy").stage == "plums:serve"
    assert service_of(run, "trainer", "").stage == services()["trainer"].stage
    assert service_of(run, "inference", "teacher") == services()["inference"]
    await load_stage(services()["shaker"])(Service(lab.bus, "shaker", "r"), run, "")
    assert sys.modules["plums"].served == [("shaken", 5)]
    assert "shaker" not in {row.service for row in planned_processes(run)}, "without a plan it is started by hand"
    with_engine = config(**{"inference.policy.kind": "plum", "model": "m"})
    assert "plum-engine" in needed_extras(with_engine)
    await run_inference(Service(lab.bus, "inference", "r"), with_engine, "policy")
    assert sys.modules["plums"].served[-1] == ("policy", "m")


@pytest.mark.outside
async def test_an_engine_is_one_entry_whose_server_samples_a_group(
    install: Callable[[str, str], None], lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    install("orchard", "from lachesis_orchard import EXTENSION")
    run = config(**{"run": "r", "folder": f'"{tmp_path}"', "inference.eval.kind": "parrot", "model": "m"})
    env = load_environment("orchard", {"trees": 2})
    async with (
        lab.running(lambda service: run_inference(service, run, "eval"), "inference"),
        open_role(lab.bus, "r", "eval") as directory,
    ):
        served = await directory.current()
        draft = await collect_group(env, env.task(3), served, 2, SamplingParams(max_tokens=4))
    assert [session.replies[-1].text for session in draft.sessions] == ["6", "6"]
    assert draft.rewards == [{"environment": 1.0}] * 2


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ({"weights.transport": "shared_memory"}, r"which plum does not compute with: set .*kind = \"reference\""),
        ({"environments.e.kind": "dataset", "environments.e.top_p": 0.5}, "plum does not say which tokens that left"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(
    install: Callable[[str, str], None], sets: dict[str, Any], said: str
) -> None:
    install("plums", WHOLE)
    with pytest.raises(ConfigError, match=said):
        config(**{"inference.policy.kind": "plum", "model": "m", **sets})


def test_the_context_is_read_from_the_option_of_its_engine(install: Callable[[str, str], None]) -> None:
    adds = "engines={'plum': EngineSpec(serve='a:b', says='plum', context_option='--room')}"
    install("plums", f"{IMPORTS}EXTENSION = Extension(name='plums', about='x', {adds})")
    args = '["--max-model-len", "5", "--room", "7"]'
    for kind, context in (("plum", 7), ("vllm", 5)):
        run = config(**{"inference.policy.kind": kind, "inference.policy.args": args})
        assert context_of_server(run.role("policy"), None) == context


def test_descriptions_are_read_where_python_knows_no_source_of_a_made_class(
    install: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_written_classes(kind: type) -> str:  # as inspect.getsource of Python 3.13
        if "DESCRIPTIONS" in vars(kind):
            raise OSError("source code not available")
        return getsource(kind)

    install("plums", WHOLE)
    getsource = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", of_written_classes)
    described = field_descriptions(extended.training_config_type())
    assert described["plums"] == "Plums. Default 3."
    assert described["steps"].startswith("Optimizer steps")


def test_classes_of_another_project_are_found_and_offered_with_a_policy(
    install: Callable[[str, str], None], tmp_path: Path
) -> None:
    classes = "ForeignClasses(base='Tree', package='forest', settings_class='seeds', params=('depth',), "
    adds = f"environments={{'tree': EnvironmentKind(place='a:b', classes={classes}model_setting='bark'))}}, "
    policy = "ConfigPolicy(names={'height': 'training.steps'}, fields={'training.steps': FieldRule(max=9)})"
    install("plums", f"{IMPORTS}EXTENSION = Extension(name='plums', about='x', {adds}policies={{'p': 'policy:P'}})")
    (tmp_path / "policy.py").write_text(f"from lachesis.pipeline.config.policy import *\nP = {policy}")
    source = "from forest import Tree\nclass Seeds:\n    leaves: int = 3\nclass Oak(Tree):\n    seeds = Seeds\n"
    (tmp_path / "oak.py").write_text(source)
    draft = RunDraft(None, ("model=m",), load_policy("p"), environ={})
    draft.select(select_environment("Oak", list_environments(draft.base(), [tmp_path], {"tree": "/python"})))
    assert draft.edit("leaves", 5) == "environments.oak.params.settings.leaves"
    assert draft.edit("depth", 2) == "environments.oak.params.depth"
    assert draft.edit("height", 9) == "training.steps"
    with pytest.raises(ConfigError, match="10 is not allowed by the operator's policy: 9 or less"):
        draft.edit("height", 10)
    assert draft.config().environments["oak"].params == {
        "place": f"{tmp_path / 'oak.py'}:Oak",
        "python": "/python",
        "depth": 2,
        "settings": {"bark": "m", "leaves": 5},
    }


def test_its_settings_are_checked_as_all_others(install: Callable[[str, str], None], tmp_path: Path) -> None:
    install("plums", WHOLE)
    assert [row.description for row in settings(load(extended.run_config_type())) if row.path == "training.plums"] == [
        "Plums. Default 3."
    ]
    with pytest.raises(ConfigError, match=r"training\.plums: expected `int`"):
        config(**{"training.plums": "many"})
    with pytest.raises(ConfigError, match=r"training\.backend: invalid enum value 'trees'; did you mean 'tree'"):
        config(**{"training.backend": "trees"})
    file = tmp_path / "run.toml"
    file.write_text('[environments.e]\nkind = "plums"\nparams = { tree = "oak.txt" }\n')
    given = load(extended.run_config_type(), file=file).config
    assert given.environments["e"].params["tree"] == str(tmp_path / "oak.txt")


def test_a_promotion_brings_in_no_rater_of_another_package(install: Callable[[str, str], None]) -> None:
    install("plums", WHOLE)
    with pytest.raises(ConfigError, match="the rater 'plum' is not named by this scorer's own configuration"):
        admit_promoted(ScoringConfig(raters=[RaterConfig(rater="plum")]), [])


@pytest.mark.outside
@pytest.mark.extension
async def test_a_configuration_goes_to_a_worker_process_and_comes_back_the_same() -> None:
    given = config(**{"gateway.port": 1, "environments.e.kind": "steps", "inference.policy.kind": "vllm"})
    assert await anyio.to_process.run_sync(copy.copy, given) == given


@pytest.mark.extension
def test_a_worker_of_a_replay_gets_the_settings_of_extensions() -> None:
    given = config(**{"gateway.port": 1, "training.tensorboard": "true", "environments.e.kind": "steps"})
    connection = Connection(ConnectionConfig(url="nats://127.0.0.1:1"), None)
    sent = msgspec.msgpack.encode(WorkerStart.of(given, {}, connection, []))
    assert msgspec.msgpack.decode(sent, type=WorkerStart).run_config == given


@pytest.mark.extension
def test_a_rank_gets_the_pipelines_own_settings_of_the_trainer() -> None:
    training = config(**{"training.tensorboard": "true", "training.steps": 7}).training
    sent = msgspec.msgpack.encode(training.without_extensions())
    assert msgspec.msgpack.decode(sent, type=TrainingConfig).steps == 7


@pytest.mark.slow
def test_no_message_holds_a_configuration_to_which_extensions_add() -> None:
    extended_kinds = {RunConfig, EnvironmentConfig, InferenceConfig, TrainingConfig}
    holders = {
        named(kind)
        for kind in structs()
        if not issubclass(kind, tuple(extended_kinds)) and extended_kinds & set(get_type_hints(kind).values())
    }
    assert holders == {"pipeline.trainer.ranks.join.RankStart"}, "it sends what `without_extensions` returns"


def test_without_it_all_is_as_before() -> None:
    assert "plums" not in extension.extensions()
    with pytest.raises(ConfigError, match="unknown setting"):
        config(**{"training.plums": 5})
    assert RunConfig().at("training.plums", 7) == 7
    assert issubclass(extended.training_config_type(), TrainingConfig)
