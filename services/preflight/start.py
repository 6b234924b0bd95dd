"""Checks of what `lachesis up` is to start.

That all it names is there, can be loaded and has what it needs.

`lachesis doctor` shows these findings and `lachesis up` refuses to start with one that fails, so the two agree.
"""

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

from lachesis.pipeline.common.doctor_finding import DoctorFinding, fail, ok, warn
from lachesis.pipeline.config.run import RunConfig
from lachesis.schemas.errors import ConfigError
from lachesis.services.preflight.first_model import changed_model
from lachesis.services.preflight.loading import LoadFinding, check_loads
from lachesis.services.preflight.machine import (
    alive_file,
    binary,
    budgets,
    interpreters,
    needed_extras,
    packages,
    webhook,
)
from lachesis.services.preflight.named import Problem, named_problems
from lachesis.services.preflight.otlp import check_otlp
from lachesis.services.preflight.ports import check_ports

__all__ = ["check_start", "machine_failures", "refuse_failures"]

_RENDERING = frozenset({"model", "tokenizer", "chat_template", "inference.policy.model"})
"""Settings without which no prompt can be rendered."""

_MEND_BY_CHECK = {
    "tried": "correct the rater or the environment that it names: groups without scores are not trained on",
    "prompts": "correct the prompts, chat_template_kwargs, or the template",
}


async def check_start(
    config: RunConfig,
    arguments: Sequence[str],
    *,
    load_s: float,
    load_always: bool = False,
    models: bool = False,
    prompts: bool = False,
) -> AsyncIterator[DoctorFinding]:
    """Yield every finding.

    `load_s`: seconds after which environments and raters that still load are left alone. They are loaded if nothing
    that the configuration names is missing; with `load_always` also if something is, since user code takes its time
    and a wrong path should be reported at once. `models` and `prompts`: as in `write_findings`.
    """
    if not config.environments:
        yield fail(
            "environments",
            "empty, so nothing would be generated",
            "add [environments.NAME] with its kind, or name the file that has them with --config",
        )
    for changed in changed_model(config):
        yield changed
    found = named_problems(config)
    for problem in found:
        yield fail(problem.setting, problem.text, problem.mend)
    if config.environments and (load_always or not found):
        renders = prompts and not any(problem.setting in _RENDERING for problem in found)
        for finding in await check_loads(arguments, timeout_s=load_s, models=models, prompts=renders):
            if finding.state == "ok" or not any(_is_cause(problem, finding) for problem in found):
                yield _loaded(finding, config, load_s)


def machine_failures(config: RunConfig) -> Iterator[DoctorFinding]:
    """Yield what of this machine keeps the run from starting, if its own server does not run yet."""
    checks = [*packages(needed_extras(config)), binary(config), budgets(config), *check_ports(config), *webhook(config)]
    checks += [*alive_file(config), *interpreters(config), *check_otlp(config)]
    yield from (finding for finding in checks if finding.level == "FAIL")


def refuse_failures(findings: Iterable[DoctorFinding]) -> None:
    """Raise `ConfigError` that says what failed, and how to fix each."""
    failed = [f"{one.check}: {one.text}\n    mend: {one.mend}" for one in findings if one.level == "FAIL"]
    if failed:
        raise ConfigError("the run cannot start:\n  " + "\n  ".join(failed))


def _is_cause(problem: Problem, finding: LoadFinding) -> bool:
    """Whether something could not be loaded because what names it is wrong, which is reported already."""
    table = problem.setting.partition(".raters[")[0].removesuffix(".kind").removesuffix(".estimator")
    shared = table in {"scoring", "advantage"} and finding.setting.endswith(f".{table}")
    served = finding.setting.startswith("inference.") and table.rpartition(".")[2] == "model"
    return finding.setting == table or shared or served


def _loaded(finding: LoadFinding, config: RunConfig, load_s: float) -> DoctorFinding:
    setting = finding.setting
    if finding.state == "ok":
        return ok(setting, f"{finding.text} (loaded in {finding.seconds:.1f} s)")
    if finding.state == "late" and ", " in setting:
        mend = "see with `lachesis env verify` what takes so long; nothing after it was looked at"
        return warn(setting, f"did not end within {load_s:g} s", mend)
    if finding.state == "late":
        ready_s = config.services.ready_s
        return warn(
            setting,
            f"still loading after {load_s:g} s; a service has {ready_s:g} s to become ready (services.ready_s)",
            "load it by hand to see how long it takes, and raise services.ready_s if it takes longer",
        )
    if finding.state == "doubtful":
        return warn(setting, finding.text, _mend(setting))
    return fail(setting, finding.text, _mend(setting))


_MEND_BY_TABLE = {
    "inference": 'choose a causal language model that transformers runs, or serve it by inference.ROLE.kind = "vllm"',
    "training": "correct {0}, or leave it out: metrics.jsonl holds every figure in any case",
    "curriculum": "correct {0}, or the code that it names",
    "devices": 'leave it out, or set it to "auto"; or start the run where that GPU is',
}


def _mend(setting: str) -> str:
    _, _, checked = setting.partition(", ")
    table = setting.partition(".")[0]
    if checked:
        return _MEND_BY_CHECK[checked]
    if setting.rpartition(".")[2] == "model":
        return f"set {setting} to a whole model, or correct what the finding names"
    if table in _MEND_BY_TABLE:
        return _MEND_BY_TABLE[table].format(setting)
    if setting.endswith("scoring"):
        return f"correct {setting}.raters, or the code that they name"
    return f"correct {setting}.params, or the code that {setting}.kind names"
