"""Every way from data to code is known: structs that hold values of any kind, and what imports or runs by a name.

Structs are found among all modules of the package, calls in their source. So a new one that may lead from a message,
state, checkpoint or folder into the loader fails here until somebody writes down why it does not.
"""

import ast
import contextlib
import dataclasses
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from every_struct import named, structs
from fuzz.targets import control, gateway, state, wire

import lachesis.pipeline
import lachesis.schemas
import lachesis.services
from lachesis.pipeline.common import user_code
from lachesis.pipeline.config.policy import ConfigPolicy
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig

pytestmark = [pytest.mark.hostile, pytest.mark.slow]

FREE_FIELDS = {
    "schemas.control.FixedSample": "data that raters are given",
    "schemas.promotion.RewardSettings": "scorer.promoted and promotion.record admit what a configuration names",
    "schemas.replay.RevisionRecord": "compared with a configuration, never loaded",
    "schemas.rollout.PackedGroup": "data that raters are given",
    "schemas.rollout.RolloutGroup": "data that raters are given",
    "pipeline.curriculum.logic.learner._NamedState": "numbers of a strategy, each of which checks its own",
    "pipeline.curriculum.logic.learner._PoolState": "numbers of a strategy, each of which checks its own",
    "pipeline.health.logic.monitor._KeptState": "numbers of a rolling statistic",
    "pipeline.normalizer.logic.revision_normalizers._RevisionState": "numbers of a normalizer",
    "pipeline.normalizer.logic.revision_normalizers._SavedNormalizers": "numbers of a normalizer",
    "pipeline.offline.replay.logic.fold._FoldState": "numbers of a normalizer",
    "pipeline.scorer.logic.aggregate.EnsembleMember": "made of the scorer's own configuration",
    "pipeline.model.shared_memory.SegmentHeader": "how positions are encoded, compared with the server's own model",
    "pipeline.offline.replay.frames.WorkerStart": "the configuration of the replay that started the worker, by a pipe",
    "pipeline.bus.replies.RaftGroup": "an answer of the server about itself, shown",
    "pipeline.bus.replies.StreamInfo": "an answer of the server about itself, compared",
    "pipeline.extensions.atropos.logic.scored_data.ScoredData": "data that raters are given, posted to the gateway",
    "pipeline.tasks.task.Task": "what an environment poses",
    "pipeline.tasks.tool_calls._Call": "arguments of a tool that the environment defines",
    "pipeline.extensions.atropos.native.frames.Generate": "sampling parameters, converted to their type",
    "pipeline.extensions.atropos.native.frames.Groups": "groups of an environment's process, as posted to the gateway",
    "pipeline.extensions.atropos.native.frames.Ready": "numbers of NormalizationConfig",
    "pipeline.environment.config.CollectConfig": "made of the configuration",
    "pipeline.environment.group_environment.GeneratedGroup": "made by the environment itself",
    "pipeline.environment.group_environment.SequenceExtras": "made by the environment itself",
    "pipeline.environment.rollout.GroupDraft": "made by the environment itself",
    "pipeline.inference.protocol.StructuredOutputs": "a JSON schema, of which the engine makes a grammar",
    "pipeline.inference.protocol.TokenizeRequest": "the template is the server's own; its parameters are data",
    "pipeline.extensions.endpoint.logic.call_tree.SampledAnswer": "token ids, as the inference server gave them",
    "pipeline.extensions.endpoint.logic.conversation.ModelRequest": "schemas of an agent's tools, shown to the model",
    **dict.fromkeys(
        (
            f"pipeline.inference.serving.dialects.{name}"
            for name in ("ChatRequest", "CompletionRequest", "SglangRequest", "SglangSampling", "VllmRequest",
                         "_OpenAiRequest", "_Sampling")
        ),
        "sampling parameters, and fields that are refused or without effect",
    ),
    "pipeline.inference.client._ScoredPrompt": "logprobs, decoded as such before they are read",
    "pipeline.evaluator.logic.model_summary.InferenceSample": "shown",
    "services.agent.catalog.CatalogEntry": "read from source that is not run; what is chosen passes the policy",
    "services.agent.draft.DraftField": "shown",
    "pipeline.extensions.endpoint.command.AgentReport": "shown",
    "services.cli.env_test_command.InferenceReport": "shown",
    "services.observe.groups.GroupView": "shown",
}  # fmt: skip
"""Structs outside of the configuration with fields that hold values of any kind, and what becomes of these."""
LOADERS = {
    "pipeline/common/user_code.py": "the loader itself: `load_attribute` and `load_module`",
    "pipeline/extension.py": "extensions: those of this package, and of installed ones by their entry points",
    "pipeline/environment/load.py": "environments of the configuration",
    "pipeline/extensions/steps/source.py": "step environments of the configuration",
    "pipeline/extensions/atropos/native/child.py": "the class that the configuration names",
    "pipeline/scorer/runner.py": "the module of a rater that is loaded already, in its worker process",
    "pipeline/extensions/endpoint/function_program.py": "the function that the configuration names",
    "pipeline/extensions/reasoning_gym/datasets.py": "reasoning_gym, by constant names",
    "pipeline/tasks/packed_files.py": "pyarrow",
    "pipeline/tasks/rows.py": "readers of data sets, by constant names",
    "services/cli/commands.py": "the commands of the table",
    "services/supervisor/forkserver.py": "modules of a fixed table",
}
"""Files that import by a name that is computed, and where the name comes from."""
BY_NAME = {
    "pipeline/curriculum/logic/registry.py": "the configuration",
    "pipeline/normalizer/estimators/loader.py": "the configuration, or a promotion that it admits",
    "pipeline/scorer/loader.py": "the configuration, or a promotion that it admits",
    "pipeline/trainer/inputs/model_inputs.py": "the configuration",
}
"""Files that call the loader for an attribute."""
ROOT = Path(lachesis.schemas.__file__).parents[1]


