"""Every moment of a run at which its process may die leaves a directory that it goes on from.

SIGKILL leaves the files as they are, and takes away what was only in memory. So the directory of a live run is copied
at moments when it changes, and the run is resumed from the copy, in this process, which is fast enough for every cell
of the matrix.
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
CELLS = sorted((cell.recipe, cell.model, engine) for cell in cells(REGISTRY) for engine in ENGINES if not cell.reason)


@pytest.fixture(scope="module")
def configured(bench):
    """The configuration of a cell; Hydra takes longer than a tiny run, and composes each part once."""

    @functools.cache
    def built(recipe, model, engine):
        return Request([], REGISTRY).build_config(*words(recipe, model, engine))

    def configure(recipe, model, engine):
        cell, other = built(recipe, model, "ggml"), built("scratch", "llama", engine)
        plain = {**cell.plain, "engine": other.plain["engine"]}
        return replace(cell, engine=other.engine, engine_note=other.engine_note, plain=plain)

    return configure


def execute(cfg, directory, resume=False):
    fresh = {name: replace(callback) for name, callback in cfg.callbacks.items()}
    prepared = experiment.prepare(replace(cfg, callbacks=fresh))
    resumed = load_run(directory, prepared) if resume else None
    return experiment.execute(prepared, directory, resumed=resumed)


class Camera:
    """Copies a run's directory at the moments when its files change, one in so many, as a kill would leave it.

    A wanted moment waits until `ready`: how far checkpoints are behind the log differs from run to run.
    """

    def __init__(self, monkeypatch, directory, wanted, ready=lambda: True):
        self.images, self._directory, self._wanted, self._ready = [], directory, sorted(wanted), ready
        self.moments = 0
        self._still = threading.RLock()  # nothing is renamed or removed while it is copied
        for place, name in ((run.os, "fsync"), (Path, "rename"), (Path, "replace"), (shutil, "rmtree")):
            monkeypatch.setattr(place, name, self._before(getattr(place, name), name))

    def _before(self, act, name):
        def wrapped(*args, **options):
            with self._still:
                self.moment()
                # A kill loses nothing that was written, flushed to the disk or not.
                return None if name == "fsync" else act(*args, **options)

        return wrapped

    def moment(self):
        with self._still:
            if self._directory.is_dir():
                if self._wanted and self.moments >= self._wanted[0] and self._ready():
                    self._wanted.pop(0)
                    image = self._directory.with_name(f"image-{self.moments:03}")
                    shutil.copytree(self._directory, image)
                    self.images.append(image)
                self.moments += 1


def goes_on(cfg, image, wanted):
    """Resumes the copy, or if there is nothing to resume, says why in a line; returns whether it went on."""
    if not checkpoint.list_checkpoints(image / "checkpoints"):
        return False
    try:
        execute(cfg, image, resume=True)
    except Complete:  # only its temporary directory was still to go
        assert Trace.read(image).events == wanted.events
        return True
    assert Trace.read(image).events == wanted.events
    assert {k: v for k, v in Trace.read(image).files.items() if k == checkpoint.ARRAYS} == {
        k: v for k, v in wanted.files.items() if k == checkpoint.ARRAYS
    }
    assert not [p.name for p in image.iterdir() if p.name.endswith(".tmp")]
    assert not [p.name for p in (image / "checkpoints").iterdir() if p.name.startswith(".tmp")]
    return True


@pytest.fixture
def root(here):
    return here / "images"


def tier(recipe, model, engine):
    """Return the marks of a cell: `make test` takes each model once and each recipe on models of two kinds."""
    families = ("qwen2", "qwen3", "gemma")  # llama by other settings
    if engine == "ggml":
        return [] if recipe == "scratch" or model not in families else [pytest.mark.release]
    if engine == "cpu" and model in ("llama", "vit"):
        return [] if recipe in ("scratch", "lora", "vit_tiny") else [pytest.mark.release]
    return [pytest.mark.faults]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "model", "engine"), [pytest.param(*cell, marks=tier(*cell)) for cell in CELLS])
def test_every_cell_goes_on_from_a_random_moment(recipe, model, engine, configured, root, monkeypatch):
    cfg = configured(recipe, model, engine)
    directory = root / f"{recipe}-{model}-{engine}" / "run"
    moment = random.Random(f"{recipe}-{model}-{engine}").randint(20, 47)
    with monkeypatch.context() as patch:
        camera = Camera(patch, directory, {moment}, lambda: checkpoint.list_checkpoints(directory / "checkpoints"))
        execute(cfg, directory)
    assert camera.moments > 47
    wanted = Trace.read(directory)
    assert [e["step"] for e in wanted.events if e["kind"] == "step"] == list(range(1, STEPS + 1))
    with monkeypatch.context() as patch:
        patch.setattr(run.os, "fsync", lambda file: None)
        assert goes_on(cfg, camera.images[0], wanted)
    FIGURES["crash images: cells of the matrix that went on"] += 1


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("recipe", "model"), [("scratch", "gpt2"), ("lora", "llama"), ("vit_tiny", "vit")])
def test_every_moment_of_a_run(recipe, model, configured, root, monkeypatch):
    cfg = configured(recipe, model, "ggml")
    directory = root / f"all-{recipe}-{model}" / "run"
    with monkeypatch.context() as patch:
        camera = Camera(patch, directory, range(1000))
        execute(cfg, directory)
    wanted = Trace.read(directory)
    with monkeypatch.context() as patch:
        patch.setattr(run.os, "fsync", lambda file: None)
        went_on = [goes_on(cfg, image, wanted) for image in camera.images]
    assert went_on == sorted(went_on), "once there is a checkpoint there always is one"
    FIGURES["crash images: moments of a run, all gone on from"] += sum(went_on)
    FIGURES["crash images: moments before a first checkpoint"] += went_on.count(False)
