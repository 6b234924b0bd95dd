"""Teachers, tokenizers and the variables by which people know them, in the configuration."""

from pathlib import Path

import pytest

from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load, settings
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.extension import access_of
from lachesis.schemas.errors import ConfigError
from lachesis.services.planned_processes import planned_processes
from lachesis.services.run.permission_scope import scope_of

VARIABLES = {
    "STUDENT_MODEL": "org/student",
    "STUDENT_TOKENIZER": "org/letters",
    "TEACHER_MODEL": "org/teacher",
    "TEACHER_TOKENIZER": "123",
}


def loaded(
    toml: str = "", environ: dict[str, str] | None = None, *, folder: Path, sets: tuple[str, ...] = ()
) -> RunConfig:
    file = folder / "run.toml"
    file.write_text(toml)
    return load(run_config_type(), file=file, environ=environ, sets=sets).config


def test_the_variables_name_models_and_tokenizers(tmp_path: Path) -> None:
    config = loaded('model = "org/file"', VARIABLES, folder=tmp_path)
    assert (config.model, config.tokenizer) == ("org/student", "org/letters")
    assert (config.role("teacher").model, config.role("teacher").tokenizer) == ("org/teacher", "123")
    assert (config.tokenizer_name, config.tokenizer_of("policy")) == ("org/letters", "org/letters")
    assert config.tokenizer_of("teacher") == "123"


def test_our_own_variables_and_the_command_line_go_before_them(tmp_path: Path) -> None:
    own = {"LACHESIS_MODEL": "org/mine", "LACHESIS_INFERENCE__TEACHER__MODEL": "org/big"}
    config = loaded(environ=VARIABLES | own, folder=tmp_path, sets=("tokenizer=org/set",))
    assert (config.model, config.tokenizer, config.role("teacher").model) == ("org/mine", "org/set", "org/big")
    assert loaded('model = "org/file"', {"STUDENT_MODEL": ""}, folder=tmp_path).model == "org/file"


def test_a_value_says_which_variable_it_is_from() -> None:
    found = {row.path: row.origin for row in settings(load(run_config_type(), environ=VARIABLES))}
    assert found["model"] == "$STUDENT_MODEL"


SEVERAL = """
model = "org/student"
[environments.sums]
kind = "spell_backward"
[environments.code]
kind = "spell_backward"
[teacher]
enabled = true
[teacher.environments]
code = "teacher-code"
[inference.teacher-code]
model = "org/coder"
"""


def test_every_teacher_has_a_server_and_may_say_so(tmp_path: Path) -> None:
    config = loaded(SEVERAL, folder=tmp_path)
    assert config.teacher.roles(config.environments) == ["teacher", "teacher-code"]
    names = [row.name for row in planned_processes(config)]
    assert {"inference-teacher", "inference-teacher-code"} <= set(names)
    assert names.count("teacher") == 1
    table = access_of(scope_of(config))
    assert "inference.teacher-code" in table["inference"].sets
    assert "inference.teacher-code" in table["teacher"].watches
    assert "inference.teacher-code" not in table["evaluator"].watches


def test_no_server_is_started_for_a_teacher_of_no_environment(tmp_path: Path) -> None:
    config = loaded(SEVERAL, folder=tmp_path, sets=('teacher.environments.sums="teacher-code"',))
    assert config.teacher.roles(config.environments) == ["teacher-code"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("teacher.environments.nope=teacher", "there is no such environment; there are: sums, code"),
        ("teacher.environments.sums=eval", "use teacher, teacher-NAME or policy"),
        ("teacher.prompt={answer}", "has no {question}"),
        ("teacher.prompt={question} {answer!r}", "is no field's name alone"),
        ("teacher.prompt={question} {answer", "expected '}'"),
        ("teacher.environments.sums=teacher-x", "there is no .inference.teacher-x."),
        ("inference.teacher-x.model=m", "no environment has this teacher"),
        ("inference.other.model=m", "unknown role"),
        ("teacher.top_k=8", "teacher_bytes_per_token is 4, but .* takes 56 bytes"),
        ("teacher.tokenizers=align", "takes 12 bytes"),
        ("training.learner.loss.teacher_kl=reverse", "top_k is 0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, given: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        loaded(SEVERAL, folder=tmp_path, sets=(given,))


def test_likeliest_tokens_of_another_vocabulary_are_not_compared(tmp_path: Path) -> None:
    sets = ("training.learner.loss.teacher_kl=forward", "teacher.tokenizers=align", "teacher.top_k=4")
    with pytest.raises(ConfigError, match="one vocabulary"):
        loaded(SEVERAL, folder=tmp_path, sets=sets)


def test_the_policy_can_be_its_own_teacher_and_has_one_server(tmp_path: Path) -> None:
    config = loaded(SEVERAL, folder=tmp_path, sets=("teacher.environments.sums=policy",))
    assert config.teacher.roles(config.environments) == ["policy", "teacher-code"]
    servers = [row.part for row in planned_processes(config) if row.service == "inference"]
    assert sorted(servers) == ["eval", "policy", "teacher-code"]
    assert "inference.policy" in access_of(scope_of(config))["teacher"].watches


def test_a_prompt_of_the_teachers_own_needs_the_policys_tokenizer() -> None:
    with pytest.raises(ConfigError, match=r'teacher.prompt is set, and teacher.tokenizers is "align"'):
        load(run_config_type(), sets=("teacher.prompt={question} {answer}", "teacher.tokenizers=align"))
