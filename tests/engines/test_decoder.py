"""A decoder's logits equal those of the whole forward pass, however the sequence is divided."""

import dataclasses
import json

import numpy as np
import pytest
from tiny import CONTEXT, MODELS, VOCAB, batches, plan, write_base

from toyexp import AdamW, Recompute, SessionError, Setup, reason_to_recompute
from toyexp.cli.main import main
from toyexp.interfaces.recipe import start_session
from toyexp.reference.engine import reference_logits
from toyexp.testing import ModelSuite, image_dataset, token_dataset
from toyexp.testing.null import NullEngine
from toyexp.tokenizers.byte_level import Bytes
from toyexp_ggml.engines import GGMLCPU
from toyexp_models.llama import Llama
from toyexp_models.vit import ViT
from toyexp_recipes.lora import Lora
from toyexp_recipes.scratch import VitTiny
from toyexp_recipes.warm import Warm
from toyexp_torch.engines import TorchCPU
from toyexp_torch.ops import CHUNK, CachedDecoder

IDS = np.random.default_rng(3).integers(0, VOCAB, CONTEXT).astype(np.int32)
# Divisions of the sequence: one piece, single tokens, and pieces of several sizes.
CUTS = {"whole": [CONTEXT], "tokens": [1] * CONTEXT, "pieces": [5, 1, 4, 2], "prompt": [7, *[1] * (CONTEXT - 7)]}


def build_session(the_plan, engine=None, **settings):
    session = (engine or TorchCPU(threads=1, **settings)).realize(the_plan)
    session.build()
    return session


def feed_pieces(decoder, ids, sizes):
    """Feed the pieces; return the logits after each, and their positions."""
    ends = np.cumsum(sizes)
    return np.array([decoder.feed(part) for part in np.split(ids, ends[:-1])]), ends - 1


def assert_decodes(session, ids=IDS, atol=1e-5):
    expected = session.logits({"tokens": ids[None]})[0]
    for name, sizes in CUTS.items():
        decoder = session.decoder()
        logits, positions = feed_pieces(decoder, ids, sizes)
        np.testing.assert_allclose(logits, expected[positions], atol=atol, rtol=0, err_msg=name)
        assert logits.dtype == np.float32 and decoder.position == decoder.context == len(ids)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", MODELS)
def test_cached_keys_and_values_give_the_logits_of_the_full_forward_pass(name, dtype):
    with build_session(plan(name), dtype=dtype) as session:
        assert isinstance(session.decoder(), CachedDecoder)
        assert_decodes(session)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_engines_without_a_cache_recompute_the_sequence(name):
    with build_session(plan(name, rows=1), GGMLCPU(threads=1)) as session:
        assert_decodes(session)


def test_a_bfloat16_decoder_agrees_with_the_full_forward_pass_within_rounding():
    with build_session(plan("llama"), dtype="bfloat16") as session:
        scale = np.abs(session.logits({"tokens": IDS[None]})).max()
        assert_decodes(session, atol=2e-2 * scale)


