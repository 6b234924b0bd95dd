"""Checks of what `lachesis up` is to start.

That all it names is there, can be loaded and has what it needs.

`lachesis doctor` shows these findings and `lachesis up` refuses to start with one that fails, so the two agree.
"""

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

from lachesis.pipeline.common.doctor_finding import DoctorFinding, fail
from lachesis.pipeline.config.run import RunConfig
from lachesis.schemas.errors import ConfigError
from lachesis.services.preflight.first_model import find_changed_model
from lachesis.services.preflight.load_findings import LoadFinding, doctor_finding
from lachesis.services.preflight.loading import check_loads
from lachesis.services.preflight.machine import (
    alive_file,
    binary,
    budgets,
    interpreters,
    needed_extras,
    packages,
    webhook,
)
from lachesis.services.preflight.named_in_config import Problem, named_problems
from lachesis.services.preflight.otlp import check_otlp
from lachesis.services.preflight.ports import check_ports

__all__ = ["check_start", "machine_failures", "refuse_failures"]

_RENDERING = frozenset({"model", "tokenizer", "chat_template", "inference.policy.model"})
"""Settings without which no prompt can be rendered."""


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
    for changed in find_changed_model(config):
        yield changed
    found = named_problems(config)
    for problem in found:
        yield fail(problem.setting, problem.text, problem.mend)
    if config.environments and (load_always or not found):
        renders = prompts and not any(problem.setting in _RENDERING for problem in found)
        for finding in await check_loads(arguments, timeout_s=load_s, models=models, prompts=renders):
            if finding.state == "ok" or not any(_is_cause(problem, finding) for problem in found):
                yield doctor_finding(finding, config, load_s)


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
