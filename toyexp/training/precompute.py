"""Arrays that an objective computes once for each row of the data, such as the log-probabilities of a reference.

They are computed before training and kept in the user's cache directory, so that later runs read them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np

from toyexp.base.attribution import attribute_errors
from toyexp.base.errors import UserError
from toyexp.base.files import open_file
from toyexp.base.formatting import format_bytes
from toyexp.base.memory import available_bytes
from toyexp.base.ownership import cached_fingerprint
from toyexp.base.user_paths import cache_dir
from toyexp.base.writing import write_atomically
from toyexp.formats.file_plan import frozen_plan
from toyexp.interfaces.dataset import Batch, Batches, ChangedBatches
from toyexp.interfaces.objective import CrossEntropy
from toyexp.interfaces.plan import Plan
from toyexp.interfaces.recipe import Setup, start_session
from toyexp.interfaces.session import Session
from toyexp.reference.engine import ReferenceOps
from toyexp.training.memory import open_checked_session
from toyexp.training.run_config import Prepared


class PrecomputedBatches(ChangedBatches):
    """Batches with the precomputed arrays of their rows, which are found by a digest of the row."""

    def __init__(self, batches: Batches, plan: Plan):
        self._who = f"objective={plan.objective.name}"
        super().__init__(batches, plan.inputs)
        self._specs = plan.objective.precomputed(plan.inputs)
        data = {name for name, spec in plan.inputs.items() if not spec.optional}
        self._names = sorted(data - {"weights"})
        self._rows: dict[bytes, dict[str, np.ndarray]] = {}  # by digest

    def _change(self, batch: Batch, k: int | None) -> Batch:
        rows = [self._rows[key] for key in self.keys(batch)]
        return {**batch, **{name: np.stack([row[name] for row in rows]) for name in self._specs}}

    def keys(self, batch: Batch) -> list[bytes]:
        """Return a digest of each row."""
        rows = zip(*(batch[name] for name in self._names), strict=True)
        return [hashlib.blake2b(b"".join(x.tobytes() for x in row), digest_size=16).digest() for row in rows]

    def rows_without(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return the rows of `batch` that have no precomputed arrays, each once; {} if there are none."""
        rows = {key: i for i, key in enumerate(self.keys(batch)) if key not in self._rows}
        return {name: batch[name][[*rows.values()]] for name in self._names} if rows else {}

    def add(self, keys: Sequence[bytes], values: Mapping[str, np.ndarray]) -> None:
        """Add the arrays `values` of rows with these digests. Raise UserError for a wrong shape, NaN or infinity."""
        columns = {}
        for name, spec in self._specs.items():
            array, expected = np.asarray(values[name]), (len(keys), *spec.shape)
            if array.shape != expected:
                raise UserError(f"{self._who}: {name} is {list(array.shape)}, expected {list(expected)}")
            if not np.isfinite(array).all():
                raise UserError(f"{self._who}: {name} contains NaN or infinity")
            columns[name] = array.astype(spec.dtype)
        self._rows |= {key: {name: column[i] for name, column in columns.items()} for i, key in enumerate(keys)}

    def load(self, path: Path) -> None:
        """Read the arrays of an earlier run, if the file exists and is intact."""
        damaged = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, UserError)
        with contextlib.suppress(*damaged), open_file(path) as file, np.load(file, allow_pickle=False) as stored:
            self.add([key.tobytes() for key in stored["rows"]], stored)

    def save(self, path: Path) -> None:
        """Write all arrays to the cache; do nothing if that fails."""
        rows = np.frombuffer(b"".join(self._rows), np.uint8).reshape(-1, 16)
        with contextlib.suppress(OSError, ValueError):  # ValueError: no row is complete
            path.parent.mkdir(parents=True, exist_ok=True)
            with write_atomically(path) as temporary:
                arrays = {name: np.stack([row[name] for row in self._rows.values()]) for name in self._specs}
                np.savez(temporary, allow_pickle=False, rows=rows, **arrays)


