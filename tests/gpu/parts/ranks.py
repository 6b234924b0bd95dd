"""Two ranks of a trainer on one GPU: refused before NCCL refuses them, and over gloo the same weights as one rank."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from gpu.figures import check, figure
from gpu.models import DEVICE
from safetensors.torch import load_file

from lachesis.pipeline.config.run import TrainingConfig
from lachesis.pipeline.trainer.ranks.place import RankPlace, rank_device
from lachesis.schemas.errors import ConfigError

__all__ = ["measure"]

_SCRIPT = Path(__file__).parents[2] / "unit" / "trainer" / "ranks" / "one_rank.py"
_FIRST = [[0, [19, 12, 16], 0.5], [1, [9, 6], 1.0], [2, [11, 5, 7, 8], 0.7]]
_SECOND = [[3, [17, 17], 0.4], [4, [6, 9, 30], 0.9]]


def measure(*, small: bool) -> None:
    """Train the same batches in one process and in two."""
    del small
    gpus = max(1, torch.cuda.device_count())
    try:
        rank_device(TrainingConfig(device="cuda"), RankPlace(size=gpus + 1), gpus)
    except ConfigError as error:
        check("more ranks than GPUs are refused by name", "NCCL refuses two ranks" in str(error), str(error))
    else:
        check("more ranks than GPUs are refused by name", ok=False)
    precision = {"learning_rate": 1e-3, "warmup_steps": 0, "precision": "float32"}
    case = {"learner": precision, "before": [_SECOND], "batches": [_FIRST, _SECOND], "device": DEVICE}
    with tempfile.TemporaryDirectory(prefix="lachesis ranks ") as folder:
        alone, both = (_train(Path(folder) / str(ranks), ranks, {"case": case}) for ranks in (1, 2))
    moved = max(float((alone[name] - both[name]).abs().max()) for name in alone if name.startswith("weights/"))
    figure(f"two ranks over gloo beside one on {DEVICE}, weights apart at most", moved, "")
    check(f"two ranks over gloo train as one does on {DEVICE}", moved < 1e-4, f"{moved:.2g}")


def _train(folder: Path, ranks: int, cases: object) -> dict[str, torch.Tensor]:
    folder.mkdir()
    command = [sys.executable, str(_SCRIPT)]
    running = [
        subprocess.Popen([*command, str(rank), str(ranks), str(folder), json.dumps(cases)]) for rank in range(ranks)
    ]
    codes = [process.wait() for process in running]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}: their lines above say why")
    return load_file(folder / "case.safetensors")
