"""The command line with a trainer that writes down each batch it takes and, if set to, stops inside a step.

`STOP_IN` names the batch: its optimizer has moved the weights, and the checkpoint before it has been written beside it,
when the process writes "inside step" and waits for ever.
"""

import hashlib
import os
import threading
import time
from pathlib import Path

import msgspec
import torch

from lachesis.pipeline.ledger.checkpoint_state import latest_checkpoint
from lachesis.pipeline.trainer import torch_backend
from lachesis.pipeline.trainer.learner import Learner
from lachesis.services.cli import main

folder = Path(os.environ["TRAINER_FOLDER"])
stop_in = int(os.environ.get("STOP_IN", "-1"))
train_batch, step = torch_backend.train_batch, Learner.step


def noting_batch(learner, batch, *args, **kwargs):
    digest = hashlib.sha256(msgspec.msgpack.encode(batch.batch)).hexdigest()
    with (folder / "manifests").open("a") as file:
        file.write(f"{batch.batch.number} {digest}\n")
    return train_batch(learner, batch, *args, **kwargs)


def stepping(learner, batch):
    if learner.steps != stop_in:
        return step(learner, batch)
    moves = learner.optimizer.step

    def move_and_stay():
        before = [parameter.detach().clone() for parameter in learner.model.parameters()]
        moves()
        changed = any(not torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))
        while latest_checkpoint(folder / "checkpoints") is None:
            time.sleep(0.01)
        partial = folder / ".inside"
        partial.write_text(f"inside step, weights {'moved' if changed else 'as before'}")
        partial.rename(folder / "inside")
        threading.Event().wait()

    learner.optimizer.step = move_and_stay
    return step(learner, batch)


torch_backend.train_batch = noting_batch
Learner.step = stepping
if __name__ == "__main__":
    main()
