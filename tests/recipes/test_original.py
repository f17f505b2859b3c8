"""`recipe.init=toy` against the original's own loops, one number at a time; and GPT-2 as the seed writes it."""

import math
from dataclasses import replace

import numpy as np
import pytest
from tiny import CONTEXT, MODELS, VOCAB, batches, plan

from toyexp import UserError
from toyexp.cli.main import main
from toyexp.interfaces.recipe import start_session
from toyexp.interfaces.session import Session
from toyexp.testing import RecipeSuite, image_dataset
from toyexp_models.vit import ViT
from toyexp_recipes.original import LCG
from toyexp_recipes.scratch import Scratch
from toyexp_recipes.warm import Warm
from toyexp_torch.engines import TorchCPU

ENGINE = TorchCPU(threads=1)


class TestScratchAsTheOriginal(RecipeSuite):
    recipe = Scratch(init="toy")
    model = MODELS["gpt2"]


# -- the seed's GPT2SeqEngine, line by line ----------------------------------------------------------------------------


class GPT2SeqEngine:
    """rand_unit, random_mat and realize! of the seed: a list of matrices for every kind of weight, in its order."""

    def __init__(self, vocab, d_model, n_heads, d_ff, n_layers, context, seed):
        self.rng = seed
        d_head = d_model // n_heads
        self.wte = self.random_mat(vocab, d_model, 0.02)
        self.wpe = self.random_mat(context, d_model, 0.02)
        self.w_q, self.w_k, self.w_v, self.w_o, self.fc_w, self.pr_w = [], [], [], [], [], []
        for _ in range(n_layers):
            for _ in range(n_heads):
                self.w_q.append(self.random_mat(d_head, d_model, 0.02))
                self.w_k.append(self.random_mat(d_head, d_model, 0.02))
                self.w_v.append(self.random_mat(d_head, d_model, 0.02))
            self.w_o.append(self.random_mat(d_model, d_model, 0.02))
            self.fc_w.append(self.random_mat(d_ff, d_model, 0.02))
            self.pr_w.append(self.random_mat(d_model, d_ff, 0.02))

    def rand_unit(self):
        self.rng = ((self.rng * 1103515245) + 12345) & 0x7FFFFFFF
        return (float(self.rng >> 8) / 8388608.0) - 1.0

    def random_mat(self, rows, cols, scale):
        return [[self.rand_unit() * scale for _ in range(cols)] for _ in range(rows)]


def gguf_names(seed_engine, n_layers, n_heads):
    """The seed's weights under GGUF names: the heads of q, then of k, then of v."""
    named = {"token_embd.weight": seed_engine.wte, "position_embd.weight": seed_engine.wpe}
    for li in range(n_layers):
        heads = range(li * n_heads, (li + 1) * n_heads)
        qkv = [row for w in (seed_engine.w_q, seed_engine.w_k, seed_engine.w_v) for hi in heads for row in w[hi]]
        named[f"blk.{li}.attn_qkv.weight"] = qkv
        named[f"blk.{li}.attn_output.weight"] = seed_engine.w_o[li]
        named[f"blk.{li}.ffn_up.weight"] = seed_engine.fc_w[li]
        named[f"blk.{li}.ffn_down.weight"] = seed_engine.pr_w[li]
    return {name: np.array(rows).astype(np.float32) for name, rows in named.items()}


@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3])
def test_gpt2_starts_from_the_seeds_very_numbers(seed):
    expected = gguf_names(GPT2SeqEngine(VOCAB, 32, 4, 64, 2, CONTEXT, seed), n_layers=2, n_heads=4)
    with start_session(Scratch(init="toy"), ENGINE, plan("gpt2", seed=seed)) as session:
        for tensor in session.plan.tensors:
            values = session.download(tensor.name)
            if tensor.name in expected:
                np.testing.assert_array_equal(values, expected.pop(tensor.name), tensor.name)
            else:  # the norms' gamma and beta, and the biases
                assert (values == (1 if tensor.name.endswith("norm.weight") else 0)).all(), tensor.name
    assert not expected


def test_the_first_numbers_are_these():
    """Worked out by hand from s -> (1103515245 s + 12345) & 0x7fffffff, (s >> 8) / 2^23 - 1, from 0."""
    golden = [(12345 >> 8) / 2**23 - 1, (1406932606 >> 8) / 2**23 - 1, (654583775 >> 8) / 2**23 - 1]
    np.testing.assert_array_equal(LCG(0).uniform(3), golden)
    assert golden[:2] == [-0.9999942779541016, -0.3448460102081299]
    many = LCG(0).uniform(1 << 16)
    assert -1 <= many.min() < -0.999 and -0.001 < many.max() < 0  # the seed's comment says [-1, 1)


