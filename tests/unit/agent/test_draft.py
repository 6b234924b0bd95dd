"""A run that an agent puts together: whatever is accepted loads, and keeps the operator's policy."""

import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from lachesis.pipeline.config.policy import ConfigPolicy, FieldRule, load_policy
from lachesis.schemas.errors import ConfigError
from lachesis.services.agent.catalog import list_environments, select_environment
from lachesis.services.agent.draft import RunDraft

pytestmark = [pytest.mark.hostile, pytest.mark.extension]

EXAMPLES = Path(__file__).parents[2] / "examples"
BASE = """
model = "somewhere/else"
folder = "old"
[environments.words]
kind = "spell_backward"
[environments.more]
kind = "spell_backward"
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    file = tmp_path / "base.toml"
    file.write_text(BASE)
    return file


def draft_of(base: Path, name: str, policy: ConfigPolicy | None = None) -> RunDraft:
    draft = RunDraft(base, (), policy or ConfigPolicy(), environ={})
    draft.select(select_environment(name, list_environments(draft.base(), [EXAMPLES])))
    return draft


@pytest.mark.slow
def test_environments_are_found_without_importing_them(base: Path) -> None:
    entries = {entry.name: entry for entry in list_environments(draft_of(base, "words").base(), [EXAMPLES])}
    assert entries["words"].kind is None
    assert entries["Sums"].section == "sums"
    assert [field.name for field in entries["Sums"].fields] == ["largest"]
    assert (entries["Spelling"].kind, entries["Spelling"].problem) == ("atropos", None)


@pytest.mark.slow
def test_a_class_of_atropos_that_was_found_is_a_run_of_its_kind(base: Path) -> None:
    found = list_environments(draft_of(base, "words").base(), [EXAMPLES])
    assert "--atropos-python" in str(select_environment("Spelling", found).note)
    found = list_environments(draft_of(base, "words").base(), [EXAMPLES], {"atropos": sys.executable})
    entry = select_environment("Spelling", found)
    assert entry.note is None
    draft = RunDraft(base, (), ConfigPolicy(), environ={})
    draft.select(entry)
    env = draft.config().environments["spelling"]
    place = f"{EXAMPLES / 'atropos_spelling.py'}:Spelling"
    assert env.kind == "atropos"
    assert env.params == {"place": place, "python": sys.executable, "settings": {"tokenizer_name": "somewhere/else"}}
    assert draft.edit("group_size", 8) == "environments.spelling.samples"
    draft.edit("max_new_tokens", 16)
    assert draft.edit("max_token_length", 64) == "environments.spelling.longest_tokens"
    assert draft.edit("items", 50) == "environments.spelling.params.items"
    for field in entry.fields:
        assert draft._path(field.name, entry).startswith("environments.spelling.params.settings.")
    assert {field.name for field in entry.fields} <= {
        field.name.rpartition(".")[2] for field in draft.fields() if ".params.settings." in field.name
    }
    draft.edit("environments.spelling.params.settings.tokenizer_name", "other")
    assert draft.config().environments["spelling"].params["settings"] == {"tokenizer_name": "other"}


@pytest.mark.slow
def test_the_interpreter_is_that_of_another_class_of_atropos_in_the_configuration(base: Path) -> None:
    given = f'[environments.near]\nkind = "atropos"\nparams = {{ place = "a:B", python = "{sys.executable}" }}\n'
    base.write_text(BASE + given)
    entry = select_environment("Spelling", list_environments(draft_of(base, "words").base(), [EXAMPLES]))
    assert entry.params["python"] == sys.executable
    locked = draft_of(base, "Spelling", load_policy("rl"))
    with pytest.raises(ConfigError, match="locked"):
        locked.edit("python", "/another")


def test_the_tokenizer_of_a_class_of_atropos_follows_a_model_that_the_policy_frees(base: Path) -> None:
    freed = ConfigPolicy(others="free", fields={"model": FieldRule(choices=["somewhere/new"])})
    draft = RunDraft(base, (), freed, environ={})
    draft.select(
        select_environment("Spelling", list_environments(draft.base(), [EXAMPLES], {"atropos": sys.executable}))
    )
    draft.edit("model", "somewhere/new")
    assert draft.config().environments["spelling"].params["settings"] == {"tokenizer_name": "somewhere/new"}
    with pytest.raises(ConfigError, match="locked"):
        draft.edit("environments.spelling.params.settings.tokenizer_name", "somewhere/new")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "path"),
    [
        ("learning_rate", "training.learner.learning_rate"),
        ("total_steps", "training.steps"),
        ("lora_rank", "training.lora.rank"),
        ("group_size", "environments.sums.samples"),
        ("batch_size", "batching.batch_size"),
        ("max_token_length", "environments.sums.longest_tokens"),
        ("max_num_workers", "environments.sums.concurrency"),
        ("max_token_trainer_length", "training.learner.max_tokens_per_microbatch"),
        ("steps_per_eval", "evaluate.every_steps"),
        ("wandb_project", "training.wandb.project"),
        ("temperature", "environments.sums.temperature"),
    ],
)
def test_atropos_names_are_known_without_a_policy(base: Path, field: str, path: str) -> None:
    draft = draft_of(base, "Sums")
    assert draft.entry is not None
    assert draft._path(field, draft.entry) == path
    names = {shown.known_as: shown.name for shown in draft.fields()}
    assert names.get(field, path) == path


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("warmup_steps", r"is training\.learner\.warmup_steps meant\?"),
        ("learning_rates", "did you mean 'learning_rate'"),
        ("checkpoint_evry", "did you mean 'checkpoint_every'"),
        ("zzzz", "rl_get_current_config shows"),
    ],
)
def test_an_unknown_name_is_answered_with_the_right_one(base: Path, field: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        draft_of(base, "Sums").edit(field, 1)


def test_a_run_has_the_selected_environment_alone_and_a_name_of_its_own(base: Path) -> None:
    draft = draft_of(base, "Sums")
    config = draft.config_to_start(datetime(2026, 1, 31, 23, 59, 1, tzinfo=UTC))
    assert (config.run, config.folder) == ("sums-20260131-235901", None)
    assert list(config.environments) == ["sums"]
    assert config.environments["sums"].kind == f"{EXAMPLES / 'sums.py'}:Sums"
    draft.edit("run", "mine")
    assert draft.config_to_start(datetime.now(UTC)).run == "mine"


@pytest.mark.slow
def test_a_setting_is_known_by_its_path_its_name_in_the_environment_and_other_names(base: Path) -> None:
    draft = draft_of(base, "Sums", load_policy("rl"))
    assert draft.edit("batching.batch_size", 64) == "batching.batch_size"
    assert draft.edit("batch_size", 32) == "batching.batch_size"
    assert draft.edit("samples", 4) == draft.edit("group_size", 8) == "environments.sums.samples"
    assert draft.edit("largest", 9) == "environments.sums.params.largest"
    draft.edit("batching", {"max_staleness": 3})
    config = draft.config()
    assert (config.batching.batch_size, config.batching.max_staleness) == (128, 3)  # a table replaces what was below it
    assert (config.environments["sums"].samples, config.environments["sums"].params) == (8, {"largest": 9})
    draft.edit("group_size", None)
    assert draft.config().environments["sums"].samples == 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("batch_size", 0, r"batching\.batch_size: expected `int` >= 1"),
        ("batch_size", 8, r"environments\.sums\.samples is 16, but a batch has 8"),
        ("learning_rate", 1.0, r"training\.learner\.learning_rate: locked"),
        ("training", {"learner": {"learning_rate": 1.0}}, r"training\.learner\.learning_rate: locked"),
        ("model", "another", "model: locked"),
        ("largest", "x", r"environments\.sums\.params\.largest: expected `int`, got 'x'"),
        ("largest", True, r"environments\.sums\.params\.largest: expected `int`, got True"),
        ("estimator", 1, r"unknown setting 'estimator': is .*advantage\.estimator.* meant"),
        ("nonsense", 1, "unknown setting"),
        ("a=1\nb", 1, "names no setting"),
        ("", 1, "names no setting"),
        ("batch_size", "\x1b[31m", r"batching\.batch_size: expected `int`"),
    ],
)
def test_an_edit_that_does_not_do_says_why_and_changes_nothing(
    base: Path, field: str, value: object, says: str
) -> None:
    draft = draft_of(base, "Sums", load_policy("rl"))
    before = draft.config()
    with pytest.raises(ConfigError, match=says):
        draft.edit(field, value)
    assert draft.config() == before
    assert draft.edits == {}


def test_settings_are_shown_with_types_limits_and_locks(base: Path) -> None:
    policy = ConfigPolicy(fields={"batching.batch_size": FieldRule(max=64), "seed": FieldRule(locked=True)})
    draft = draft_of(base, "Sums", policy)
    draft.edit("batching.batch_size", 64)
    fields = {field.name: field for field in draft.fields()}
    size = fields["batching.batch_size"]
    assert (size.type, size.current_value, size.default, size.allowed) == ("integer", 64, 128, "64 or less")
    assert size.limits == {"min": 1}
    assert fields["seed"].locked
    assert fields["environments.sums.params.largest"].default == "99"
    assert fields["environments.sums.lost_samples"].choices == ["abandon", "drop", "refill"]
    assert "training.threads" not in fields
    assert {field.name for field in draft.fields("training.lora")} <= {"training.lora"}
    assert "training.threads" in {field.name for field in draft.fields("training")}
    assert {"training", "batching", "environments"} <= set(draft.sections())


def test_a_run_that_nobody_names_is_shown_by_environment_and_time(base: Path) -> None:
    draft = draft_of(base, "Sums", load_policy("rl"))
    (shown,) = [field for field in draft.fields() if field.known_as == "wandb_name"]
    assert (shown.current_value, shown.default, shown.locked) == ("sums-{timestamp}", "sums-{timestamp}", False)
    draft.edit("wandb_name", "mine")
    (shown,) = [field for field in draft.fields() if field.known_as == "wandb_name"]
    assert shown.current_value == "mine"


def test_passwords_are_not_shown(base: Path) -> None:
    base.write_text(BASE + '[nats]\nurl = "nats://me:secret@127.0.0.1:4222"\n')
    shown = draft_of(base, "words").fields("nats")
    assert "secret" not in str(shown)


@pytest.mark.slow
def test_secret_parameters_are_not_shown_and_texts_of_code_are_locked_under_a_policy(base: Path) -> None:
    (base.parent / "keyed.py").write_text(
        "from lachesis import Environment\n\n\nclass Keyed(Environment):\n"
        '    def __init__(self, api_key: str = "built-in-key", place: str = "here", size: int = 3) -> None:\n'
        "        pass\n\n    async def rollout(self, *_):\n        pass\n"
    )
    given = (
        '[environments.keyed]\nkind = "keyed.py:Keyed"\nparams = { api_key = "planted", place = "a://b:planted@c" }\n'
    )
    base.write_text(BASE + given)
    draft = RunDraft(base, (), load_policy("rl"), environ={})
    draft.select(select_environment("keyed", list_environments(draft.base(), [])))
    for section in ("", "environments", "environments.keyed"):
        assert "planted" not in str(draft.fields(section))
    assert draft.edit("environments.keyed.params.size", 4) == "environments.keyed.params.size"
    for field, value in (("params.place", "/etc/passwd"), ("params.api_key", "planted2"), ("kind", "os:system")):
        with pytest.raises(ConfigError, match="locked by the operator's policy") as refused:
            draft.edit(field, value)
        assert "planted" not in str(refused.value)
    for field, value in (
        ("scoring.raters", [{"rater": "pydoc:pipepager"}]),
        ("environments.keyed.scoring", {"raters": [{"rater": "pydoc:pipepager"}]}),
        ("inference.policy.python", "/bin/sh"),
        ("nats.url", "nats://evil"),
    ):
        with pytest.raises(ConfigError, match="locked by the operator's policy"):
            draft.edit(field, value)