def test_a_prompt_is_read_in_chunks():
    length = 2 * CHUNK + 10
    small = dataclasses.replace(MODELS["llama"], vocab=VOCAB, context=length)
    the_plan = plan("llama", rows=1)
    inputs = {n: dataclasses.replace(s, shape=(length,)) for n, s in the_plan.inputs.items()}
    with build_session(dataclasses.replace(the_plan, model=small, inputs=inputs)) as session:
        ids = np.resize(IDS, length)
        expected = session.logits({"tokens": ids[None]})[0]
        logits, positions = feed_pieces(session.decoder(), ids, [CHUNK + 3, CHUNK - 1, 8])
        np.testing.assert_allclose(logits, expected[positions], atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_decoder_of_a_quantised_base_ignores_dropout_of_its_adapters(name, tmp_path):
    write_base(tmp_path / "base.gguf", name, "q8_0")
    recipe = Lora(base=str(tmp_path / "base.gguf"), targets=["*"], dropout=0.3)
    the_plan = plan(name, rows=1, recipe=recipe)
    dropped = {a.mask: np.zeros((1, *the_plan.inputs[a.mask].shape), np.float32) for a in the_plan.dropout_adapters}
    with build_session(the_plan, packed=True) as session:
        session.step({**batches(1).batch(0), **dropped}, AdamW.for_lora().hp_for_step(0))
        assert_decodes(session)


def test_a_decoder_of_a_warm_started_model_agrees_with_the_full_forward_pass(tmp_path):
    write_base(tmp_path / "donor.gguf", "llama", d_model=48)
    recipe = Warm(donor=str(tmp_path / "donor.gguf"))
    with start_session(recipe, TorchCPU(threads=1), plan("llama", recipe=recipe)) as session:
        assert_decodes(session)


def test_a_decoder_raises_after_its_session_changed_the_weights():
    with build_session(plan("llama")) as session:
        untrained, before = session.snapshot(), session.decoder()
        first = before.feed(IDS[:4])
        session.step(batches().batch(0), AdamW.for_lora().hp_for_step(0))
        with pytest.raises(SessionError, match="has taken a step"):
            before.feed(IDS[4:5])
        assert np.abs(session.decoder().feed(IDS[:4]) - first).max() > 1e-4
        assert_decodes(session)
        stepped = session.decoder()
        stepped.feed(IDS[:4])
        session.restore(untrained)
        with pytest.raises(SessionError, match="request a new decoder"):
            stepped.feed(IDS[4:5])
        np.testing.assert_array_equal(session.decoder().feed(IDS[:4]), first)


class Scan(Llama):
    """Model that sums earlier positions in log2(T) steps; a single position takes none."""

    def embed(self, ops, table, tokens):
        x, shift = super().embed(ops, table, tokens), 1
        while shift < (length := x.shape[1]):
            nothing = ops.scale(ops.part(x, 1, 0, shift), 0.0)
            x, shift = ops.add(x, ops.concat([nothing, ops.part(x, 1, 0, length - shift)], 1)), 2 * shift
        return ops.scale(x, 0.5)


class Dynamic(Llama):
    """Model that rotates by angles that depend on the number of positions."""

    def forward(self, ops, p, batch):
        length = batch["tokens"].shape[1]
        return dataclasses.replace(self, rope_base=1000.0 * length).run_rest(ops, p, batch)

    def run_rest(self, ops, p, batch):
        return super().forward(ops, p, batch)


class Scaled(Llama):
    """Model that scales by the number of positions; its ops do not depend on it."""

    def embed(self, ops, table, tokens):
        x = super().embed(ops, table, tokens)
        return ops.scale(x, 1.0 / x.shape[1])


class Split(Llama):
    """Model that reads pairs of positions, and single ones if their number is odd."""

    def embed(self, ops, table, tokens):
        x = super().embed(ops, table, tokens)
        return x if x.shape[1] % 2 else ops.reshape(ops.reshape(x, (1, -1, 1)), x.shape)


class Declaring(Llama):
    """Model that declares that no decoder can cache its positions."""

    cached_decoding = False


def uncacheable_plan(kind, rows=1):
    model = kind(**{f.name: getattr(MODELS["llama"], f.name) for f in dataclasses.fields(Llama)})
    return dataclasses.replace(plan("llama", rows=rows), model=model.fit(token_dataset(VOCAB)))


@pytest.mark.parametrize("engine", [TorchCPU(threads=1, dtype="float64"), TorchCPU(threads=1), GGMLCPU(threads=1)])
@pytest.mark.parametrize("kind", [Scan, Scaled, Dynamic, Declaring])
def test_a_model_whose_ops_depend_on_the_number_of_positions_is_recomputed(kind, engine):
    the_plan = uncacheable_plan(kind)
    values = {t.name: the_plan.initial_values(t) for t in the_plan.tensors}
    expected = reference_logits(the_plan, values, {"tokens": IDS[None]})[0]
    with build_session(the_plan, engine) as session:
        decoder = session.decoder()
        assert isinstance(decoder, Recompute)
        logits = [decoder.feed([i]) for i in IDS]
    np.testing.assert_allclose(logits[-1], expected[-1], atol=1e-5)
    if kind is Scan:  # causal, so that a position's logits do not depend on the length of the row
        np.testing.assert_allclose(logits, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Scan, "ops.part may read"),
        (Scaled, "other ops for 2"),
        (Dynamic, "other ops for 2"),
        (Split, "2 positions"),
        (Declaring, None),
        (Llama, None),
    ],
)
def test_the_conformance_kit_finds_a_model_that_cannot_be_cached(kind, words):
    suite = ModelSuite()
    suite.model = uncacheable_plan(kind).model
    if words is None:
        suite.test_cached_decoding_is_declared_correctly()
    else:
        with pytest.raises(AssertionError, match=rf"{words}.*cached_decoding: ClassVar\[bool\] = False"):
            suite.test_cached_decoding_is_declared_correctly()
    assert bool(reason_to_recompute(uncacheable_plan(kind))) is (kind is not Llama)


