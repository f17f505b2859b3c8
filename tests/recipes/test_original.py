"""`recipe.init=toy` compared number by number with the original's loops, and GPT-2 as the original computes it."""

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


# -- GPT2SeqEngine of the original, line by line
# ------------------------------------------------------------------------


class GPT2SeqEngine:
    """rand_unit, random_mat and realize! of the original: a list of matrices per kind of weight, in its order."""

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


def weights_by_gguf_name(original, n_layers, n_heads):
    """Return the original's weights by GGUF names; attn_qkv has the heads of q, then of k, then of v."""
    weights = {"token_embd.weight": original.wte, "position_embd.weight": original.wpe}
    for li in range(n_layers):
        heads = range(li * n_heads, (li + 1) * n_heads)
        qkv = [row for w in (original.w_q, original.w_k, original.w_v) for hi in heads for row in w[hi]]
        weights[f"blk.{li}.attn_qkv.weight"] = qkv
        weights[f"blk.{li}.attn_output.weight"] = original.w_o[li]
        weights[f"blk.{li}.ffn_up.weight"] = original.fc_w[li]
        weights[f"blk.{li}.ffn_down.weight"] = original.pr_w[li]
    return {name: np.array(rows).astype(np.float32) for name, rows in weights.items()}


@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3])
def test_gpt2_starts_from_exactly_the_originals_numbers(seed):
    expected = weights_by_gguf_name(GPT2SeqEngine(VOCAB, 32, 4, 64, 2, CONTEXT, seed), n_layers=2, n_heads=4)
    with start_session(Scratch(init="toy"), ENGINE, plan("gpt2", seed=seed)) as session:
        for tensor in session.plan.tensors:
            values = session.download(tensor.name)
            if tensor.name in expected:
                np.testing.assert_array_equal(values, expected.pop(tensor.name), tensor.name)
            else:  # norm weights and biases
                assert (values == (1 if tensor.name.endswith("norm.weight") else 0)).all(), tensor.name
    assert not expected


def test_the_first_numbers_agree_with_a_calculation_by_hand():
    """The recurrence is s -> (1103515245 s + 12345) & 0x7fffffff, (s >> 8) / 2^23 - 1, from s = 0."""
    golden = [(12345 >> 8) / 2**23 - 1, (1406932606 >> 8) / 2**23 - 1, (654583775 >> 8) / 2**23 - 1]
    np.testing.assert_array_equal(LCG(0).uniform(3), golden)
    assert golden[:2] == [-0.9999942779541016, -0.3448460102081299]
    many = LCG(0).uniform(1 << 16)
    assert -1 <= many.min() < -0.999 and -0.001 < many.max() < 0  # a comment in the original claims [-1, 1)


def test_draws_do_not_depend_on_the_number_drawn_at_once():
    single_draw, several_draws = LCG(5), LCG(5)
    parts = [several_draws.states(n) for n in (1, 0, 2, 7, 64, 129)]
    np.testing.assert_array_equal(single_draw.states(203), np.concatenate(parts))
    assert single_draw.state == several_draws.state


# -- llama -------------------------------------------------------------------------------------------------------------


class LlamaDraws:
    """The original's generator of normal values, which come in pairs."""

    def __init__(self, seed):
        self.state, self.pending = ((seed + 104729) * 2654435761) % 2147483647, []
        for _ in range(8):
            self.u()

    def u(self):
        self.state = (self.state * 1103515245 + 12345) & 0x7FFFFFFF
        return (self.state + 1) / 2147483648.0

    def normal(self):
        if not self.pending:
            radius, angle = math.sqrt(-2 * math.log(self.u())), 2 * math.pi * self.u()
            self.pending = [radius * math.sin(angle), radius * math.cos(angle)]
        return self.pending.pop()

    def matrix(self, rows, cols, std):
        return np.array([[std * self.normal() for _ in range(cols)] for _ in range(rows)])


def test_the_folded_seed_and_the_first_pair_have_known_values():
    assert (104729 * 2654435761) % 2147483647 == 349742325
    assert LCG.for_llama(0).state == 926776749
    np.testing.assert_allclose(LCG.for_llama(0).normal(2), [0.1711227734, 0.7065110861], rtol=1e-9)


def pair_rope_rows(head):
    """Reorder a head's rows from rope on features (i, i + D/2) to rope on (2i, 2i+1)."""
    half = len(head) // 2
    return [row for i in range(half) for row in (head[i], head[i + half])]


