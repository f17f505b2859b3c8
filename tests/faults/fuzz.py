"""Fuzz parsers and commands in one process: python fuzz.py KIND[,KIND] SEED COUNT, in the directory of `bench`.

Each malformed input must be accepted, or rejected with a short error: no traceback, under 2 s of CPU time and 1 GiB of
memory. The first input that fails is saved to a file, whose name is in the exit message.
"""

import contextlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np
from faults import words

from toyexp import ToyexpError, UserError
from toyexp.cli.main import main
from toyexp.config import request as requests
from toyexp.formats.gguf.open_model import load_model
from toyexp.formats.gguf.read import GGUFFile
from toyexp.interfaces.recipe import start_session
from toyexp.plugins.discovery import load
from toyexp.sweeps.directory import Job, Status, SweepDir, SweepSpec
from toyexp.sweeps.summary_table import print_table
from toyexp.training import checkpoint, experiment
from toyexp.training.checkpoint import ARRAYS, MANIFEST, STATE
from toyexp.training.resume import load_resume_state as load_run
from toyexp_data.examples import ExampleData
from toyexp_data.images import Images
from toyexp_data.tokens import Tokens

SECONDS, BYTES = 2.0, 1 << 30
REGISTRY = load()
NUMBERS = [0, 1, 2, 3, 7, 255, 256, 65535, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40,
           (1 << 61) + 1, (1 << 62), (1 << 63) - 1, 1 << 63, (1 << 64) - 32, (1 << 64) - 1]  # fmt: skip


# -- mutations --------------------------------------------------------------------------------------------------------


