"""Conformance suite for formats of model files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from toyexp.base.errors import RunFailed, UserError
from toyexp.base.formatting import format_value
from toyexp.base.ownership import Ledger
from toyexp.interfaces.format import Format, ModelExport
from toyexp.interfaces.model import Model
from toyexp.interfaces.recipe import Setup
from toyexp.interfaces.run import Run
from toyexp.plugins.exporter import Exporter, exporter
from toyexp.testing.null import NullEngine
from toyexp.testing.suites import Bare, PluginSuite, token_dataset
from toyexp.tokenizers.byte_level import Bytes

OURS = b"whoever wrote this wants to keep it"


class FormatSuite(PluginSuite):
    """Conformance suite of a file format.

    Set `form` to the format, `models` to models that it can store, and `unsupported` to models that it cannot store.
    """

    kind, part = "format", "form"
    form: Format
    models: Sequence[Model]
    unsupported: Sequence[Model] = ()

    def make_export(self, model: Model) -> ModelExport:
        """Return an export of `model` with random weights and metadata and, if it reads text, with a tokenizer."""
        tensors = {t.name: t.init.draw(t.shape, 7, t.name) + np.float32(0.01) for t in model.tensors()}
        tokenizer = Bytes() if model.reads.text else None
        return ModelExport(model, tensors, tokenizer, {"name": "kit", "step": 3})

    def callback(self) -> Exporter:
        """Return the callback that writes the format at the end of a run."""
        return exporter(type(self.form))(**vars(self.form))

    def test_its_types_are_valid_settings(self) -> None:
        """Each value of the option --type stands for settings that the format accepts."""
        self.form.check()
        for settings in self.form.types.values():
            assert type(self.form)(**settings).kind

    def test_a_written_model_is_read_back(self, tmp_path: Path) -> None:
        """Reading a written file gives the same model and tensors. Tensors stored as float32 are bit-identical.

        If toyexp cannot read the format, its method `read` must raise UserError.
        """
        if type(self.form).read is Format.read:
            with pytest.raises(UserError, match="not read"):
                self.form.read(tmp_path / "x", [])
            return
        for i, model in enumerate(self.models):
            exported, path = self.make_export(model), tmp_path / f"{i}{self.form.suffix}"
            self.form.check_model(model)
            assert self.form.write(exported, path) == []
            back = self.form.read(path, [type(m) for m in self.models])
            assert type(back.model) is type(model)
            _same_settings(back.model, model)
            assert back.tensors.keys() == exported.tensors.keys()
            for name, array in exported.tensors.items():
                assert back.tensors[name].dtype == np.float32
                if self.form.kind in ("f32", "float32"):
                    np.testing.assert_array_equal(back.tensors[name], array)
                else:
                    np.testing.assert_allclose(back.tensors[name], array, atol=0.1 * float(np.abs(array).max()))

    def test_equal_models_give_equal_files(self, tmp_path: Path) -> None:
        """Two files of the same model are identical: they hold no time stamp or random id."""
        for i, model in enumerate(self.models):
            first, second = (tmp_path / f"{i}-{name}{self.form.suffix}" for name in "ab")
            for path in (first, second):
                self.form.write(self.make_export(model), path)
            assert _content(first) == _content(second)

    def test_a_run_replaces_only_its_own_file(self, tmp_path: Path) -> None:
        """A later export replaces the run's own earlier file, but never a file that the run did not write."""
        for i, model in enumerate(self.models):
            directory = tmp_path / str(i)
            directory.mkdir()
            run, callback, path = _run(directory, model), self.callback(), directory / f"model{self.form.suffix}"
            callback.check()
            callback.check_plan(run.plan)
            _end(callback, run, step=2)
            first = _content(path)
            _end(callback, run, step=2)
            assert _content(path) == first
            assert [p.name for p in directory.iterdir() if p.name != "written.json"] == [path.name]
        foreign = tmp_path / "foreign"
        foreign.mkdir()
        (foreign / path.name).write_bytes(OURS)
        with pytest.raises(RunFailed, match="it exists"):
            _end(self.callback(), _run(foreign, self.models[0]), step=2)
        assert [(p.name, p.read_bytes()) for p in foreign.iterdir()] == [(path.name, OURS)]

    def test_unsupported_models_are_rejected_before_the_run(self, tmp_path: Path) -> None:
        """An unsupported model is rejected in one line that shows how to run without the format; nothing is written."""
        for model in self.unsupported:
            callback = self.callback()
            with pytest.raises(UserError) as refused:
                callback.check_plan(_run(tmp_path, model).plan)
            assert "\n" not in str(refused.value)
            assert f"'~callbacks.{callback.name}'" in str(refused.value)
        assert not list(tmp_path.iterdir())


def _run(directory: Path, model: Model) -> Run:
    dataset = token_dataset(16)
    plan = Bare().plan(model, Setup(dataset.batches(8, 2, 0).inputs, rows=2))
    return Run("kit", directory, 0, 4, 1e-3, {}, "null", plan, NullEngine().realize(plan), dataset,
               ledger=Ledger(directory))  # fmt: skip


def _end(callback: Exporter, run: Run, step: int) -> None:
    """Call the hooks of an export callback in the same way as a run that ends after `step`."""
    callback.on_start(run=run)
    callback.on_step(run=run, step=step)
    callback.on_end(run=run, reason="completed")


def _content(path: Path) -> object:
    return {p.name: p.read_bytes() for p in path.iterdir()} if path.is_dir() else path.read_bytes()


def _same_settings(loaded_model: Model, model: Model) -> None:
    """Assert that two models have equal settings; floats may differ by rounding in the file."""
    for name, value in model.settings().items():
        read = loaded_model.settings()[name]
        is_same = math.isclose(read, value, rel_tol=1e-6) if isinstance(value, float) else read == value
        assert is_same, f"{name}={format_value(read)} was {format_value(value)}"
