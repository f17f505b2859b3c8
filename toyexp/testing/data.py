"""Conformance suite for data."""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from toyexp.interfaces.data import Data
from toyexp.interfaces.dataset import Batch, Batches, Dataset, batch_digest
from toyexp.testing.suites import PluginSuite

OPEN_FILES = Path("/proc/self/fd"), Path("/proc/self/map_files")  # files that a process has open or mapped, on Linux


class DataSuite(PluginSuite):
    """Conformance suite of a data plugin: set `data`, and each attribute below whose default does not fit the data."""

    kind, part = "data", "data"
    data: Data
    context: int = 8  # tokens of a row, if the data has rows of tokens
    rows: int = 4  # rows of a batch
    epoch: int = 0  # batches in an epoch; 0: do not compare held-out with training data, because examples may be equal
    expected_words: tuple[str, ...] = ()  # words that `omissions` must contain, such as the key that changes them

    def open_dataset(self) -> Dataset:
        """Check the settings of `data`, open it and return the dataset."""
        self.data.check()
        return self.data.open(None)

    def batches(self, seed: int = 0) -> Batches:
        """Open the dataset again, and return its batches."""
        return self.open_dataset().batches(self.context, self.rows, seed)

    def test_opening_twice_gives_equal_data(self) -> None:
        """The description of the dataset, with its sizes and digest, is the same when the dataset is opened again."""
        assert self.open_dataset().describe() == self.open_dataset().describe()

    def test_its_description_is_plain_data_and_constant(self) -> None:
        """The dataset's descriptions are valid JSON, and making batches does not change them."""
        dataset = self.open_dataset()
        descriptions = [json.dumps((dataset.describe(), list(dataset.omissions()), dataset.remarks()), allow_nan=False)]
        for context in (self.context, self.context + 1):
            batches = dataset.batches(context, self.rows, 0)
            batches.batch(0), batches.held_out()
            json.dumps((dict(batches.facts), list(batches.omissions)), allow_nan=False)
            descriptions.append(json.dumps((dataset.describe(), list(dataset.omissions()), dataset.remarks())))
        assert descriptions == descriptions[:1] * 3

    def test_omitted_data_is_reported(self) -> None:
        """Each note about omitted data is a single line, and the notes contain all words in `expected_words`."""
        dataset = self.open_dataset()
        omissions = [*dataset.omissions(), *dataset.batches(self.context, self.rows, 0).omissions]
        assert all(text and "\n" not in text for text in omissions)
        assert [word for word in self.expected_words if not any(word in text for text in omissions)] == []

    def test_a_batch_is_a_function_of_seed_and_number(self) -> None:
        """Batch k does not depend on the order of calls; held-out data does not depend on the seed."""
        first, second, other = self.batches(1), self.batches(1), self.batches(2)
        later = second.batch(7)
        held_out = [batch_digest(batch) for batch in second.held_out()]
        assert [batch_digest(first.batch(k)) for k in (3, 7)] == [batch_digest(b) for b in (second.batch(3), later)]
        assert any(batch_digest(first.batch(k)) != batch_digest(other.batch(k)) for k in range(4))
        assert held_out == [batch_digest(batch) for batch in second.held_out()]
        assert held_out == [batch_digest(batch) for batch in other.held_out()], "the held-out data depends on the seed"

    def test_batches_have_the_declared_shapes_and_dtypes(self) -> None:
        """Training and held-out batches have the declared shapes and types, and ids below vocab."""
        dataset = self.open_dataset()
        batches = dataset.batches(self.context, self.rows, 0)
        assert batches.held_out()
        for batch in [batches.batch(0), batches.batch(9), *batches.held_out()]:
            assert batches.inputs.keys() >= batch.keys() >= {n for n, s in batches.inputs.items() if not s.optional}
            for name, spec in ((name, batches.inputs[name]) for name in batch):
                assert (batch[name].shape, batch[name].dtype) == ((self.rows, *spec.shape), spec.dtype), name
                assert spec.below is None or 0 <= batch[name].min() <= batch[name].max() < spec.below, name
            assert 0 <= batch["targets"].min() <= batch["targets"].max() < dataset.vocab
            assert batch["weights"].min() >= 0 < batch["weights"].sum()

    def test_training_and_held_out_data_do_not_overlap(self) -> None:
        """No training row of an epoch is also held out. The test is skipped unless the suite sets `epoch`."""
        if not self.epoch:
            pytest.skip("the suite does not set `epoch`: training and held-out examples may be equal")
        batches = self.batches()
        trained = {row for k in range(self.epoch) for row in _rows(batches.batch(k))}
        held_out = {row for batch in batches.held_out() for row in _rows(batch)}
        assert trained and held_out and not trained & held_out

    def test_another_process_reads_equal_batches(self) -> None:
        """Another process with another PYTHONHASHSEED makes the same batches."""
        cls = type(self.data)
        code = f"from {cls.__module__} import {cls.__qualname__} as data\n"
        code += "import json, sys\nfrom toyexp.testing.data import fingerprint\n"
        code += f"print(fingerprint(data(**json.load(sys.stdin)), {self.context}, {self.rows}))"
        hashes = {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.run(
            [sys.executable, "-c", code], input=json.dumps(asdict(self.data)), capture_output=True, text=True,
            env={**os.environ, **hashes},
        )  # fmt: skip
        assert process.returncode == 0, process.stderr
        assert process.stdout.strip() == fingerprint(self.data, self.context, self.rows)

    @pytest.mark.skipif(not OPEN_FILES[0].is_dir(), reason="only Linux lists the open files of a process")
    def test_all_files_are_closed(self) -> None:
        """After the dataset is deleted, none of its files is open or memory-mapped."""
        self.batches().batch(0)  # modules that this imports may keep files open
        gc.collect()
        before = Counter(_open_files())
        batches = self.batches()
        batches.batch(0)
        del batches
        gc.collect()
        assert not Counter(_open_files()) - before


def fingerprint(data: Data, context: int, rows: int) -> str:
    """Return a SHA-256 digest of the dataset's descriptions and some of its batches.

    Two processes that read equal data get equal digests.
    """
    data.check()
    dataset = data.open(None)
    batches = dataset.batches(context, rows, 3)
    descriptions = json.dumps((dataset.describe(), list(dataset.omissions()), dict(batches.facts)))
    parts = [
        descriptions,
        *(batch_digest(batch) for batch in (batches.batch(0), batches.batch(11), *batches.held_out())),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _rows(batch: Batch) -> Iterator[bytes]:
    """Yield the inputs of each row of a batch as bytes, except rows whose weights are all 0 (padding)."""
    inputs = [array for name, array in sorted(batch.items()) if name not in ("targets", "weights")]
    for number, weights in enumerate(batch["weights"]):
        if weights.any():
            yield b"".join(array[number].tobytes() for array in inputs)


def _open_files() -> Iterator[str]:
    """Yield the paths of the files that this process has open or memory-mapped."""
    for link in itertools.chain.from_iterable(folder.iterdir() for folder in OPEN_FILES if folder.is_dir()):
        try:
            target = str(link.readlink())
        except OSError:  # the descriptor of the directory listing itself
            continue
        if target.startswith("/") and not target.startswith(("/proc", "/dev")):
            yield target
