"""Any torch.nn.Module as a model, against bare PyTorch loops."""

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import write_base
from torch import nn

import toyexp
from toyexp import IMAGES, TOKENS, VECTORS, CrossEntropy, Setup, UserError
from toyexp.cli.main import main
from toyexp.interfaces.plan import apply_optimiser
from toyexp.plugins.compatibility import cells
from toyexp.plugins.discovery import load
from toyexp.tokenizers.byte_level import Bytes
from toyexp_data.images import Digits
from toyexp_data.text import Text
from toyexp_data.vectors import Vectors
from toyexp_objectives.distil import Distil
from toyexp_objectives.vectors import MSE
from toyexp_optimisers.adamw import AdamWOptimiser
from toyexp_optimisers.sgd import SGD
from toyexp_recipes.scratch import Scratch
from toyexp_torch.engines import TorchCPU
from toyexp_torch.module import TorchModule

ROWS, STEPS, LR = 8, 20, 1e-2
QUIET = {"batch_size": ROWS, "eval_every": 10, "quiet": True, "lr": LR, "engine": "cpu"}
FILE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=16, dropout=0.0):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 2), nn.Dropout(dropout))
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.fixed = nn.Parameter(torch.full((2,), 2.0), requires_grad=False)
        self.register_buffer("shift", torch.tensor([0.1, 0.2]))

    def forward(self, x):
        return self.body(x) * self.gain * self.fixed + self.shift


class Other(Net):
    pass