def test_draws_do_not_depend_on_how_many_are_taken_at_once():
    at_once, piecemeal = LCG(5), LCG(5)
    parts = [piecemeal.states(n) for n in (1, 0, 2, 7, 64, 129)]
    np.testing.assert_array_equal(at_once.states(203), np.concatenate(parts))
    assert at_once.state == piecemeal.state


# -- llama -------------------------------------------------------------------------------------------------------------


class LlamaDraws:
    """The original's normal values, one pair at a time."""

    def __init__(self, seed):
        self.s, self.kept = ((seed + 104729) * 2654435761) % 2147483647, []
        for _ in range(8):
            self.u()

    def u(self):
        self.s = (self.s * 1103515245 + 12345) & 0x7FFFFFFF
        return (self.s + 1) / 2147483648.0

    def normal(self):
        if not self.kept:
            radius, angle = math.sqrt(-2 * math.log(self.u())), 2 * math.pi * self.u()
            self.kept = [radius * math.sin(angle), radius * math.cos(angle)]
        return self.kept.pop()

    def matrix(self, rows, cols, std):
        return np.array([[std * self.normal() for _ in range(cols)] for _ in range(rows)])


def test_the_fold_and_the_first_pair_are_the_known_ones():
    assert (104729 * 2654435761) % 2147483647 == 349742325
    assert LCG.for_llama(0).state == 926776749
    np.testing.assert_allclose(LCG.for_llama(0).normal(2), [0.1711227734, 0.7065110861], rtol=1e-9)


def neighbours(head):
    """A head's rows for rope on (2i, 2i+1), from rows for rope on (i, i + D/2)."""
    half = len(head) // 2
    return [row for i in range(half) for row in (head[i], head[i + half])]


def llama_values(seed, model, width=None):
    """Every drawn tensor, in the original's order; `width` is the donor's, where there is a lens."""
    draws, d, ff, size = LlamaDraws(seed), model.d_model, model.d_ff, model.d_model // model.n_heads
    inner, outer = 1 / math.sqrt(d), 1 / math.sqrt(ff)
    named = {"token_embd.weight": draws.matrix(VOCAB, width or d, 0.02)}
    if width:
        named["lens.proj.weight"] = draws.matrix(d, width, 1 / math.sqrt(width))
    if not model.tied:
        named["output.weight"] = draws.matrix(VOCAB, d, 0.02)
    for i in range(model.n_layers):
        b = f"blk.{i}."
        q = [row for _ in range(model.n_heads) for row in neighbours(draws.matrix(size, d, inner))]
        k, v = [], []
        for _ in range(model.n_kv_heads):
            k += neighbours(draws.matrix(size, d, inner))
            v += list(draws.matrix(size, d, inner))
        named |= {b + "attn_q.weight": q, b + "attn_k.weight": k, b + "attn_v.weight": v}
        named[b + "attn_output.weight"] = draws.matrix(d, d, inner)
        named[b + "ffn_gate.weight"] = draws.matrix(ff, d, inner)
        named[b + "ffn_up.weight"] = draws.matrix(ff, d, inner)
        named[b + "ffn_down.weight"] = draws.matrix(d, ff, outer)
    return named


def assert_starts_from(session: Session, expected):
    for tensor in session.plan.tensors:
        values = session.download(tensor.name)
        if tensor.name in expected:
            np.testing.assert_allclose(values, expected.pop(tensor.name), rtol=2e-7, atol=1e-12, err_msg=tensor.name)
        else:
            assert (values == (1 if tensor.name.endswith("norm.weight") else 0)).all(), tensor.name
    assert not expected


@pytest.mark.parametrize("name", ["llama", "llama_tied_bias"])
def test_llama_starts_from_the_originals_numbers(name):
    with start_session(Scratch(init="toy"), ENGINE, plan(name, seed=3)) as session:
        assert_starts_from(session, llama_values(3, MODELS[name]))


def test_warm_draws_the_table_at_the_donors_width_and_then_the_lens(donor):
    recipe = Warm(donor=donor, lens="random", init="toy")
    with start_session(recipe, ENGINE, plan("llama", seed=3, recipe=recipe)) as session:
        expected = llama_values(3, MODELS["llama"], width=48)
        expected["token_embd.weight"] = np.full((VOCAB, 48), 0.25)  # the donor's rows, over what was drawn
        assert_starts_from(session, expected)


@pytest.fixture
def donor(tmp_path):
    from toyexp.formats.gguf.write import write_model

    model = replace(MODELS["llama"], d_model=48, vocab=VOCAB)
    values = {t.name: np.full(t.shape, 0.25, np.float32) for t in model.tensors()}
    write_model(tmp_path / "donor.gguf", model, values, None)
    return str(tmp_path / "donor.gguf")


