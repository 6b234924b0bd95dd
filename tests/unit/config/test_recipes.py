"""Recipes: each is a configuration by itself, says where it is from, and gives way to whatever else is set."""

import msgspec
import pytest

from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load, settings
from lachesis.pipeline.config.recipes import recipes
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.config.toml import to_toml
from lachesis.schemas.errors import ConfigError


def loaded(*sets, file=None, environ=None):
    return load(run_config_type(), file=file, environ=environ, sets=sets)


def leaves(table, prefix=""):
    for key, value in table.items():
        yield from leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]


@pytest.mark.parametrize("name", recipes())
def test_each_loads_and_every_setting_of_it_is_in_force_and_says_so(name):
    recipe = recipes()[name]
    assert "arXiv:" in recipe.about
    rows = {row.path: row for row in settings(loaded(f"recipe={name}"))}
    for path, value in leaves(recipe.settings):
        assert (rows[path].value, rows[path].origin) == (value, f"recipe {name}")
    others = {row.path: row.value for row in settings(loaded())}
    changed = {path for path, row in rows.items() if row.value != others[path]}
    assert changed <= {"recipe", *dict(leaves(recipe.settings))}


def test_there_are_those_that_people_know():
    assert {"grpo", "dr_grpo", "dapo", "gspo", "cispo", "scalerl", "reinforce_plus_plus"} <= set(recipes())


def test_file_variables_and_options_go_before_the_recipe(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('recipe = "dapo"\n[training.learner.loss]\nclip_low = 0.1\n[batching]\nbatch_size = 32\n')
    config = loaded(
        "training.learner.loss.mask_truncated=false",
        file=file,
        environ={"LACHESIS_ADVANTAGE__ESTIMATOR": "rloo"},
    ).config
    loss = config.training.learner.loss
    assert (loss.clip_low, loss.clip_high, loss.mask_truncated) == (0.1, 0.28, False)
    assert (config.advantage.estimator, config.batching.batch_size) == ("rloo", 32)


def test_an_option_names_another_recipe_than_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('recipe = "dapo"\n')
    assert loaded('recipe="gspo"', file=file).config.training.learner.loss.objective == "gspo"


def test_a_value_that_is_the_default_goes_before_the_recipe_in_what_a_run_writes_down(tmp_path):
    config = loaded("recipe=scalerl", "batching.max_staleness=2").config
    assert config.batching.max_staleness == RunConfig().batching.max_staleness == 2
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config))
    assert loaded(file=file).config == config


@pytest.mark.parametrize(("name", "text"), [("dapoo", "did you mean 'dapo'"), ("17", "there is none named 17")])
def test_one_that_is_not_there_is_refused(name, text):
    with pytest.raises(ConfigError, match=text):
        loaded(f"recipe={name}")


def test_a_struct_without_recipes_has_none(tmp_path):
    class Plain(msgspec.Struct, forbid_unknown_fields=True):
        steps: int = 1

    with pytest.raises(ConfigError, match="unknown setting 'recipe'"):
        load(Plain, sets=["recipe=dapo"])