def precompute_arrays(
    prepared: Prepared, say: Callable[[str], None], first: int = 0, log_file: Path | None = None
) -> Batches:
    """Return the run's batches with the arrays that its objective computes before training, from step `first` on.

    Arrays that the cache does not have are computed with a session of their own, which is closed afterwards. `say`
    prints a note then. Errors of plugins name `log_file`.
    """
    plan, objective, source = prepared.plan, prepared.plan.objective, prepared.batches
    if not objective.precomputed(plan.inputs):
        return source
    batches, session = PrecomputedBatches(source, plan), None
    with contextlib.ExitStack() as stack:
        if model_file := objective.model_file():
            digest = cached_fingerprint(model_file)
        else:
            session = stack.enter_context(_open_session(prepared, log_file))
            digest = _digest_weights(session)
        path = _cache_path(prepared, digest)
        if path:
            batches.load(path)
        steps, is_complete = range(first, prepared.config.settings.steps), True
        try:
            for batch in itertools.chain(source.held_out(), map(source.batch, steps)):
                rows = batches.rows_without(batch)
                if not rows:
                    continue
                if is_complete:
                    is_complete = False
                    say(_announce(prepared, len(steps)))
                session = session or stack.enter_context(_open_session(prepared, log_file))
                log_probs = ReferenceOps().log_softmax(session.logits(rows))
                with attribute_errors(f"objective.{objective.name}", "in precompute()", log_file):
                    batches.add(batches.keys(rows), objective.precompute(log_probs, rows))
        finally:
            if path and not is_complete:
                batches.save(path)
    return batches


def _announce(prepared: Prepared, steps: int) -> str:
    """Return a note about the arrays to compute. Raise UserError if those of an epoch exceed the free memory."""
    plan, rows_per_epoch = prepared.plan, prepared.batches.rows_per_epoch
    specs, count = plan.objective.precomputed(plan.inputs), steps * plan.rows * plan.accumulate
    count = min(count, rows_per_epoch or count)
    needed = count * sum(np.dtype(spec.dtype).itemsize * math.prod(spec.shape) for spec in specs.values())
    free, who, names = available_bytes(), f"objective={plan.objective.name}", " and ".join(specs)
    if free is not None and needed > free:
        problem = f"{names} of {count} rows need {format_bytes(needed)}, but {format_bytes(free)} are free"
        raise UserError(f"{who}: too little memory: {problem}; train fewer steps, or change the objective's settings")
    return f"note    {who}: computing {names} for each row before training; later runs use the cache"


def _open_session(prepared: Prepared, log_file: Path | None) -> AbstractContextManager[Session]:
    """Open a session of the model whose log-probabilities `Objective.precompute` reads, with all tensors frozen."""
    config, plan, objective = prepared.config, prepared.plan, prepared.plan.objective
    specs = objective.precomputed(plan.inputs)
    inputs = {name: spec for name, spec in plan.inputs.items() if name not in specs}
    inputs["weights"] = replace(inputs["weights"], shape=inputs["targets"].shape)  # as cross-entropy needs them
    if model_file := objective.model_file():
        fixed = frozen_plan(objective.second_model, model_file, Setup(inputs, plan.rows))
        return open_checked_session(fixed, config.engine, str(model_file), "lower batch_size")
    tensors = tuple(replace(t, trainable=False) for t in plan.tensors)
    fixed = replace(plan, tensors=tensors, inputs=inputs, groups=(), accumulate=1, objective=CrossEntropy())
    return start_session(config.recipe, config.engine, fixed, directory=log_file and log_file.parent)


def _digest_weights(session: Session) -> str:
    """Return a digest of the values of all tensors of the session."""
    digest = hashlib.sha256()
    for tensor in session.plan.tensors:
        digest.update(tensor.name.encode() + session.download(tensor.name).tobytes())
    return digest.hexdigest()


def _cache_path(prepared: Prepared, model: str) -> Path | None:
    """Return the cache file of the arrays that the model with the digest `model` gives; None without a cache."""
    plan, folder = prepared.plan, cache_dir()
    names = type(plan.objective).__qualname__, plan.objective.precomputed(plan.inputs), prepared.config.engine
    key = hashlib.sha256(repr((model, prepared.model, names)).encode()).hexdigest()[:32]
    return folder and folder / f"precomputed-{key}.npz"
