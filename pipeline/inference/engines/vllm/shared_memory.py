"""Lets vLLM compute with the trainer's own weights in shared memory (one copy for both).

It takes a pointer to the segment and a policy version. Guarantees: nothing of the segment is served until every tensor
of the checkpoint is in it with its shape and dtype, the digest of the content is the version's, the rotary embedding is
the trainer's, and every parameter has, to the bit, the values that vLLM's own loader makes of the segment's tensors.
Afterwards no parameter is left outside of the segment, none is a meta tensor, and nothing in the model holds its
parameters' former memory. A forward pass computes with the version that was named to the server, from its first layer
to its last, or ends the process: the trainer cannot change the weights meanwhile, and weights that have changed since
are not served under the old name. Runs inside vLLM's process.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from lachesis.pipeline.model.segment_layout import SegmentTensor, rope_of
from lachesis.pipeline.model.shared_memory import SegmentReader, read_pointer
from lachesis.pipeline.model.tensors import check_coverage, matches
from lachesis.schemas.errors import DataError
from lachesis.schemas.ids import PolicyVersion

__all__ = ["SharedModel", "guard_worker"]

log = logging.getLogger("vllm.lachesis")


_UNNAMED = -1
"""Count of changes that no weights have: what was attached and not yet named is not computed with."""


class _Served:
    """The segment that this process serves, if any, as it was when its version was named."""

    reader: SegmentReader | None = None
    changes = 0


_served = _Served()


class SharedModel:
    """vLLM's model, attached to a segment or not. `load` copies tensors into it as vLLM itself does."""

    def __init__(
        self,
        vllm_config: Any,
        model: torch.nn.Module,
        expected: dict[str, torch.Tensor],
        load: Callable[[dict[str, torch.Tensor]], None],
    ) -> None:
        self._model = model
        self._expected = expected
        self._load = load
        self._rope = rope_of(vllm_config.model_config.hf_text_config)
        self._eager = vllm_config.model_config.enforce_eager
        self._reader: SegmentReader | None = None
        self._changes: int | None = None

    def drop_update(self) -> None:
        """Forget an update that was not finished."""
        self._changes = None

    def update(self, pointer: Path, version: PolicyVersion) -> None:
        """Check that the segment holds `version`, and attach to it first if it is another than before.

        Raises `DataError` or `NotFoundError`, with the model as it was, when it cannot be served.
        """
        if self._reader is None or self._reader.pointer != read_pointer(pointer):
            reader = SegmentReader(pointer)
            reader.check_version(version)
            with reader.reading():
                self._check(reader, version)
                self._attach(reader)
            self._reader, _served.reader, _served.changes = reader, reader, _UNNAMED
        self._changes = self._reader.check_version(version)

    def finish_update(self) -> None:
        """Serve the segment that `update` found."""
        if self._changes is not None:
            _served.reader, _served.changes, self._changes = self._reader, self._changes, None

    def detach(self) -> None:
        """Give the model memory of its own again, with the weights that it has."""
        if self._reader is not None:
            for parameter in self._model.parameters():
                parameter.data = parameter.data.clone()
            self._reader = _served.reader = None

    def _check(self, reader: SegmentReader, version: PolicyVersion) -> None:
        tensors, where = reader.tensors, f"the shared memory of generation {reader.generation[:8]}"
        forms = {place.name: place.dtype for place in reader.header.tensors}
        others = [f"{name} is {dtype}" for name, dtype in forms.items() if dtype != "float32"]
        others += [
            f"{name} is served in {str(held.dtype).removeprefix('torch.')}"
            for name, held in self._model.named_parameters()
            if held.dtype != torch.float32
        ]
        if others:
            raise DataError(
                f"{where} is float32, and so must be what is computed with it (--dtype float32); "
                f"{len(others)} of another dtype: {', '.join(others[:5])}"
            )
        if reader.on_gpu and not self._eager:
            raise DataError(
                f"{where} is on a GPU, and vLLM has captured graphs that would go on reading its own weights: set "
                'inference.policy.args = ["--enforce-eager"]'
            )
        check_coverage(tensors, self._expected, where)
        if reader.header.rope != self._rope:
            raise DataError(
                f"{where} is of a model with the rotary embedding {reader.header.rope}, vLLM was started with "
                f"{self._rope}: give it the model that is trained."
            )
        if not matches(tensors, version):
            raise DataError(f"{where} does not have the digest of policy version {version}.")

    def _attach(self, reader: SegmentReader) -> None:
        """Let every parameter be its view of the segment. Raises `DataError` with the parameters as they were."""
        views = {name: reader.view(sources[0].offset, held.shape) for name, sources, held in self._sources(reader)}
        before = {name: held.data for name, held in self._model.named_parameters()}
        blank = {name: torch.full_like(data, torch.nan) for name, data in before.items()}
        try:
            for name, held in self._model.named_parameters():
                held.data = blank[name]
            self._load(reader.tensors)
            loaded = dict(self._model.named_parameters())
            _check_loaded(loaded, views)
        except BaseException:
            for name, held in self._model.named_parameters():
                held.data = before[name]
            raise
        private = [*before.values(), *blank.values(), *(held.data for held in loaded.values())]
        for name, held in loaded.items():
            held.data = views[name]
        if left := sorted(_left_outside(self._model, reader, private)):
            _die(f"{len(left)} tensors are not in shared memory: {', '.join(left[:5])}")
        log.info("%d parameters are in shared memory, generation %s", len(views), reader.generation[:8])

    def _sources(self, reader: SegmentReader) -> Iterator[tuple[str, list[SegmentTensor], torch.Tensor]]:
        """Yield each parameter with the segment's tensors that make up its rows.

        Raises `DataError` that names parameters without a source, and tensors that are part of no parameter.
        """
        joined: dict[str, list[str]] = getattr(self._model, "packed_modules_mapping", {})
        places, unused, orphans, found = reader.places, set(reader.places), [], []
        for name, held in self._model.named_parameters():
            *path, module, kind = name.split(".")
            names = [".".join([*path, source, kind]) for source in joined.get(module, [module])]
            if names == ["lm_head.weight"] and names[0] not in places:
                names = [part for part in places if part.endswith("embed_tokens.weight")]
            sources = [places[part] for part in names if part in places]
            if not sources or len(sources) < len(names) or not _side_by_side(sources, held):
                orphans.append(name)
            unused -= set(names)
            found.append((name, sources, held))
        if orphans or unused:
            raise DataError(
                f"the model's layout is none that can be shared: {len(orphans)} parameters of vLLM are not rows that "
                f"lie side by side ({', '.join(orphans[:5])}), {len(unused)} tensors are part of none "
                f'({", ".join(sorted(unused)[:5])}). Use weights.transport = "files".'
            )
        yield from found