def parts(kind: Any, seen: set[type]) -> None:
    """Add to `seen` each struct, tuple or data class that a type is made of, at any depth."""
    if isinstance(kind, type) and kind not in seen and (issubclass(kind, msgspec.Struct) or _has_fields(kind)):
        seen.add(kind)
        for inner in get_type_hints(kind).values():
            parts(inner, seen)
    for inner in get_args(kind):
        parts(inner, seen)


def _has_fields(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def is_free(hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType, list, tuple, set, frozenset, Annotated):
        return any(map(is_free, get_args(hint)))
    return hint in (Any, object, dict, list, msgspec.Raw) or (get_origin(hint) is dict and is_free(get_args(hint)[1]))


def test_every_struct_that_holds_values_of_any_kind_is_known() -> None:
    configured: set[type] = set()
    for root in (RunConfig, EnvironmentConfig, ConfigPolicy):
        parts(root, configured)
    configured |= {kind for kind in structs() if issubclass(kind, tuple(configured))}  # what extensions add to
    reached: set[type] = set()
    for kind in structs() - configured:
        parts(kind, reached)
    free = {named(kind) for kind in reached - configured if any(map(is_free, get_type_hints(kind).values()))}
    assert len(reached) > 300
    assert free == FREE_FIELDS.keys()


def calls(path: Path) -> Iterator[tuple[str, str, ast.Call]]:
    """Yield (receiver, name, call) of the calls in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                yield ast.unparse(node.func.value), node.func.attr, node
            elif isinstance(node.func, ast.Name):
                yield "", node.func.id, node


def files_calling(*wanted: tuple[str | None, str]) -> set[str]:
    """Return the files with a call of one of (receiver, name); a receiver of None is any."""
    found = set()
    for folder in ("schemas", "pipeline", "services"):
        for path in (ROOT / folder).rglob("*.py"):
            for receiver, name, _ in calls(path):
                if (receiver, name) in wanted or (None, name) in wanted:
                    found.add(path.relative_to(ROOT).as_posix())
    return found


@pytest.mark.slow
def test_every_import_by_a_computed_name_is_known() -> None:
    imports = [(None, name) for name in ("import_module", "__import__", "spec_from_file_location", "load_module",
                                         "run_path", "run_module", "exec_module", "load_source")]  # fmt: skip
    assert files_calling(*imports) == LOADERS.keys()
    assert files_calling((None, "load_attribute")) == BY_NAME.keys()


@pytest.mark.slow
def test_no_text_is_evaluated_and_nothing_is_unpickled() -> None:
    evaluated = [("", name) for name in ("eval", "exec", "compile", "execfile")]
    assert files_calling(*evaluated) == set()
    assert files_calling(*((name, call) for name in ("pickle", "marshal", "dill", "cloudpickle", "yaml", "joblib")
                           for call in ("load", "loads", "Unpickler"))) == set()  # fmt: skip
    for file in files_calling(("torch", "load")):
        assert all(
            any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in call.keywords)
            for receiver, name, call in calls(ROOT / file)
            if (receiver, name) == ("torch", "load")
        ), file


CODE = "planted_canary:run"
NAMES_OF_CODE = ("rater", "raters", "estimator", "strategy", "kind", "input", "scoring", "python", "module")


def planted(value: Any) -> Any:
    """Return a decoded message or state whose texts name code, and that holds settings that would load it."""
    if isinstance(value, dict):
        return {key: planted(one) for key, one in value.items()} | {
            name: CODE if name not in value else planted(value[name]) for name in NAMES_OF_CODE
        }
    if isinstance(value, list):
        return [planted(one) for one in value]
    return CODE if isinstance(value, str) else value


@pytest.mark.parametrize("every", [True, False])
def test_no_edge_loads_what_a_message_a_key_or_a_state_names(every: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reader of messages, keys, states of commits and requests is given such texts in all places, or in one."""
    loaded: list[str] = []
    load_module = user_code.load_module

    def noting(place: str, what: str) -> types.ModuleType:
        loaded.append(place)
        return load_module(place, what)

    monkeypatch.setattr(user_code, "load_module", noting)
    fed = 0
    for target in [*wire.targets(), *control.targets(), *state.targets(), *gateway.targets()]:
        for seed in target.seeds:
            try:
                value = msgspec.msgpack.decode(seed)
            except msgspec.DecodeError:
                continue
            if not isinstance(value, dict):
                continue
            texts = [key for key, one in value.items() if isinstance(one, str)]
            for changed in [planted(value)] if every else [{**value, key: CODE} for key in texts]:
                fed += 1
                with contextlib.suppress(*target.refusals):
                    target.feed(msgspec.msgpack.encode(changed))
    assert fed > 20
    assert [place for place in loaded if not place.startswith("lachesis.")] == []