def mutate_bytes(rng, data, others):
    """Return `data` with one to four changes, most of them near the beginning, where headers are."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 4])):
        offset = min(int(rng.random() ** rng.choice([1, 2, 4]) * (len(data) + 1)), len(data))
        kind = rng.randrange(8)
        if kind == 0 and offset < len(data):
            data[offset] ^= 1 << rng.randrange(8)
        elif kind == 1 and offset < len(data):
            data[offset] = rng.randrange(256)
        elif kind == 2:
            width, number = rng.choice([("<B", 8), ("<H", 16), ("<I", 32), ("<Q", 64)]), rng.choice(NUMBERS)
            packed = struct.pack(width[0], number % (1 << width[1]))
            data[offset : offset + len(packed)] = packed
        elif kind == 3:
            del data[offset : offset + rng.choice([1, 2, 8, 64, 1000])]
        elif kind == 4:
            data[offset:offset] = rng.randbytes(rng.choice([1, 2, 8, 64]))
        elif kind == 5:
            data[offset:offset] = data[rng.randrange(len(data) + 1) :][: rng.choice([1, 4, 16, 200])]
        elif kind == 6:
            del data[offset:]
        else:
            other = rng.choice(others)
            data[offset:] = other[rng.randrange(len(other) + 1) :]
    return bytes(data)


STRANGE = [
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**400, 1e308, -0.5, float("nan"), float("inf"), "", "x", [], {}, [[]],
    "../../etc/passwd", "\x00\x1b[2J", "\ud800", "💥" * 50, {"": {}}, ["x"] * 100, {"_target_": "os.system"},
    "${oc.env:HOME}",
]  # fmt: skip
TEXTS = [
    "", "x", "a b c", "\x1b[31m", "é", "<0xZZ>", "{{ 1/0 }}", "{% for %}", "gpt2", "llama", "t5", "qwen2", "{{" * 3000,
    "{% for i in range(10**9) %}x{% endfor %}",
]  # fmt: skip


def mutate_json(rng, value):
    """Return `value` with one part replaced, removed, duplicated or renamed."""
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        copy = value.copy()
        action = rng.randrange(8)
        if action == 0:
            del copy[key]
        elif action == 1 and isinstance(copy, list):
            copy.append(copy[key])
        elif action == 1:
            copy[str(key) + "x"] = copy[key]
        else:
            copy[key] = mutate_json(rng, value[key])
        return copy
    if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.4:
        return rng.choice([-value, value + 1, value * 10**6, float(value), str(value)])
    return rng.choice(STRANGE)


class Header:
    """A parsed GGUF file that can be serialised again with changed keys, tensors and counts."""

    FORMS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q", 12: "<d"}

    def __init__(self, path):
        with GGUFFile(path) as file:
            self.keys = [[key, self.kind(value), value] for key, value in file.metadata.items()]
            begin = min((t.offset for t in file.tensors.values()), default=0)
            self.table = [[t.name, list(t.shape[::-1]), t.type_id, t.offset - begin] for t in file.tensors.values()]
            self.data = Path(path).read_bytes()[begin:]

    def kind(self, value):
        if isinstance(value, list):
            return (9, 8)
        if isinstance(value, np.ndarray):
            return (9, {"<i4": 5, "<u4": 4, "<f4": 6, "|u1": 0}.get(value.dtype.str, 5))
        return {bool: 7, int: 4, float: 6, str: 8}[type(value)]

    def mutate(self, rng):
        keys, table, data = [k.copy() for k in self.keys], [t.copy() for t in self.table], self.data
        counts = [len(table), len(keys)]
        for _ in range(rng.choice([1, 1, 2, 3])):
            self.change(rng, keys, table, counts)
        if rng.random() < 0.2:
            offset = rng.randrange(len(data) + 1)
            data = (
                data[:offset] + rng.choice([b"\xff" * 64, b"\x00" * 64, b"", rng.randbytes(64)]) + data[offset + 64 :]
            )
        return self.serialise(keys, table, data, counts, rng)

    def change(self, rng, keys, table, counts):
        act = rng.randrange(9)
        key, tensor = rng.choice(keys), rng.choice(table) if table else None
        if act == 0:
            keys.remove(key)
        elif act == 1:
            keys.append(key.copy() if rng.random() < 0.5 else [key[0] + rng.choice(["", "x", ".y", "\x00"]), *key[1:]])
        elif act == 2:
            key[1] = rng.choice([*self.FORMS, 8, 9, (9, 8), (9, 5), (9, 9), (9, 99), 13])
        elif act in (3, 4):
            key[2] = self.mutate_value(rng, key[2])
        elif act == 5 and tensor:
            tensor[1] = rng.choice([tensor[1][::-1], [*tensor[1], 1], tensor[1][:-1], [n * 2 for n in tensor[1]],
                                     [rng.choice(NUMBERS) for _ in range(rng.randrange(6))]])  # fmt: skip
        elif act == 6 and tensor:
            tensor[2] = rng.choice([0, 1, 2, 8, 12, 14, 24, 28, 30, 39, 40, 999])
        elif act == 7 and tensor:
            tensor[3] = rng.choice([*NUMBERS, tensor[3] + 32, max(tensor[3] - 32, 0)])
        elif act == 8 and tensor:
            if rng.random() < 0.5:
                tensor[0] = rng.choice(["", "x", tensor[0] + "x", "a" * 64, "a" * 65, "blk.99999999.attn_q.weight"])
            else:
                counts[rng.randrange(2)] = rng.choice(NUMBERS)

    def mutate_value(self, rng, value):
        if isinstance(value, list | np.ndarray):
            items = list(value)
            act = rng.randrange(4)
            if not items or act == 0:
                return items[: rng.randrange(len(items) + 1)]
            index = rng.randrange(len(items))
            if act == 1:
                return [*items, items[index]]
            items[index] = self.mutate_value(rng, items[index])
            return items
        if isinstance(value, str):
            return rng.choice([*TEXTS, value * 2, value[::-1]])
        return rng.choice([*NUMBERS, -1, float("nan"), float("inf"), 1e-30, 0.5])

    def serialise(self, keys, table, data, counts, rng):
        out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, counts[0] % 2**64, counts[1] % 2**64))
        for key, kind, value in keys:
            out += self.text(key)
            out += self.value(kind, value)
        for name, shape, kind, offset in table:
            out += self.text(name) + struct.pack("<I", len(shape))
            out += b"".join(struct.pack("<Q", n % 2**64) for n in shape) + struct.pack("<IQ", kind, offset % 2**64)
        return bytes(out + b"\x00" * (-len(out) % 32) + data)

    def text(self, value):
        raw = str(value).encode(errors="surrogatepass")
        return struct.pack("<Q", len(raw)) + raw

    def number(self, kind, value):
        try:
            if kind in (6, 12):
                return struct.pack(self.FORMS[kind], float(value))
            bits = 8 * struct.calcsize(self.FORMS[kind])
            unsigned = int(value) % 2**bits
            return unsigned.to_bytes(bits // 8, "little")
        except (TypeError, ValueError, OverflowError):
            return b"\x01" * struct.calcsize(self.FORMS[kind])

    def value(self, kind, value):
        if isinstance(kind, tuple):
            items = list(value) if isinstance(value, list | np.ndarray) else [value]
            item = self.text if kind[1] == 8 else (lambda v: self.number(kind[1] if kind[1] in self.FORMS else 0, v))
            return struct.pack("<IIQ", 9, kind[1], len(items)) + b"".join(map(item, items))
        return struct.pack("<I", kind) + (self.text(value) if kind not in self.FORMS else self.number(kind, value))


# -- targets ----------------------------------------------------------------------------------------------------------


def build_cfg(*key, more=()):
    return requests.Request([], REGISTRY).build_config(*words(*key), *more)


def copy_config(cfg, **parts):
    return replace(cfg, callbacks={name: replace(c) for name, c in cfg.callbacks.items()}, **parts)


def take_step(prepared):
    with start_session(prepared.config.recipe, prepared.config.engine, prepared.plan) as session:
        session.step(prepared.batches.batch(0), prepared.plan.numbers(0, 0.001))


class Target:
    """A function under test; `seeds` are valid inputs to mutate."""

    suffix = ""

    def __init__(self):
        self.path = Path(f"fuzzed-{os.getpid()}{self.suffix}")

    def mutate(self, rng):
        return mutate_bytes(rng, rng.choice(self.seeds), self.seeds)

    def take(self, data):
        self.path.write_bytes(data)
        self.use()


class GGUFTarget(Target):
    """A target that reads GGUF files, mutated by bytes or by header values."""

    suffix = ".gguf"

    def __init__(self, *paths):
        super().__init__()
        self.seeds = [Path(p).read_bytes() for p in paths]
        self.headers = [Header(p) for p in paths]

    def mutate(self, rng):
        return rng.choice(self.headers).mutate(rng) if rng.random() < 0.6 else super().mutate(rng)


class Describe(GGUFTarget):
    def __init__(self):
        super().__init__("base-llama.gguf", "base-gemma.gguf", "adapter.gguf", "vit.gguf", "q8_0.gguf")

    def use(self):
        main(["describe", str(self.path), "--metadata", "--tensors"])


class Base(GGUFTarget):
    """recipe=full and lora up to their first step."""

    def __init__(self):
        super().__init__("base-llama.gguf", "base-gpt2.gguf", "base-qwen3.gguf", "base-gemma.gguf", "q8_0.gguf")
        self.kinds = [build_cfg(recipe, "llama", "ggml") for recipe in ("full", "lora")]

    def use(self):
        for cfg in self.kinds:
            recipe = replace(cfg.recipe, base=str(self.path))
            base = load_model(self.path, REGISTRY, recipe.reads)
            model = replace(base, context=min(16, base.context))
            take_step(experiment.prepare(copy_config(cfg, recipe=recipe, base=model, model=model)))


class Donor(GGUFTarget):
    def __init__(self):
        super().__init__("base-llama.gguf", "base-gpt2.gguf", "q8_0.gguf")
        self.cfg = build_cfg("warm", "llama", "ggml", more=["model.d_model=32"])

    def use(self):
        recipe = replace(self.cfg.recipe, donor=str(self.path))
        recipe.check()
        data = replace(self.cfg.data, tokenizer="auto")
        take_step(experiment.prepare(copy_config(self.cfg, recipe=recipe, data=data)))


class Tokenizer(GGUFTarget):
    def __init__(self):
        super().__init__("base-llama.gguf", "char.gguf", "bpe.gguf")
        self.cfg = build_cfg("scratch", "llama", "ggml")

    def use(self):
        data = replace(self.cfg.data, tokenizer=str(self.path))
        data.check()
        experiment.prepare(copy_config(self.cfg, data=data))


class Eval(GGUFTarget):
    def __init__(self):
        super().__init__("base-llama.gguf", "base-gpt2.gguf", "q8_0.gguf")
        compose, cache = requests.compose, {}

        def compose_cached(overrides, *others):
            key = tuple(o.input_line for o in overrides)
            if key not in cache:
                cache[key] = compose(overrides, *others)
            return replace(cache[key], cfg=cache[key].cfg.copy())

        requests.compose = compose_cached

    def use(self):
        settings = ["data=text", "data.path=book.txt", "engine=ggml", "engine.threads=1", "model.context=16"]
        main(["eval", str(self.path), *settings])


class TokenFile(Target):
    def __init__(self):
        super().__init__()
        ids = np.random.default_rng(0).integers(0, 50, 400)
        plain = ids.astype("<i4").tobytes()
        self.seeds = [plain, ids.astype("<u2").tobytes(), b"TOYC" + struct.pack("<III", 1, 50, 0) + plain]
        self.cfg = build_cfg("scratch", "llama", "ggml")

    def use(self):
        for dtype in ("auto", "uint16"):
            with contextlib.suppress(UserError):
                data = Tokens(path=str(self.path), dtype=dtype)
                data.check()
                experiment.prepare(copy_config(self.cfg, data=data))


TALK = [("system", "Be short."), ("user", "Hi"), ("assistant", "Hello")]
LINES = [
    {"prompt": "2+2=", "completion": "4"},
    {"text": "It was a bright cold day in April."},
    {"messages": [{"role": role, "content": content} for role, content in TALK]},
]


class JsonLines(Target):
    def __init__(self):
        super().__init__()
        self.seeds = [b"\n".join(json.dumps(line).encode() for line in LINES * 4)]
        self.cfg = build_cfg("scratch", "llama", "ggml")

    def mutate(self, rng):
        if rng.random() < 0.5:
            return super().mutate(rng)
        lines = LINES * 4
        at = rng.randrange(len(lines))
        return "\n".join(json.dumps(mutate_json(rng, x) if i == at else x) for i, x in enumerate(lines)).encode()

    def use(self):
        for on_error in ("refuse", "skip"):
            with contextlib.suppress(UserError):
                data = ExampleData(path=str(self.path), tokenizer="byte", on_error=on_error)
                data.check()
                experiment.prepare(copy_config(self.cfg, data=data))


class ImageFiles(Target):
    def __init__(self):
        super().__init__()
        from PIL import Image

        rng = np.random.default_rng(0)
        self.seeds = []
        self.folder = Path(f"images-{os.getpid()}")
        for label in "ab":
            (self.folder / label).mkdir(parents=True)
            for number in range(2):
                Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(self.folder / label / f"{number}.png")
        for form in ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF"):
            for mode in ("RGB", "L", "P", "RGBA"):
                with contextlib.suppress(OSError, KeyError), io.BytesIO() as file:
                    Image.fromarray(rng.integers(0, 256, (16, 12, 3), np.uint8)).convert(mode).save(file, form)
                    self.seeds.append(file.getvalue())
        self.path = self.folder / "a" / "2.png"

    def use(self):
        for on_error in ("refuse", "skip"):
            with contextlib.suppress(UserError):
                data = Images(path=str(self.folder), image_size=8, on_error=on_error)
                data.check()
                data.open(None)


class Resume(Target):
    """Resuming a run with one mutated file, whose digest in the manifest is updated."""

    file = ""

    def __init__(self):
        super().__init__()
        self.source, self.path = Path("resumable"), Path(f"fuzzed-{os.getpid()}-run")
        self.seeds = [(self.source / self.file).read_bytes()]
        self.cfg = build_cfg(
            "scratch",
            "gpt2",
            "ggml",
            more=["model.d_model=8", "steps=9", "callbacks=[default,early_stop,quality_gate]"],
        )

    def take(self, data):
        shutil.rmtree(self.path, ignore_errors=True)
        shutil.copytree(self.source, self.path)
        (self.path / self.file).write_bytes(data)
        folder = self.path / "checkpoints" / "step-6"
        if not self.file.endswith(MANIFEST):
            manifest = json.loads((folder / MANIFEST).read_text())
            for name in (ARRAYS, STATE):
                size, digest = checkpoint._digest(folder / name)
                manifest["files"][name] = {"bytes": size, "sha256": digest}
            (folder / MANIFEST).write_text(json.dumps(manifest))
        self.use()

    def use(self):
        prepared = experiment.prepare(copy_config(self.cfg))
        experiment.execute(prepared, self.path, resumed=load_run(self.path, prepared))


class Events(Resume):
    file = "events.jsonl"


class Manifest(Resume):
    file = f"checkpoints/step-6/{MANIFEST}"


class Arrays(Resume):
    file = f"checkpoints/step-6/{ARRAYS}"


class State(Resume):
    file = f"checkpoints/step-6/{STATE}"

    def mutate(self, rng):
        if rng.random() < 0.3:
            return super().mutate(rng)
        return json.dumps(mutate_json(rng, json.loads(self.seeds[0]))).encode(errors="surrogatepass")


class Sweep(Target):
    """Loading a mutated sweep.json and printing the summary of its jobs."""

    suffix = "-sweep"

    def __init__(self):
        super().__init__()
        numbers = {"steps": 3, "train_loss": 2.5, "eval_loss": 2.0, "eval_scores": {"accuracy": 0.5}, "seconds": 1.0}
        completed = Job(0, ["seed=0"], "0-seed=0", Status.COMPLETED, 1, 0, None, numbers)
        jobs = [completed, Job(1, ["seed=1"], "1-seed=1", Status.FAILED, 1, 1, "no room"), Job(2, ["seed=2"])]
        spec = SweepSpec({"--config-dir": "more"}, ["steps=3"], ["sweep.jobs=2"], "/", [])
        SweepDir.create(self.path, jobs, spec).close()
        self.seeds = [(self.path / "sweep.json").read_bytes()]

    def mutate(self, rng):
        if rng.random() < 0.3:
            return super().mutate(rng)
        return json.dumps(mutate_json(rng, json.loads(self.seeds[0]))).encode(errors="surrogatepass")

    def take(self, data):
        (self.path / "sweep.json").write_bytes(data)
        folder = SweepDir.open(self.path)
        try:
            folder.save()
            print_table(folder.jobs, folder)
        finally:
            folder.close()


class SavedConfig(Resume):
    """Resuming a run with a mutated config.yaml through the command line."""

    file = "config.yaml"

    def mutate(self, rng):
        if rng.random() < 0.5:
            return super().mutate(rng)
        import yaml

        value = mutate_json(rng, yaml.safe_load(self.seeds[0]))
        with contextlib.suppress(yaml.YAMLError, ValueError):
            return yaml.safe_dump(value, allow_unicode=True).encode(errors="surrogatepass")
        return b"a: [" + self.seeds[0]

    def use(self):
        many = re.search(rb"steps: \d{4}", (self.path / self.file).read_bytes())  # valid, but slow
        main([f"resume={self.path}", *(["--dry-run"] if many else [])])


TARGETS = {
    "describe": Describe, "base": Base, "donor": Donor, "tokenizer": Tokenizer, "eval": Eval, "tokens": TokenFile,
    "jsonl": JsonLines, "images": ImageFiles, "events": Events, "manifest": Manifest, "arrays": Arrays, "state": State,
    "sweep": Sweep, "config": SavedConfig,
}  # fmt: skip


# -- the loop ----------------------------------------------------------------------------------------------------------


class TooSlow(BaseException):
    """An input took too much CPU time."""


def raise_too_slow(*_):
    raise TooSlow


def memory_bytes(which):
    return 1024 * int(re.search(rf"{which}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def check_error_lines(text):
    """Check that an error has at most three lines and no control characters."""
    lines = text.splitlines()
    assert len(lines) <= 3, text
    assert all(c.isprintable() for line in lines for c in line), ascii(text)
    assert "out of memory" not in text, text


def run_input(target, data):
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            target.take(data)
        except ToyexpError as error:
            check_error_lines(str(error))
    check_error_lines("\n".join(x for x in errors.getvalue().splitlines() if "warning" not in x))
    assert all(c.isprintable() for line in out.getvalue().split("\n") for c in line), "control characters in the output"


def run(kinds, seed, count):
    os.fsync = lambda file: None  # faster; crash safety is not tested here
    targets = {kind_name: TARGETS[kind_name]() for kind_name in kinds}
    for target in targets.values():
        for good in target.seeds:
            run_input(target, good)
    signal.signal(signal.SIGPROF, raise_too_slow)
    before, space = memory_bytes("VmHWM"), memory_bytes("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (space + BYTES, space + BYTES))
    for kind_name, target in targets.items():
        for number in range(count):
            data = target.mutate(random.Random(f"{kind_name} {seed} {number}"))
            Path(f"last-{kind_name}").write_bytes(data)  # shows the culprit if the process dies
            signal.setitimer(signal.ITIMER_PROF, SECONDS)  # CPU time: other processes share this machine
            try:
                run_input(target, data)
                signal.setitimer(signal.ITIMER_PROF, 0)
                assert memory_bytes("VmHWM") - before < BYTES
            except BaseException:
                signal.setitimer(signal.ITIMER_PROF, 0)
                Path(f"failed-{kind_name}-{seed}-{number}").write_bytes(data)
                traceback.print_exc()
                sys.exit(
                    f"{kind_name} {seed} {number}: not accepted, not rejected: see failed-{kind_name}-{seed}-{number}"
                )
    print(json.dumps({"inputs": count * len(kinds), "bytes": memory_bytes("VmHWM") - before}))


if __name__ == "__main__":
    run(sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3]))
