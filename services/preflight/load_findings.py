"""Defines the finding of loading one setting, and turns it into what `lachesis doctor` shows."""

from typing import Literal

import msgspec

from lachesis.pipeline.common.doctor_finding import DoctorFinding, fail, ok, warn
from lachesis.pipeline.config.run import RunConfig

__all__ = ["LoadFinding", "doctor_finding"]

_MEND_BY_CHECK = {
    "tried": "correct the rater or the environment that it names: groups without scores are not trained on",
    "prompts": "correct the prompts, chat_template_kwargs, or the template",
}
_MEND_BY_TABLE = {
    "inference": "choose a causal language model that transformers runs, or serve it by another inference.ROLE.kind",
    "training": "correct {0}, or leave it out: metrics.jsonl holds every figure in any case",
    "curriculum": "correct {0}, or the code that it names",
    "devices": 'leave it out, or set it to "auto"; or start the run where that GPU is',
}


class LoadFinding(msgspec.Struct, frozen=True, kw_only=True):
    """What became of loading what `setting` names. begun: it has not ended yet; late: it did not end in time; doubtful:
    it is loaded, and failed on every answer that it was tried on."""

    setting: str
    state: Literal["begun", "ok", "failed", "late", "doubtful"]
    text: str = ""
    seconds: float = 0.0


def doctor_finding(finding: LoadFinding, config: RunConfig, load_s: float) -> DoctorFinding:
    """Return what `lachesis doctor` shows of it; `load_s`: seconds after which it was left alone."""
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
