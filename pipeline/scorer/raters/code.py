"""Rates program code by running it against tests: the share of them that pass.

The code is an untrusted answer. Each test runs in a sandbox of its own (see `pipeline.scorer.sandbox`): without
network, with limited time, memory and output, and no file but the interpreter's. When a rating is there, no process of
the code is alive.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

import anyio

from lachesis.pipeline.scorer.answers.program import program_in
from lachesis.pipeline.scorer.rater import Rater, Sample
from lachesis.pipeline.scorer.sandbox import Sandbox, SandboxLimits
from lachesis.pipeline.tasks.assertions import called_names, imported_packages
from lachesis.pipeline.tasks.program_tests import program_tests
from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["CodeRater"]

_MAX_CODE_BYTES = 1 << 16


class CodeRater(Rater):
    """The code is the last program of the answer: of its Python blocks, else of those that compile (see `program`).
    Tests come from the task: `tests`, a list of {input, output} for a program that reads standard input, or of
    {assert}, lines of Python that are run after the code, or what data sets have instead of these (see
    `program_tests`). Assertions run in the interpreter that ran the code, so code that sets out to deceive them can;
    standard input and output leave it no way.

    `time_s` (of processor), `memory_mb` and `processes` hold for each test, all processes of it together, and
    `total_s`, of time and of processor time, for all of a sample: what goes beyond has failed, since that is the
    answer's own doing. With `packages` the code can import what is installed
    beside the interpreter, otherwise the standard library alone. `required` names what the machine must grant:
    "namespaces", "seccomp", "cgroups", "landlock" (`sandbox.PROTECTIONS`); without it the rater does not start.
    """

    name = "code"
    version = "5"
    bounds = (0.0, 1.0)

    def __init__(
        self,
        *,
        time_s: int = 2,
        total_s: int = 8,
        memory_mb: int = 512,
        processes: int = 16,
        packages: bool = False,
        required: Sequence[str] = ("namespaces", "seccomp"),
    ) -> None:
        if min(time_s, total_s, memory_mb, processes) < 1:
            raise ConfigError("rater code: time_s, total_s, memory_mb and processes must be at least 1.")
        self.needs_s = total_s + 1.0
        self._total_s = total_s
        limits = SandboxLimits(wall_s=total_s, cpu_s=time_s, memory_bytes=memory_mb << 20, processes=processes)
        self._packages = packages
        self._sandbox = Sandbox(limits, required=required, packages=packages)

    async def rate(self, sample: Sample) -> float | None:
        """Return the share of tests that pass; abstains if the task has none. Without code, 0.

        Raises `InfrastructureError` where the sandbox could not be set up this time.
        """
        given = sample.task.get("tests")
        if not given:
            return None
        try:
            tests = program_tests(given, sample.task)
            self._check_imports(tests)
        except ConfigError as error:
            raise DataError(f"item {sample.item}: {error}") from error
        called = set().union(*(called_names(test.get("assert", "")) for test in tests))
        code = program_in(sample.text, for_input=any("assert" not in test for test in tests), called=called)
        passed, left_s = 0, float(self._total_s)
        with anyio.move_on_after(self._total_s):
            for test in tests if code is not None else ():
                has_passed, used_s = await self._passes(str(code), test, left_s)
                passed += has_passed
                left_s -= used_s
                if left_s <= 0:
                    break
        return passed / len(tests)

    def _check_imports(self, tests: Sequence[Mapping[str, str]]) -> None:
        """Raise `ConfigError` where a test imports what its sandbox does not have: no program could pass."""
        for name in sorted(set().union(*(imported_packages(test.get("assert", "")) for test in tests))):
            if not self._packages:
                raise ConfigError(
                    f"a test of code imports {name!r:.60}, and the sandbox has the standard library alone: give the "
                    "rater packages = true, or tests without it"
                )
            if find_spec(name) is None:
                raise ConfigError(f"a test of code imports {name!r:.60}, which {sys.executable} does not have")

    async def _passes(self, code: str, test: Mapping[str, str], cpu_s: float) -> tuple[bool, float]:
        """Return whether a test has passed, and the seconds of processor time that it took."""
        # the seal is printed after the assertions: a program that exits early has not passed them
        seal = os.urandom(16).hex()
        program = code
        if "assert" in test:
            before = "" if "from __future__" in code else test.get("before", "")
            program = f"{before}\n{code}\n\n{test['assert']}\nprint({seal!r})\n"
        try:
            size, data = len(code.encode()), program.encode()
        except UnicodeEncodeError:  # half a character is no program
            return False, 0.0
        if size > _MAX_CODE_BYTES:
            return False, 0.0
        output, used_s = await self._sandbox.run_within(data, test.get("input", "").encode(), cpu_s)
        if output is None:
            return False, used_s
        if "assert" in test:
            return output.rstrip().endswith(seal), used_s
        return output.split() == test["output"].split(), used_s