"""
exec(compile(FILE, "my_net.py", "exec"), NAMES := {"__name__": "my_net"})
Net = NAMES["Net"]


class Detached(nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1)).detach()


class LanguageModel(nn.Module):
    """A transformer layer with tied embeddings and a mask in a buffer."""

    def __init__(self, vocab=257, width=16):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.output = nn.Linear(width, vocab, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("mask", torch.triu(torch.full((64, 64), -torch.inf), 1))

    def forward(self, ids):
        mask = self.mask[: ids.shape[1], : ids.shape[1]]
        return self.output(self.layer(self.embedding(ids) * 0.1, src_mask=mask, is_causal=True))


def image_classifier(norm=lambda: nn.GroupNorm(2, 8)):
    return nn.Sequential(nn.Conv2d(1, 8, 3), norm(), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))


@pytest.fixture(autouse=True)
def _enter_tmp_path(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    Path("book.txt").write_text("It was a bright cold day in April, and the clocks were striking thirteen.\n" * 60)
    Path("my_net.py").write_text(FILE)
    x, y = arrays()
    np.savez("points.npz", x=x, y=y)
    monkeypatch.delitem(sys.modules, "my_net", raising=False)


def arrays():
    x = np.random.default_rng(0).random((100, 5), np.float32)
    return x, x[:, :2] ** 2


def make_net(make, seed=0):
    torch.manual_seed(seed)
    return make()


def assert_equal_weights(first, second):
    first, second = (load_file(f"{run}/model.safetensors") for run in (first, second))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def mean_squares(y, batch):
    return ((y - torch.from_numpy(batch["targets"])) ** 2).mean()


def cross_entropy(y, batch):
    return nn.functional.cross_entropy(y.flatten(0, -2), torch.from_numpy(batch["targets"]).long().flatten())


CASES = {
    "vectors": (Net, lambda: Vectors.from_arrays(*arrays()), "mse", lambda b: b["vectors"], mean_squares),
    "tokens": (LanguageModel, lambda: Text(path="book.txt", tokenizer="byte"), "cross_entropy",
               lambda b: b["tokens"].astype(np.int64), cross_entropy),
    "images": (image_classifier, Digits, "cross_entropy",
               lambda b: np.ascontiguousarray(b["images"].transpose(0, 3, 1, 2)), cross_entropy),
}  # fmt: skip


def train_bare(net, data, read, loss_of, make_optimiser):
    """Return the losses of a plain PyTorch loop on the batches of `data`, and train `net`."""
    batches, losses = data.open(None).batches(64, ROWS, 0), []
    optimiser = make_optimiser([p for p in net.parameters() if p.requires_grad])
    for k in range(STEPS):
        batch = batches.batch(k)
        loss = loss_of(net(torch.from_numpy(read(batch))), batch)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("optim", ["adamw", "sgd"])
def test_losses_and_weights_equal_those_of_a_bare_pytorch_loop(kind, optim):
    make, data, objective, read, loss_of = CASES[kind]
    net = make_net(make)
    before = copy.deepcopy(net.state_dict())
    ours, theirs = {
        "adamw": (AdamWOptimiser(mode="lora"), lambda p: torch.optim.AdamW(p, LR, weight_decay=0.0)),
        "sgd": (SGD(momentum=0.9), lambda p: torch.optim.SGD(p, LR, momentum=0.9)),
    }[optim]
    callbacks = ["constant", "events", "safetensors_export"]
    result = toyexp.train(
        net, data(), objective=objective, optim=ours, callbacks=callbacks, steps=STEPS, directory="run", **QUIET
    )
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())  # it is not modified
    losses = train_bare(net, data(), read, loss_of, theirs)
    np.testing.assert_allclose(result.history["loss"], losses, rtol=1e-6, atol=1e-6)
    trained = load_file("run/model.safetensors")
    for name, parameter in net.named_parameters() if optim == "sgd" else ():  # AdamW magnifies gradients that are noise
        torch.testing.assert_close(trained[name].view(parameter.shape), parameter.detach(), rtol=1e-3, atol=1e-5)
    assert result.held_out["loss"] < result.history.held_out["loss"][0]
    assert ("accuracy" in result.held_out) == (kind == "images")


def test_frozen_parameters_stay_and_buffers_move_to_the_dtype_of_the_engine():
    net = make_net(Net)
    toyexp.train(net, arrays(), objective="mse", steps=3, directory="run", **{**QUIET, "engine": TorchCPU("float64")})
    saved = load_file("run/model.safetensors")
    assert torch.equal(saved["fixed"], net.fixed)
    assert not torch.equal(saved["gain"][0], net.gain)
    assert "unexpected_keys=[]" in str(net.load_state_dict(saved, strict=False))


@pytest.mark.parametrize("kind", ["vectors", "tokens"])
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(kind):
    make, data, objective, _, _ = CASES[kind]
    parts = {"objective": objective, "callbacks": ["constant", "events", "safetensors_export"], **QUIET}
    toyexp.train(make_net(make), data(), steps=12, directory="whole", **parts)
    toyexp.train(make_net(make), data(), steps=5, directory="begun", **parts)
    toyexp.train(make_net(make), data(), steps=12, resume="begun", **parts)
    assert_equal_weights("whole", "begun")


def test_accumulated_gradients_are_those_of_the_whole_batch():
    losses = []
    for accumulate in (1, 4):
        optim = AdamWOptimiser(accumulate=accumulate)
        result = toyexp.train(make_net(Net), arrays(), objective="mse", optim=optim, steps=STEPS, **QUIET)
        losses.append(result.history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize("kind", ["vectors", "tokens"])
def test_three_runs_in_a_stack_equal_each_on_its_own(kind):
    make, data, objective, _, _ = CASES[kind]
    batches = data().open(None).batches(64, ROWS, 0)
    objective = MSE() if objective == "mse" else CrossEntropy()
    model_kind, engine = {"vectors": VECTORS, "tokens": TOKENS}[kind], TorchCPU(threads=1)
    plans = []
    for seed in range(3):
        model = TorchModule.wrap(make_net(make, seed)).adapt(model_kind)
        inputs = model_kind.with_bounds(batches.inputs, 257)
        plan = Scratch().plan(model, Setup(inputs, ROWS, objective=objective))
        plans.append(apply_optimiser(plan, AdamWOptimiser(mode="lora"), LR))
    steps = [(batches.batch(k), plans[0].numbers(k, LR)) for k in range(5)]
    alone = []
    for plan in plans:
        with engine.realize(plan) as session:
            session.build()
            alone.append([session.step(*step).loss for step in steps])
    stack = engine.realize_stack(plans)
    for session in stack.sessions:
        session.build()
    together = []
    for step in steps:
        launched = stack.step({row: session.step_input(*step) for row, session in enumerate(stack.sessions)})
        together.append([wait().loss for wait in launched.values()])
    np.testing.assert_allclose(np.transpose(together), alone, rtol=1e-5)
    for session in stack.sessions:
        session.close()


@pytest.mark.parametrize("form", ["numpy", "torch", "dataset", "x only"])
def test_arrays_tensors_and_datasets_are_data_of_vectors(form):
    x, y = arrays()
    data = {
        "numpy": (x, y),
        "torch": (torch.from_numpy(x), torch.from_numpy(y)),
        "dataset": torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y)),
        "x only": x,
    }[form]
    net = nn.Linear(5, 5 if form == "x only" else 2)
    result = toyexp.train(net, data, objective="mse", steps=1, **QUIET)
    expected = Vectors.from_arrays(x, x if form == "x only" else y).open(None).describe()["vectors_sha256"]
    assert result.facts["data"]["vectors_sha256"] == expected


# -- the command line ------------------------------------------------------------------------------------------------

DATA = ["data=vectors", "data.path=points.npz", "objective=mse", "steps=6", "engine=cpu", f"batch_size={ROWS}"]
WORDS = ["model=torch_module", "model.path=my_net:Net", *DATA]


def run(*words):
    assert main([*words]) == 0


def run_rejected(capsys, *words):
    capsys.readouterr()
    assert main([*words]) == 2
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if not line.startswith("note: ")]
    assert len(lines) == 1, error
    return lines[0]


def test_the_command_line_trains_a_class_of_a_module_and_says_what_it_lacks(capsys):
    run(*WORDS, "model.arguments={width: 7}", "seed=3", "hydra.run.dir=run", "callbacks=[constant,events,gguf_export]")
    assert "no GGUF file" in capsys.readouterr().out
    assert not Path("run/model.gguf").exists()
    net = make_net(lambda: Net(width=7), seed=3)
    callbacks = ["constant", "events", "safetensors_export"]
    toyexp.train(net, Vectors(path="points.npz"), objective="mse", steps=6, seed=3, directory="same",
                 callbacks=callbacks, **{**QUIET, "lr": 3e-3, "eval_every": 0})  # fmt: skip
    assert load_file("run/model.safetensors")["body.0.weight"].shape == (7, 5)
    assert_equal_weights("run", "same")


def test_a_resumed_run_needs_the_code_typed_again(capsys):
    constant = "callbacks=[constant,events,safetensors_export]"
    run(*WORDS, constant, "hydra.run.dir=whole", "steps=9")
    run(*WORDS, constant, "hydra.run.dir=begun", "checkpoint_every=3")
    assert "only the command line can load" in run_rejected(capsys, "resume=begun", "steps=9")
    assert "model.path was" in run_rejected(capsys, "resume=begun", "steps=9", "model.path=my_net:Other")
    run("resume=begun", "steps=9", "model.path=my_net:Net")
    assert_equal_weights("whole", "begun")
    run("resume=begun", "steps=10", "plugins=[my_net]")


@pytest.mark.parametrize("launcher", ["serial", "stacked", "processes"])
def test_sweeps_start_each_seed_from_values_of_its_own(launcher):
    run("-m", *WORDS, "seed=0,1,2", f"sweep.launcher={launcher}", "hydra.sweep.dir=swept")
    weights = [load_file(path)["body.0.weight"] for path in sorted(Path("swept").glob("*/model.safetensors"))]
    assert len(weights) == 3
    assert not torch.equal(weights[0], weights[1])
    alone = toyexp.run(*WORDS, seed=1, quiet=True)
    torch.testing.assert_close(load_file(alone.files["model.safetensors"])["body.0.weight"], weights[1])


@pytest.mark.parametrize("launcher", ["serial", "stacked"])
def test_a_resumed_sweep_over_classes_needs_the_code_typed_again(capsys, monkeypatch, launcher):
    Path("their_net.py").write_text(FILE)
    monkeypatch.delitem(sys.modules, "their_net", raising=False)
    run("-m", *WORDS, "model.path=my_net:Net,their_net:Other", f"sweep.launcher={launcher}", "hydra.sweep.dir=swept")
    assert "add 'plugins=[my_net,their_net]'" in run_rejected(capsys, "sweep.resume=swept")
    run("sweep.resume=swept", "plugins=[my_net,their_net]")


@pytest.mark.parametrize(
    ("words", "message"),
    {
        ("engine=ggml",): "engine=ggml: cannot run model=torch_module; type engine=cpu",
        ("engine.devices=2",): "engine.devices=2: model=torch_module runs on one device; leave it out",
        ("callbacks.gguf_export.type=f16",): "model=torch_module: GGUF cannot hold it",
        ("model.arguments={dropout: 0.5}",): "the module draws random numbers (dropout?)",
        ("model.arguments={wide: 1}",): "unexpected keyword argument 'wide'",
        ("model.path=my_net:Nett",): "my_net has no Nett; choose one of: Net, Other",
        ("model.path=my_net",): "such as model.path=my_module:Net",
        ("model.path=:Net",): "such as model.path=my_module:Net",
        ("model.path=my_net:torch",): "TypeError: 'module' object is not callable",
        ("model.path=missing:Net",): "model.path=missing:Net: there is no module missing",
        ("data=text", "data.path=book.txt", "objective=cross_entropy"): "the module fails on tokens [2, 64]",
        ("recipe=vit_tiny",): "recipe=vit_tiny trains models that read images; model=torch_module reads vectors",
    }.items(),
)
def test_what_cannot_work_is_refused_in_one_line(capsys, words, message):
    assert message in run_rejected(capsys, *WORDS, *words)


def test_a_module_learns_from_the_teacher_of_a_family():
    write_base(Path("teacher.gguf"), "llama", tokenizer=Bytes(), context=64)
    data = Text(path="book.txt", tokenizer="byte")
    distil = Distil("teacher.gguf", hard=0.0, temperature=1.0)
    result = toyexp.train(LanguageModel(), data, objective=distil, steps=20, **QUIET)
    kl = result.history.held_out["kl"]
    assert kl[-1] < 0.9 * kl[0]


def test_other_commands_refuse_a_run_without_a_gguf_file(capsys):
    run(*WORDS, "hydra.run.dir=run")
    for command in (["generate", "run", "--prompt", "a"], ["export", "run", "--type", "q8_0"], ["eval", "run"],
                    ["describe", "run"]):  # fmt: skip
        assert "model=torch_module has no GGUF file" in run_rejected(capsys, *command), command
    assert "load them with PyTorch" in run_rejected(capsys, "generate", "run/model.safetensors", "--prompt", "a")


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (image_classifier(lambda: nn.BatchNorm2d(8)), "changes its buffer 1.num_batches_tracked"),
        (image_classifier(nn.Dropout), "draws random numbers"),
        (nn.Sequential(image_classifier(), nn.Unflatten(1, (2, 5))), r"expected logits \[8, classes\]"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 9)), "9 classes, but targets go up to 9"),
        (nn.LSTM(8, 10), "fails on images"),
        (Detached(64, 10), "result has no gradient"),
        (nn.Sequential(Detached(64, 10), nn.Linear(10, 10).requires_grad_(False)), "result has no gradient"),
        (nn.Flatten(), "has no parameter with requires_grad=True"),
    ],
)
def test_modules_that_cannot_be_trained_exactly_are_refused(net, message):
    with pytest.raises(UserError, match=message):
        toyexp.train(net, "digits", steps=1, **QUIET)
    assert not Path("outputs").exists()


def test_dropout_and_batch_norm_in_eval_mode_are_deterministic_and_allowed():
    for norm in (lambda: nn.BatchNorm2d(8), nn.Dropout):
        result = toyexp.train(image_classifier(norm).eval(), "digits", steps=1, **QUIET)
        assert result.state == "completed"
    assert TorchModule.wrap(image_classifier()).adapt(IMAGES).inputs() == {"images": ("T",)}


def test_the_matrix_of_parts_names_what_a_module_needs():
    by_recipe = {cell.recipe: cell for cell in cells(load()) if cell.model == "torch_module"}
    assert "type model.path=my_module:Net" in by_recipe["scratch"].missing
    assert by_recipe["lora"].reason == "recipe=lora starts from a GGUF file, which model=torch_module does not have"
    assert "token_embd.weight" in by_recipe["warm"].reason


HOSTILE = {
    "model": "defaults: [{override /model: torch_module}]\nmodel: {path: 'evil:Net'}",
    "sweep": "defaults: [{override /model: torch_module}]\n"
    "hydra: {sweeper: {params: {+model.path: 'evil:Net,evil:A'}}}",
    "plugins": "hydra: {sweeper: {params: {plugins: evil}}}",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_configuration_file_cannot_load_a_module(capsys, case):
    Path("evil.py").write_text(
        "import torch\nfrom pathlib import Path\nPath('harm').touch()\nNet = A = torch.nn.Linear"
    )
    Path("theirs/experiment").mkdir(parents=True)
    Path("theirs/experiment/x.yaml").write_text(f"# @package _global_\n{HOSTILE[case]}\n")
    for launcher in ("serial", "processes", "stacked"):
        words = ["--config-dir", "theirs", "-m", "experiment=x", *DATA, "seed=1,2", f"sweep.launcher={launcher}"]
        assert "only the command line can load" in run_rejected(capsys, *words)
    run(*WORDS, "hydra.run.dir=run", "checkpoint_every=3")
    for file in Path("run").rglob("*"):
        if file.name in ("config.yaml", "state.json"):
            file.write_text(file.read_text().replace("my_net", "evil"))
    for words in (["resume=run", "steps=9"], ["--config-path", "run"], ["eval", "run"], ["describe", "run"]):
        run_rejected(capsys, *words)
    assert not Path("harm").exists()