@pytest.mark.parametrize("engine", [TorchCPU(threads=1), NullEngine()], ids=["cached", "recompute"])
def test_wrong_ids_are_rejected_and_leave_the_decoder_unchanged(engine):
    the_plan = plan("gpt2")
    below = dataclasses.replace(the_plan.inputs["tokens"], below=VOCAB)
    the_plan = dataclasses.replace(the_plan, inputs={**the_plan.inputs, "tokens": below})
    with build_session(the_plan, engine) as session:
        decoder, other = session.decoder(), session.decoder()
        decoder.feed(IDS[:3])
        for wrong, words in (
            (IDS, "12 ids after 3 earlier ones exceed the context of 12"),
            ([], "expected token ids"),
            ([0.5], "expected token ids"),
            ([[1]], "expected token ids"),
            ([1, -1], "-1 is not one of"),
            ([VOCAB], f"id {VOCAB} is not one of 0..{VOCAB - 1}"),
        ):
            with pytest.raises(SessionError, match=words):
                decoder.feed(wrong)
        assert decoder.position == 3
        np.testing.assert_allclose(decoder.feed(IDS[3:7]), other.feed(IDS[:7]), atol=1e-5)
    with pytest.raises(SessionError, match="closed"):
        decoder.feed(IDS[:1])


def test_only_a_language_model_whose_session_is_built_has_a_decoder():
    with NullEngine().realize(plan("llama")) as session, pytest.raises(SessionError, match="call build"):
        session.decoder()
    dataset = image_dataset()
    model = ViT(d_model=8, n_layers=1, n_heads=2, d_ff=8).fit(dataset)
    setup = Setup(model.batches(dataset, 2, 0).inputs, rows=2)
    with (
        build_session(VitTiny().plan(model, setup), NullEngine()) as session,
        pytest.raises(SessionError, match="model=vit"),
    ):
        session.decoder()


# -- text on the command line -----------------------------------------------------------------------------------------


@pytest.fixture
def run_generate(tmp_path, monkeypatch, capsys):
    """Run `toyexp generate` and return its JSON."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path / "cache"))

    def run(*words):
        assert main(["generate", *words, "--tokens=30", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


ENGINES = ["cpu:threads=1", "cpu:dtype=float64:threads=1", "ggml:threads=1", "metal:emulate=true:threads=1"]


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_every_engine_writes_the_same_text(name, kind, run_generate, tmp_path):
    write_base(tmp_path / "model.gguf", name, kind, tokenizer=Bytes(), context=40)
    for words in (["--temperature=0"], ["--seed=5", "--top-p=0.9"]):
        # ggml's kernels round the factor of a quantised matrix, so its text may differ from there on.
        engines = ENGINES if kind == "f32" else ENGINES[:2]
        texts = [run_generate("model.gguf", "--prompt=Once", *words, f"--engine={engine}") for engine in engines]
        assert len({tuple(text["ids"]) for text in texts}) == 1 and len(texts[0]["ids"]) > 3


def test_a_sample_of_the_trained_model_is_what_generate_writes(run_generate, tmp_path, capsys):
    words = ["data.tokenizer=byte", "data.max_mb=0.05", "steps=30", "model.d_model=32", "model.n_layers=1"]
    words += ["engine=cpu", "engine.threads=1", "callbacks=[default,sample]", "callbacks.sample.temperature=0"]
    assert main([*words, "callbacks.sample.tokens=30", "hydra.run.dir=run"]) == 0
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (sample,) = (event["text"] for event in events if event["kind"] == "sample")
    capsys.readouterr()
    assert run_generate("run", "--prompt=def ", "--temperature=0", "--engine=cpu:threads=1")["text"] == sample