def llama_values(seed, model, width=None):
    """Return every drawn tensor in the original's order; `width` is the donor's width if there is a lens."""
    draws, d, ff, size = LlamaDraws(seed), model.d_model, model.d_ff, model.d_model // model.n_heads
    inner, outer = 1 / math.sqrt(d), 1 / math.sqrt(ff)
    weights = {"token_embd.weight": draws.matrix(VOCAB, width or d, 0.02)}
    if width:
        weights["lens.proj.weight"] = draws.matrix(d, width, 1 / math.sqrt(width))
    if not model.tied:
        weights["output.weight"] = draws.matrix(VOCAB, d, 0.02)
    for i in range(model.n_layers):
        b = f"blk.{i}."
        q = [row for _ in range(model.n_heads) for row in pair_rope_rows(draws.matrix(size, d, inner))]
        k, v = [], []
        for _ in range(model.n_kv_heads):
            k += pair_rope_rows(draws.matrix(size, d, inner))
            v += list(draws.matrix(size, d, inner))
        weights |= {b + "attn_q.weight": q, b + "attn_k.weight": k, b + "attn_v.weight": v}
        weights[b + "attn_output.weight"] = draws.matrix(d, d, inner)
        weights[b + "ffn_gate.weight"] = draws.matrix(ff, d, inner)
        weights[b + "ffn_up.weight"] = draws.matrix(ff, d, inner)
        weights[b + "ffn_down.weight"] = draws.matrix(d, ff, outer)
    return weights


def assert_initial_values(session: Session, expected):
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
        assert_initial_values(session, llama_values(3, MODELS[name]))


def test_recipe_warm_draws_the_embedding_at_the_donors_width_and_then_the_lens(donor):
    recipe = Warm(donor=donor, lens="random", init="toy")
    with start_session(recipe, ENGINE, plan("llama", seed=3, recipe=recipe)) as session:
        expected = llama_values(3, MODELS["llama"], width=48)
        expected["token_embd.weight"] = np.full((VOCAB, 48), 0.25)  # the donor's rows replace the drawn ones
        assert_initial_values(session, expected)


@pytest.fixture
def donor(tmp_path):
    from toyexp.formats.gguf.write import write_model

    model = replace(MODELS["llama"], d_model=48, vocab=VOCAB)
    values = {t.name: np.full(t.shape, 0.25, np.float32) for t in model.tensors()}
    write_model(tmp_path / "donor.gguf", model, values, None)
    return str(tmp_path / "donor.gguf")


# -- models and recipes that accept init=toy
# ------------------------------------------------------------------------------


def test_models_that_the_original_does_not_have_are_rejected():
    with pytest.raises(UserError, match=r"must share its output layer with the embedding; use model\.tied=true"):
        plan("gpt2_untied", recipe=Scratch(init="toy"))
    model = ViT(d_model=16, n_heads=2, d_ff=16).fit(image_dataset())
    with pytest.raises(UserError, match=r"recipe\.init=toy: supports gpt2 and llama only; .* model=vit"):
        Scratch(init="toy").plan(model, None)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("recipe.init=toi", "recipe.init=toi: did you mean toy?"),
        ("recipe=warm recipe.init=lcg", "recipe.init=lcg: choose one of: default, toy"),
        ("init=toy", "unknown key init; did you mean recipe.init?"),
        ("recipe=vit_tiny model=vit data=digits recipe.init=toy",
         "unknown key recipe.init with recipe=vit_tiny; it belongs to recipe=scratch or warm: "
         "choose that, or leave the key out"),
    ],
)  # fmt: skip
def test_a_misplaced_init_is_rejected_with_the_right_key(words, error, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    assert capsys.readouterr().err.startswith(f"toyexp: error: {error}")
    assert not list(tmp_path.iterdir())


# -- the original's forward pass ---------------------------------------------------------------------------------------


def forward_of_original(w, ids, n_heads, n_layers):
    """Compute build_forward! of the original in float64: a loop over heads, with V's bias added to the attention
    output.
    """

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


def test_gpt2_has_the_logits_of_the_originals_graph():
    draw, batch = np.random.default_rng(0), batches(rows=3).batch(0)
    with TorchCPU(threads=1, dtype="float64").realize(plan("gpt2")) as session:
        values = {t.name: draw.normal(0, 0.3, t.shape).astype(np.float32) for t in session.plan.tensors}
        for name, array in values.items():
            session.upload(name, array)
        session.build()
        ours = session.logits(batch)
    for ids, logits in zip(batch["tokens"], ours, strict=True):
        expected = forward_of_original({n: a.astype(np.float64) for n, a in values.items()}, ids, n_heads=4, n_layers=2)
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)  # logits are float32


def test_models_with_the_originals_initial_values_learn(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("It was a bright cold day in April. " * 200)
    line = ["data=text", "data.path=book.txt", "data.tokenizer=byte", "engine=ggml", "engine.threads=1", "steps=30",
            "callbacks=[]", "model.d_model=32", "recipe.init=toy"]  # fmt: skip
    for model in ("llama", "gpt2"):
        assert main([*line, f"model={model}", "lr=0.01"]) == 0
        before, after = capsys.readouterr().out.partition("held-out loss ")[2].split()[0::2][:2]
        assert float(after) < float(before) - 1.5, model
