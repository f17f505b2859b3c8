"""A run can be resumed from any state of its directory that a kill may leave.

SIGKILL keeps the files and loses what is in memory. So the directory of a live run is copied when its files change, and
the run is resumed from the copy in this process, which is fast enough for every recipe, model and engine.
"""

import functools
import random
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from faults import FIGURES, STEPS, Trace, words

from toyexp.config.request import Request
from toyexp.plugins.compatibility import cells
from toyexp.plugins.discovery import load
from toyexp.training import checkpoint, experiment
from toyexp.training import rundir as run
from toyexp.training.resume import Complete
from toyexp.training.resume import load_resume_state as load_run

REGISTRY = load()
ENGINES = ("cpu", "ggml", "metal")
MODELS = ("llama", "qwen2", "qwen3", "gemma", "gpt2", "vit")  # other models are saved by the same code
CELLS = sorted(
    (cell.recipe, cell.model, engine)
    for cell in cells(REGISTRY)
    for engine in ENGINES
    if not cell.reason and cell.model in MODELS
)


@pytest.fixture(scope="module")
def configured(bench):
    """Return a function that builds the configuration of a cell; results are cached because Hydra is slow."""

    @functools.cache
    def build(recipe, model, engine):
        return Request([], REGISTRY).build_config(*words(recipe, model, engine))

    def configure(recipe, model, engine):
        cell, other = build(recipe, model, "ggml"), build("scratch", "llama", engine)
        plain = {**cell.plain, "engine": other.plain["engine"]}
        return replace(cell, engine=other.engine, engine_note=other.engine_note, plain=plain)

    return configure


def execute(cfg, directory, resume=False):
    callbacks = {name: replace(callback) for name, callback in cfg.callbacks.items()}
    prepared = experiment.prepare(replace(cfg, callbacks=callbacks))
    resumed = load_run(directory, prepared) if resume else None
    return experiment.execute(prepared, directory, resumed=resumed)


class Camera:
    """Copies of a run's directory, made at the `wanted` changes of its files, as a kill would leave it.

    A copy is delayed until `ready()`, since checkpoints lag behind the log by a varying number of steps.
    """

    def __init__(self, monkeypatch, directory, wanted, ready=lambda: True):
        self.images, self._directory, self._wanted, self._ready = [], directory, sorted(wanted), ready
        self.moments = 0
        self._copy_lock = threading.RLock()  # no file is renamed or removed during a copy
        for owner, name in ((run.os, "fsync"), (Path, "rename"), (Path, "replace"), (shutil, "rmtree")):
            monkeypatch.setattr(owner, name, self._wrap(getattr(owner, name), name))

    def _wrap(self, call, name):
        def wrapped(*args, **options):
            with self._copy_lock:
                self.moment()
                # A kill keeps all writes, synced or not.
                return None if name == "fsync" else call(*args, **options)

        return wrapped

    def moment(self):
        with self._copy_lock:
            if self._directory.is_dir():
                if self._wanted and self.moments >= self._wanted[0] and self._ready():
                    self._wanted.pop(0)
                    image = self._directory.with_name(f"image-{self.moments:03}")
                    shutil.copytree(self._directory, image)
                    self.images.append(image)
                self.moments += 1


def resume_image(cfg, image, expected):
    """Resume a copy and compare it with the uninterrupted run; return False if it has no checkpoint."""
    if not checkpoint.list_checkpoints(image / "checkpoints"):
        return False
    try:
        execute(cfg, image, resume=True)
    except Complete:  # the run was complete, except for removing its temporary directory
        assert Trace.read(image).events == expected.events
        return True
    assert Trace.read(image).events == expected.events
    assert {k: v for k, v in Trace.read(image).files.items() if k == checkpoint.ARRAYS} == {
        k: v for k, v in expected.files.items() if k == checkpoint.ARRAYS
    }
    assert not [p.name for p in image.iterdir() if p.name.endswith(".tmp")]
    assert not [p.name for p in (image / "checkpoints").iterdir() if p.name.startswith(".tmp")]
    return True


@pytest.fixture
def root(here):
    return here / "images"


def tier(recipe, model, engine):
    """Return the marks of a cell: `make test` runs each model once and each recipe on models of two kinds."""
    families = ("qwen2", "qwen3", "gemma")  # variants of llama
    if engine == "ggml":
        return [] if recipe == "scratch" or model not in families else [pytest.mark.release]
    if engine == "cpu" and model in ("llama", "vit"):
        return [] if recipe in ("scratch", "lora", "vit_tiny") else [pytest.mark.release]
    return [pytest.mark.faults]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "model", "engine"), [pytest.param(*cell, marks=tier(*cell)) for cell in CELLS])
def test_every_cell_resumes_from_a_random_moment(recipe, model, engine, configured, root, monkeypatch):
    cfg = configured(recipe, model, engine)
    directory = root / f"{recipe}-{model}-{engine}" / "run"
    moment = random.Random(f"{recipe}-{model}-{engine}").randint(20, 47)
    with monkeypatch.context() as patch:
        camera = Camera(patch, directory, {moment}, lambda: checkpoint.list_checkpoints(directory / "checkpoints"))
        execute(cfg, directory)
    assert camera.moments > 47
    expected = Trace.read(directory)
    assert [e["step"] for e in expected.events if e["kind"] == "step"] == list(range(1, STEPS + 1))
    with monkeypatch.context() as patch:
        patch.setattr(run.os, "fsync", lambda file: None)
        assert resume_image(cfg, camera.images[0], expected)
    FIGURES["crash images: resumed, one per recipe, model and engine"] += 1


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("recipe", "model"), [("scratch", "gpt2"), ("lora", "llama"), ("vit_tiny", "vit")])
def test_a_run_resumes_from_every_moment(recipe, model, configured, root, monkeypatch):
    cfg = configured(recipe, model, "ggml")
    directory = root / f"all-{recipe}-{model}" / "run"
    with monkeypatch.context() as patch:
        camera = Camera(patch, directory, range(1000))
        execute(cfg, directory)
    expected = Trace.read(directory)
    with monkeypatch.context() as patch:
        patch.setattr(run.os, "fsync", lambda file: None)
        resumed = [resume_image(cfg, image, expected) for image in camera.images]
    assert resumed == sorted(resumed), "after the first checkpoint, every state has one"
    FIGURES["crash images: all moments of a run, resumed"] += sum(resumed)
    FIGURES["crash images: before the first checkpoint"] += resumed.count(False)