# -- who may ask for it ------------------------------------------------------------------------------------------------


def test_models_the_original_draws_otherwise_are_refused():
    with pytest.raises(UserError, match=r"the original's gpt2 has no output layer of its own; use model\.tied=true"):
        plan("gpt2_untied", recipe=Scratch(init="toy"))
    model = ViT(d_model=16, n_heads=2, d_ff=16).fit(image_dataset())
    with pytest.raises(UserError, match=r"recipe\.init=toy draws gpt2 and llama .* model=vit"):
        Scratch(init="toy").plan(model, None)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("recipe.init=toi", "recipe.init=toi: did you mean toy?"),
        ("recipe=warm recipe.init=lcg", "recipe.init=lcg: there is: default, toy"),
        ("init=toy", "unknown key init; did you mean recipe.init?"),
        ("recipe=vit_tiny model=vit data=digits recipe.init=toy",
         "unknown key recipe.init with recipe=vit_tiny; it belongs to recipe=scratch or warm: "
         "choose that, or leave the key out"),
    ],
)  # fmt: skip
def test_init_elsewhere_is_an_error_that_says_where(words, error, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    assert capsys.readouterr().err.startswith(f"toyexp: error: {error}")
    assert not list(tmp_path.iterdir())


# -- the seed's forward pass -------------------------------------------------------------------------------------------


def seed_forward(w, ids, n_heads, n_layers):
    """build_forward! of the seed in float64: a loop over heads, V's bias added to what attention gives."""

    def layer_norm(x, name):
        centred = x - x.mean(-1, keepdims=True)
        eps = 1.0e-5
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(0.79788456080286535588 * x * (1 + 0.044715 * x * x)))

    x = w["token_embd.weight"][ids] + w["position_embd.weight"][: len(ids)]
    length, d = x.shape
    size = d // n_heads
    for li in range(n_layers):
        b = f"blk.{li}."
        h1 = layer_norm(x, b + "attn_norm")
        heads = []
        for hh in range(n_heads):
            rows = [slice(part * d + hh * size, part * d + (hh + 1) * size) for part in range(3)]
            (w_q, w_k, w_v), (b_q, b_k, b_v) = ([w[f"{b}attn_qkv.{n}"][r] for r in rows] for n in ("weight", "bias"))
            q, k, v = h1 @ w_q.T + b_q, h1 @ w_k.T + b_k, h1 @ w_v.T
            scores = q @ k.T * (1.0 / math.sqrt(size)) + np.triu(np.full((length, length), -np.inf), 1)
            probs = np.exp(scores - scores.max(-1, keepdims=True))
            probs /= probs.sum(-1, keepdims=True)
            heads.append(probs @ v + b_v)
        x = x + np.concatenate(heads, -1) @ w[b + "attn_output.weight"].T + w[b + "attn_output.bias"]
        act = gelu(layer_norm(x, b + "ffn_norm") @ w[b + "ffn_up.weight"].T + w[b + "ffn_up.bias"])
        x = x + act @ w[b + "ffn_down.weight"].T + w[b + "ffn_down.bias"]
    return layer_norm(x, "output_norm") @ w["token_embd.weight"].T


def test_gpt2_computes_what_the_seeds_graph_computes():
    drawn, one = np.random.default_rng(0), batches(rows=3).batch(0)
    with TorchCPU(threads=1, dtype="float64").realize(plan("gpt2")) as session:
        values = {t.name: drawn.normal(0, 0.3, t.shape).astype(np.float32) for t in session.plan.tensors}
        for name, array in values.items():
            session.upload(name, array)
        session.build()
        ours = session.logits(one)
    for ids, logits in zip(one["tokens"], ours, strict=True):
        seeds = seed_forward({n: a.astype(np.float64) for n, a in values.items()}, ids, n_heads=4, n_layers=2)
        np.testing.assert_allclose(logits, seeds, rtol=1e-5, atol=1e-5)  # logits come as float32


def test_what_starts_from_them_learns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("It was a bright cold day in April. " * 200)
    line = ["data=text", "data.path=book.txt", "data.tokenizer=byte", "engine=ggml", "engine.threads=1", "steps=30",
            "callbacks=[]", "model.d_model=32", "recipe.init=toy"]  # fmt: skip
    for model in ("llama", "gpt2"):
        assert main([*line, f"model={model}", "lr=0.01"]) == 0
        before, after = capsys.readouterr().out.partition("held-out loss ")[2].split()[0::2][:2]
        assert float(after) < float(before) - 1.5, model