def _die(reason: str) -> NoReturn:
    log.critical("%s; ending vLLM", reason)
    logging.shutdown()
    os._exit(1)


def guard_worker(worker: type) -> None:
    """Let vLLM's `worker` compute only with weights whose version was named to its server.

    Meanwhile the trainer cannot change them. vLLM ends where they have changed.
    """
    for name in ("execute_model", "sample_tokens"):
        setattr(worker, name, _guarded(getattr(worker, name)))


def _guarded(compute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compute)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if _served.reader is None:
            return compute(*args, **kwargs)
        reader = _served.reader
        with reader.reading() as (changes, version):
            if not reader.is_alive():
                _die("the trainer whose memory the weights are in has ended: its next start shares them again")
            if changes != _served.changes:
                now = version or "in between two versions"
                _die(
                    f"the trainer has changed the weights in shared memory (now {now}) while this server was not "
                    "paused: what it would sample has no known policy"
                )
            computed = compute(*args, **kwargs)
            if reader.on_gpu:
                torch.cuda.synchronize()  # what was only queued reads the weights after this
            return computed

    return guarded


def _check_loaded(loaded: dict[str, torch.nn.Parameter], views: dict[str, torch.Tensor]) -> None:
    """Raise `DataError` unless vLLM's loader makes of the segment's tensors the same values."""
    wrong = [name for name in views if name not in loaded or not torch.equal(loaded[name].data, views[name])]
    wrong += sorted(loaded.keys() - views.keys())
    if wrong:
        raise DataError(
            f"vLLM's own loader makes something else of {len(wrong)} parameters than lies in shared memory: "
            f"{', '.join(wrong[:5])}"
        )


def _side_by_side(sources: list[SegmentTensor], held: torch.Tensor) -> bool:
    """Return whether `held` is these tensors, one below the other, and perhaps rows of padding behind the last."""
    first, last, end = sources[0], sources[-1], sources[0].offset
    for place in sources:
        if place.offset != end or place.shape[1:] != list(held.shape[1:]):
            return False
        end += place.reserved
    rows = sum(place.shape[0] for place in sources)
    padded = last.reserved > torch.Size(last.shape).numel() * 4
    fits = held.shape[0] == rows or (padded and held.shape[0] > rows)
    return fits and held.is_contiguous() and first.offset + held.nbytes <= end


def _left_outside(model: torch.nn.Module, reader: SegmentReader, private: list[torch.Tensor]) -> Iterator[str]:
    """Yield parameters outside of the segment, meta tensors, and holders of parameters' `private` memory."""
    owned = {
        tensor.untyped_storage().data_ptr() for tensor in private if tensor.numel() and not reader.contains(tensor)
    }
    for name, held in model.named_parameters(remove_duplicate=False):
        if held.is_meta or not reader.contains(held):
            yield name
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            yield name
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if (
                    isinstance(tensor, torch.Tensor)
                    and not tensor.is_meta
                    and tensor.untyped_storage().data_ptr() in owned
                ):
                    yield f"{path}.{attribute}"
