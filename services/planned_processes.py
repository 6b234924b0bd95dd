"""The processes that a run consists of, by its configuration, in the order in which they start. Pure."""

from dataclasses import dataclass

from lachesis.pipeline.config.evaluation_sources import evaluated_environments
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.config.shared_processes import joined_name, services_in
from lachesis.pipeline.extension import call_each
from lachesis.services.registry import find

__all__ = ["PlannedProcess", "planned_processes", "planned_services"]


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    """One process to run. `finite` ones end by themselves when the run's work is done.

    `service`: of a process that several share, the name of all.
    """

    name: str
    service: str
    part: str
    phase: int
    replica: int = 1
    finite: bool = False

    @property
    def services(self) -> tuple[str, ...]:
        """The services that run in it."""
        return services_in(self.service)

    @property
    def speakers(self) -> tuple[str, ...]:
        """The names under which its services send heartbeats."""
        return (f"{self.service}-{self.part}",) if self.part else self.services


def planned_processes(config: RunConfig) -> list[PlannedProcess]:
    """Return the processes of a run, in the order in which they start."""
    train = config.mode == "train"
    finite = train and config.training.steps is not None
    rows: list[tuple[str, str, int, bool]] = [("governor", "", 1, False), ("batcher", "", 1, False)]
    rows += [("normalizer", "", 1, False), ("curriculum", "", 1, False)]
    rows += [("health", "", 1, False)] * config.health.enabled
    rows += [("scorer", "", config.services.scorers, False)]
    if config.teacher.enabled:
        rows += [("teacher", "", config.services.teachers, False)]
    if train:
        rows += [("trainer", "", 1, finite)]
    evaluated = bool(evaluated_environments(config))
    roles = ["policy"] + config.teacher.roles(config.environments) * config.teacher.enabled + ["eval"] * evaluated
    rows += [("inference", role, 1, False) for role in dict.fromkeys(roles) if config.role(role).url is None]
    own = [name for name, env in config.environments.items() if not env.is_foreign]
    for further in call_each("plan", config):
        rows += [(service, part, 1, False) for service, part in further]
    rows += [("environment", env, config.services.environments, False) for env in own]
    rows += [("evaluator", "", 1, finite)] * evaluated
    planned = []
    for service, part, replicas, ends in rows:
        phase = find(service).phase
        for replica in range(replicas):
            name = "-".join(filter(None, (service, part, str(replica + 1) if replicas > 1 else "")))
            planned.append(PlannedProcess(name, service, part, phase, replica + 1, ends))
    for names in config.services.together:
        planned = _put_together(planned, names)
    return sorted(planned, key=lambda process: process.phase)


def _put_together(planned: list[PlannedProcess], names: list[str]) -> list[PlannedProcess]:
    """Return the processes with one for all of these services that the run has."""
    rows = [row for row in planned if row.service in names]
    if len(rows) < 2:
        return planned
    name = joined_name(row.service for row in rows)
    shared = PlannedProcess(name, name, "", max(row.phase for row in rows))
    return [shared, *(row for row in planned if row not in rows)]


def planned_services(config: RunConfig) -> set[str]:
    """Return the names under which the services of a run send heartbeats."""
    return {name for row in planned_processes(config) for name in row.speakers}
