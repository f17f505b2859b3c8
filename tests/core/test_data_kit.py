"""The conformance kit on the shipped data, and on data with one fault each."""

import itertools

import numpy as np
import pytest

from toyexp.testing import DataSuite
from toyexp_data.text import Stdlib, Text
from toyexp_data.tokens import Tokens

pytest_plugins = "pytester"


class TestStdlib(DataSuite):
    data = Stdlib(max_mb=0.1)
    context = 64
    expected_words = ("data.max_mb",)


class TestText(DataSuite):
    """Characters in every order of three, so that no two windows of eight are alike."""

    expected_words = ("data.max_mb", "data.suffixes")
    epoch = 60

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path / "cache"))
        text = "".join(map("".join, itertools.permutations("abcdefghi", 3)))
        folder = tmp_path / "texts"
        folder.mkdir()
        folder.joinpath("a.txt").write_text(text)
        folder.joinpath("b.rst").write_text("other\n")
        self.data = Text(path=str(folder), tokenizer="char", max_mb=0.0015, val_fraction=0.2)

    def subject(self):
        return Text


@pytest.mark.parametrize("name", ["ids.bin", "ids.npy"])
class TestTokens(DataSuite):
    epoch = 25

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path, name):
        path, ids = tmp_path / name, np.arange(900, dtype=np.int32)
        np.save(path, ids) if path.suffix == ".npy" else ids.tofile(path)
        self.data = Tokens(path=str(path), val_fraction=0.2)

    def subject(self):
        return Tokens


SOUND = """
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from toyexp import Batches, Data, Dataset, InputSpec, Kind
from toyexp.testing import DataSuite

SOUNDS = Kind("sounds", "clip")
CLIPS = np.random.default_rng(0).standard_normal((40, 6)).astype(np.float32)
OPENED = []


class Clips(Dataset):
    vocab, made = 2, 0

    def describe(self):
        return {"clips": 40}

    def omissions(self):
        return ["4 of 44 clips: data.limit"]

    def batches(self, context, rows, seed):
        return ClipBatches(self, rows, seed)


class ClipBatches(Batches):
    inputs = {
        "clips": InputSpec((6,), "float32"),
        "targets": InputSpec((), "int32", below=2),
        "weights": InputSpec((), "float32"),
    }

    def __init__(self, dataset, rows, seed):
        self.dataset, self.rows, self.seed = dataset, rows, seed

    def made(self, numbers):
        numbers = np.array(numbers)
        targets = (numbers % 2).astype(np.int32)
        return {"clips": CLIPS[numbers], "targets": targets, "weights": np.ones(len(numbers), np.float32)}

    def batch(self, k):
        return self.made([(self.seed + k * self.rows + i) % 30 for i in range(self.rows)])

    def held_out(self):
        return [self.made(range(30, 34)), self.made(range(34, 38))]


@dataclass
class Sounds(Data):
    '''Clips of sound.'''

    name: ClassVar[str] = "sounds"
    gives: ClassVar[Kind] = SOUNDS

    limit: int = 40  # clips to take

    def check(self): ...

    def open(self, vocabulary):
        return Clips()

#FAULT

class TestSounds(DataSuite):
    data = Sounds()
    epoch = 8
    expected_words = ("data.limit",)
"""

# by fault: the line that causes it, and the tests that must fail
FAULTS = {
    "nothing": ("", set()),
    "it counts what it was asked": (
        "ClipBatches.batch = lambda self, k: (setattr(self.dataset, 'made', self.dataset.made + 1),"
        " self.made([(self.seed + self.dataset.made + i) % 30 for i in range(self.rows)]))[1]",
        {"a_batch_is_a_function_of_seed_and_number"},
    ),
    "the seed has no say": (
        "ClipBatches.batch = lambda self, k: self.made([(k + i) % 30 for i in range(self.rows)])",
        {"a_batch_is_a_function_of_seed_and_number"},
    ),
    "the seed chooses what is held out": (
        "ClipBatches.held_out = lambda self: [self.made([30 + (self.seed + i) % 10 for i in range(4)])]",
        {"a_batch_is_a_function_of_seed_and_number"},
    ),
    "it holds out what it trains on": (
        "ClipBatches.held_out = lambda self: [self.made(range(27, 31))]", {"training_and_held_out_data_do_not_overlap"},
    ),
    "its record changes": (
        "Clips.describe = lambda self: {'made': self.made}\nold = ClipBatches.batch\n"
        "def batch(self, k):\n    self.dataset.made += 1\n    return old(self, k)\nClipBatches.batch = batch",
        {"its_description_is_plain_data_and_constant"},
    ),
    "its record is none that JSON takes": (
        "Clips.describe = lambda self: {'mean': float('nan')}",
        {"its_description_is_plain_data_and_constant", "opening_twice_gives_equal_data"},
    ),
    "it does not say what it leaves out": (
        "Clips.omissions = lambda self: []", {"omitted_data_is_reported"},
    ),
    "it declares another type": (
        "ClipBatches.inputs = {**ClipBatches.inputs, 'clips': InputSpec((6,), 'float64')}",
        {"batches_have_the_declared_shapes_and_dtypes"},
    ),
    "its classes are more than it says": ("Clips.vocab = 1", {"batches_have_the_declared_shapes_and_dtypes"}),
    "its record hangs on Python's hashes": (
        "Clips.describe = lambda self: {'order': hash('clips')}",
        {"another_process_reads_equal_batches"},
    ),
    "it leaves its file open": (
        "Sounds.open = lambda self, vocabulary: (OPENED.append(np.memmap(__file__)), Clips())[1]",
        {"all_files_are_closed"},
    ),
}  # fmt: skip


def _outcomes(pytester, words):
    return pytester.inline_run("-p", "no:cacheprovider", *words).listoutcomes()


def test_the_kit_reports_exactly_what_is_wrong(pytester):
    names = {f"test_fault_{number}": fault for number, fault in enumerate(FAULTS)}
    pytester.makepyfile(**{name: SOUND.replace("#FAULT", FAULTS[fault][0]) for name, fault in names.items()})
    # The subprocess takes as long as the rest, so only two cases run there, of which one should fail.
    apart = [name for name, fault in names.items() if fault in ("nothing", "its record hangs on Python's hashes")]
    passed, skipped, failed = [], [], []
    for words in (["-k", "not another_process"], ["-k", "another_process", *(f"{name}.py" for name in apart)]):
        for all_of_it, outcomes in zip((passed, skipped, failed), _outcomes(pytester, words), strict=True):
            all_of_it += outcomes
    faults = {fault: set() for fault in FAULTS}
    for report in failed:
        file, _, test = report.nodeid.split("::")
        faults[names[file.removesuffix(".py")]].add(test.removeprefix("test_"))
    assert faults == {fault: expected for fault, (_, expected) in FAULTS.items()}
    assert len(passed) + len(failed) == 9 * len(FAULTS) + len(apart) and not skipped
