"""Models and adapters exported for transformers and PEFT have the same results there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from texts import NASTY, hard_pieces
from tiny import SCALES, VOCAB
from transformers_ids import answer_all

from toyexp import InputSpec, Model, ModelExport, Setup, Tokenizer
from toyexp.cli.main import main
from toyexp.formats.file_plan import frozen_plan
from toyexp.formats.gguf.form import read_model
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.write import write_model
from toyexp.formats.huggingface import write_folder
from toyexp.formats.sentencepiece_model import sentencepiece_model
from toyexp.inference.loaded_model import LoadedModel
from toyexp.plugins.discovery import load
from toyexp.tokenizers.byte_level import BPE, Bytes, Characters
from toyexp.tokenizers.chat_template import Template
from toyexp.tokenizers.pretokenizers import PRE_TOKENIZERS
from toyexp.tokenizers.sentencepiece import BLANK, SentencePiece
from toyexp_models.arcee import Arcee
from toyexp_models.gemma3 import Gemma2, Gemma3
from toyexp_models.gpt2 import GPT2
from toyexp_models.granite import Granite
from toyexp_models.huggingface import llama3
from toyexp_models.lfm2 import Lfm2
from toyexp_models.llama import Gemma, Llama, Qwen2, Qwen3
from toyexp_models.mamba2 import Mamba2
from toyexp_models.moe import Olmoe, Qwen3Moe
from toyexp_models.olmo import Olmo2
from toyexp_models.smollm3 import SmolLM3
from toyexp_models.vit import ViT, cut

pytestmark = [
    pytest.mark.judge,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # warnings of transformers and PEFT
]

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the judge is transformers: pip install 'toyexp[test]'")

CONTEXT = 24
SIZES = {"d_model": 32, "n_layers": 2, "n_heads": 4, "context": CONTEXT, "norm_eps": 3e-3}
ROPE = {"head_dim": 12, "rope_base": 500.0, "rope_scale": 2.5}
SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 40}


def factors(base: float, size: int, parameters: dict = SCALED) -> list[float]:
    turns = base ** (-np.arange(0, size, 2) / size) / (2 * np.pi)
    return [float(str(f)) for f in llama3(turns, parameters).astype(np.float32)]


# Settings that differ from their defaults; transformers stores some in another form.
MODELS = {
    "llama": Llama(**SIZES, **ROPE, qkv_bias=True, o_bias=True, ffn_bias=True, d_ff=48),
    "llama3": Llama(**SIZES, rope_base=500.0, rope_factors=factors(500.0, 8), qkv_bias=True, tied=True, n_kv_heads=1),
    "qwen2": Qwen2(**SIZES, d_ff=48, rope_scale=3.0, tied=True),
    "qwen2_without_biases": Qwen2(**SIZES, d_ff=48, qkv_bias=False),
    "qwen3": Qwen3(**SIZES, **ROPE, d_ff=48, qkv_bias=True),
    "gemma": Gemma(**SIZES, d_ff=48, n_kv_heads=1, head_dim=16, rope_scale=1.5),
    "gemma2": Gemma2(**SIZES, d_ff=48, head_dim=16, window=5, score_softcap=2.0, final_softcap=3.0, rope_scale=1.5),
    "gemma3": Gemma3(**{**SIZES, "n_layers": 3}, **ROPE, d_ff=48, window=5, window_period=3, final_softcap=3.0),
    "gemma3_full": Gemma3(**SIZES, d_ff=48, n_kv_heads=1, window=0),
    "granite": Granite(**SIZES, **ROPE, **SCALES, qkv_bias=True, ffn_bias=True, d_ff=48),
    "olmo2": Olmo2(**SIZES, d_ff=48, rope_scale=2.5),
    "arcee": Arcee(**SIZES, **ROPE, d_ff=48, qkv_bias=True),
    "smollm3": SmolLM3(**{**SIZES, "n_layers": 5}, **ROPE, d_ff=48, qkv_bias=True, tied=True),
    "qwen3moe": Qwen3Moe(**SIZES, **ROPE, d_ff=24, experts=5, experts_used=3, tied=True, qkv_bias=True),
    "olmoe": Olmoe(**SIZES, d_ff=24),
    "lfm2": Lfm2(
        **{**SIZES, "n_layers": 3}, d_ff=48, rope_base=500.0, rope_scale=2.5, conv_length=4, attention_layers=[1]
    ),
    "mamba2": Mamba2(**SIZES, d_ff=64, n_groups=2, state=8, conv_length=3),
    "mamba2_wide": Mamba2(**SIZES, d_ff=96, state=8, tied=True),
    "gpt2": GPT2(**SIZES, d_ff=96),
    "gpt2_untied": GPT2(**SIZES, d_ff=96, tied=False),
}


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> BPE:
    """Return a BPE tokenizer with two control tokens; one ends generation."""
    bpe = BPE.train([*NASTY, "the cat sat on the mat, again and again. " * 9], 300)
    chat_tokenizer = BPE([*bpe.pieces, "<|im_start|>", "<|im_end|>"], bpe.merges, bpe.eos)
    chat_tokenizer.controls, chat_tokenizer.extra_end_ids = (
        frozenset({bpe.vocab, bpe.vocab + 1}),
        frozenset({bpe.vocab + 1}),
    )
    chat_tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    )
    return chat_tokenizer


def draw_values(model: Model) -> dict[str, np.ndarray]:
    """Return random values, also for norms and biases."""
    rng = np.random.default_rng(5)
    values_by_name = {}
    for t in model.tensors():
        spread = 0.3 if "embd" in t.name or t.name == "output.weight" else 2 / np.sqrt(model.settings()["d_model"])
        numbers = rng.normal(0, 0.3 if len(t.shape) == 1 else spread, t.shape)
        values_by_name[t.name] = (numbers + t.name.endswith("norm.weight")).astype(np.float32)
    return values_by_name


def write_random_model(path: Path, name: str, tokenizer: Tokenizer | None) -> Model:
    model = replace(MODELS[name], vocab=tokenizer.vocab + 2 if tokenizer else VOCAB)
    write_model(path, model, draw_values(model), tokenizer)
    return model


def compute_logits(model: Model, path: Path, ids: np.ndarray, adapter: Path | None = None) -> np.ndarray:
    """Return logits [B, T, V] of toyexp's torch engine."""
    from toyexp_torch.engines import TorchCPU

    plan = frozen_plan(model, path, Setup(model.reads.inputs(ids.shape[1]), rows=len(ids)), adapter)
    with TorchCPU(threads=1).realize(plan) as session:
        session.build()
        return session.logits({"tokens": ids.astype(np.int32)})


def load_with_transformers(path: Path, kind: str = "AutoModelForCausalLM"):
    """Load a directory with transformers; fail if any tensor is missing or unexpected."""
    import transformers

    model, loading_info = getattr(transformers, kind).from_pretrained(
        path, local_files_only=True, output_loading_info=True
    )
    assert not any(loading_info.values()), loading_info
    return model.float().eval()


def transformers_logits(theirs, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return theirs(torch.tensor(ids)).logits.numpy()


RARE = ("llama", "qwen2_without_biases", "gpt2_untied")  # models that the others cover; for -m full


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n in RARE)) for n in MODELS])
def test_transformers_has_the_same_logits_and_text(tmp_path, capsys, tokenizer, name):
    model = write_random_model(Path("m.gguf"), name, tokenizer)
    assert main(["export", "m.gguf", "--type", "hf"]) == 0
    theirs = load_with_transformers(tmp_path / "m-hf")
    ids = np.random.default_rng(0).integers(0, model.vocab, (2, CONTEXT))
    ours = compute_logits(model, tmp_path / "m.gguf", ids)
    assert ours.std() > 0.5
    np.testing.assert_allclose(transformers_logits(theirs, ids), ours, rtol=0, atol=1e-4)
    capsys.readouterr()
    words = ["--ids", "5,9,100,7", "--tokens", "16", "--temperature", "0", "--engine", "cpu:threads=1", "--json"]
    assert main(["generate", "m.gguf", *words]) == 0
    expected = json.loads(capsys.readouterr().out)["ids"]
    spare = [tokenizer.vocab, tokenizer.vocab + 1]  # rows without a token, which toyexp never samples
    text = theirs.generate(torch.tensor([[5, 9, 100, 7]]), max_new_tokens=16, suppress_tokens=spare)[0, 4:].tolist()
    ends = {tokenizer.eos, *tokenizer.extra_end_ids}
    assert [i for i in text if i not in ends] == expected and len(expected) > 3


@pytest.mark.parametrize("name", MODELS)
def test_directories_of_transformers_have_the_same_logits(tmp_path, tokenizer, name):
    """Both a directory that toyexp wrote and one that transformers wrote, in shards."""
    write_random_model(Path("m.gguf"), name, tokenizer)
    assert main(["export", "m.gguf", "--type", "hf"]) == 0
    theirs = load_with_transformers(tmp_path / "m-hf")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=20_000)
    assert len([*Path("theirs").glob("model-*.safetensors")]) > 1
    tolerance = 7e-5 if name == "smollm3" else 2e-5  # transformers computes smollm3's angles in another order
    for folder in ("m-hf", "theirs"):
        base = LoadedModel.open(tmp_path / folder, load())
        ids = np.random.default_rng(0).integers(0, base.model.settings()["vocab"], (2, CONTEXT))
        ours = compute_logits(base.model, base.path, ids)
        assert ours.std() > 0.5
        np.testing.assert_allclose(ours, transformers_logits(theirs, ids), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("changes", "context"), [({}, 9), ({"sliding_window": 99}, 40), ({"sliding_window": None}, 40)]
)
def test_a_mistral_with_a_window_is_a_llama_whose_context_is_the_window(tmp_path, changes, context):
    import torch
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "max_position_embeddings": 40, "sliding_window": 9, "initializer_range": 0.3}
    config = transformers.MistralConfig(vocab_size=VOCAB, **sizes, **(more | changes))
    torch.manual_seed(0)
    theirs = transformers.MistralForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "mistral")
    base = LoadedModel.open(tmp_path / "mistral", load())
    assert (base.model.name, base.model.context) == ("llama", context)
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, context))
    ours = compute_logits(base.model, base.path, ids)
    np.testing.assert_allclose(ours, transformers_logits(theirs, ids), rtol=0, atol=2e-5)


@pytest.mark.parametrize(("kind", "tolerance"), [("hf-bf16", 2**-8), ("hf-f16", 2**-11)])
def test_smaller_types_round_each_weight_once(tmp_path, tokenizer, kind, tolerance):
    write_random_model(Path("m.gguf"), "gemma", tokenizer)
    for type_name in ("hf", kind):
        assert main(["export", "m.gguf", "--type", type_name]) == 0
    exact, rounded = (load_with_transformers(tmp_path / f"m-{k}").state_dict() for k in ("hf", kind))
    for name, numbers in exact.items():
        assert ((rounded[name] - numbers).abs() <= tolerance * numbers.abs() + 1e-7).all(), name
    config = json.loads((tmp_path / f"m-{kind}" / "config.json").read_text())
    assert config["torch_dtype"] == {"hf-bf16": "bfloat16", "hf-f16": "float16"}[kind]


# -- tokenizers -------------------------------------------------------------------------------------------------------


TEXTS = [*NASTY, "'S \u017f 12345 e\u0301 \r\n\n  x<tool>y\t \tz", "the cat <|im_start|>sat</s>"]
TALK = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Ho"}]
KINDS = ("bpe", "byte", "char", "spm", "spm_bare")
CUTS = ("llama-bpe", "qwen2", "smollm", "tekken", "default")
# Every family with every kind of tokenizer, and more pre-tokenizers for families that have several.
FAMILIES = [(family, kind) for family, model in MODELS.items() if family == model.name for kind in KINDS]
FAMILIES += [(family, pre) for family in ("llama", "qwen2") for pre in CUTS]


def make_sentencepiece(prefix: bool = True) -> SentencePiece:
    """Return a SentencePiece tokenizer with byte tokens and two user-defined tokens; every text begins with <s>."""
    tokenizer = hard_pieces(prefix)
    tokenizer.bos, tokenizer.add_bos, tokenizer.add_eos = 1, True, not prefix
    tokenizer.controls, tokenizer.user_defined = frozenset({0, 1}), frozenset({259, 260})
    return tokenizer


def train_bpe(pre: str) -> BPE:
    """Return a BPE tokenizer trained with this pre-tokenizer."""
    tokenizer = BPE.train([*TEXTS, "the cat sat on the mat, again and again. " * 9], 320, PRE_TOKENIZERS[pre])
    tokenizer.add_bos = PRE_TOKENIZERS[pre].add_bos
    return tokenizer


@pytest.fixture(scope="module")
def directories(tmp_path_factory, tokenizer):
    """Return the question about each family's directory with each tokenizer, and toyexp's answer."""
    root = tmp_path_factory.mktemp("directories")
    tokenizers = {
        "bpe": tokenizer,
        "byte": Bytes(),
        "char": Characters.from_texts(TEXTS),
        "spm": make_sentencepiece(),
        "spm_bare": make_sentencepiece(False),
    }
    tokenizers |= {pre: train_bpe(pre) for pre in CUTS}
    questions_and_answers = {}
    for family, kind in FAMILIES:
        path, t = root / f"{family}-{kind}", tokenizers[kind]
        model = replace(MODELS[family], vocab=t.vocab)
        zeros = {spec.name: np.zeros(spec.shape, np.float32) for spec in model.tensors()}
        write_folder(path, ModelExport(model, zeros, t))
        ids = [t.encode(text, special=True).tolist() for text in TEXTS]
        chat = TALK if t.chat_template else None
        chat_text = Template(t.chat_template, t, path).render(TALK, answer=False).text if chat else ""
        answer = {
            "ids": ids,
            "prompts": [[t.bos] * t.add_bos + i + [t.eos] * t.add_eos for i in ids],
            "decoded": [t.decode(i) for i in ids],
            "chat": chat and t.encode(chat_text, special=True).tolist(),
            "size": t.vocab,
            "special": [t.bos, t.eos, t.padding],
            "padded": [t.padding] * len(ids[-1]),
        }
        question = {"path": str(path), "texts": TEXTS, "chat": chat, "options": {}}
        questions_and_answers[family, kind] = question, answer
    return questions_and_answers


@pytest.mark.parametrize(("family", "kind"), FAMILIES)
def test_transformers_has_the_same_ids(directories, family, kind):
    """Control tokens spelled out in a text are parsed as control tokens."""
    question, expected = directories[family, kind]
    assert answer_all([question])["answers"] == [expected]


@pytest.mark.parametrize("options", [{"use_fast": False}, {"trust_remote_code": True}, {"trust_remote_code": False}])
def test_the_tokenizer_has_the_same_ids_with_every_loading_option(directories, tmp_path, monkeypatch, options):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setattr("sys.path", [*sys.path])
    for case in (("qwen2", "spm"), ("qwen2", "llama-bpe"), ("llama", "bpe")):
        question, expected = directories[case]
        assert answer_all([{**question, "options": options}])["answers"] == [expected]


def test_a_tokenizer_saved_by_transformers_has_the_same_ids(directories, tmp_path):
    import transformers

    question, expected = directories["qwen2", "tekken"]
    transformers.AutoTokenizer.from_pretrained(question["path"]).save_pretrained(tmp_path / "saved")
    (Path(question["path"]) / "config.json").rename(tmp_path / "saved" / "config.json")
    assert answer_all([{**question, "path": str(tmp_path / "saved")}])["answers"] == [expected]


@pytest.mark.full
def test_other_versions_of_transformers_have_the_same_ids(directories, tmp_path):
    """TOYEXP_TRANSFORMERS lists directories, each with another version (`pip install --target`)."""
    others = [path for path in os.environ.get("TOYEXP_TRANSFORMERS", "").split(os.pathsep) if path]
    if not others:
        pytest.skip("TOYEXP_TRANSFORMERS names no directory with another version of transformers")
    script = Path(__file__).parents[1] / "support" / "transformers_ids.py"
    questions, expected = zip(*directories.values(), strict=True)
    for other in others:
        environment = {**os.environ, "PYTHONPATH": other, "HF_HOME": str(tmp_path)}
        run = subprocess.run(
            [sys.executable, "-W", "ignore", str(script)],
            input=json.dumps(questions),
            capture_output=True,
            text=True,
            env=environment,
        )
        assert run.returncode == 0, run.stderr[-2000:]
        result = json.loads(run.stdout)
        assert result["answers"] == list(expected), result["version"]
        assert "incorrect regex" not in run.stderr


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_a_transformers_pipeline_writes_the_same_text(tmp_path, capsys, tokenizer, name):
    import transformers

    model = replace(MODELS[name], vocab=tokenizer.vocab)
    write_model(tmp_path / "m.gguf", model, draw_values(model), tokenizer)
    assert main(["export", "m.gguf", "--type", "hf"]) == 0
    capsys.readouterr()
    words = ["--prompt", "the cat", "--tokens", "9", "--temperature", "0", "--engine", "cpu:threads=1", "--json"]
    assert main(["generate", "m.gguf", *words]) == 0
    expected = json.loads(capsys.readouterr().out)["text"]
    write = transformers.pipeline("text-generation", str(tmp_path / "m-hf"))
    longer, shorter = write(["the cat", "the"], max_new_tokens=9, do_sample=False, return_full_text=False, batch_size=2)
    assert longer[0]["generated_text"] == expected
    assert shorter == write("the", max_new_tokens=9, do_sample=False, return_full_text=False)


@pytest.mark.parametrize("prefix", [True, False])
def test_the_sentencepiece_library_has_the_same_ids_with_tokenizer_model(prefix):
    library = pytest.importorskip("sentencepiece", reason="reads tokenizer.model: pip install sentencepiece")
    tokenizer = make_sentencepiece(prefix)
    theirs = library.SentencePieceProcessor(model_proto=sentencepiece_model(tokenizer))
    assert [theirs.id_to_piece(i) for i in range(261)] == [p.replace(" ", BLANK) for p in tokenizer.pieces[:261]]
    assert [theirs.get_score(i) for i in range(tokenizer.vocab)] == tokenizer.scores.tolist()
    assert (theirs.vocab_size(), theirs.unk_id(), theirs.bos_id(), theirs.eos_id()) == (tokenizer.vocab, 0, 1, 2)
    for text in TEXTS[1:]:  # the library differs for empty texts and user-defined tokens
        if not any(tokenizer.pieces[i] in text for i in (1, 2, *tokenizer.user_defined)):
            assert theirs.encode(text) == tokenizer.encode(text).tolist(), text


# -- LoRA -------------------------------------------------------------------------------------------------------------


def merge_by_hand(base, folder: Path):
    """Add the adapter to the base according to the documentation of PEFT's files."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    remaining = load_file(folder / "adapter_model.safetensors")
    for module in config["target_modules"]:
        is_table = f"base_model.model.{module}.lora_embedding_A" in remaining
        names = ("lora_embedding_A", "lora_embedding_B") if is_table else ("lora_A.weight", "lora_B.weight")
        a, b = (remaining.pop(f"base_model.model.{module}.{name}") for name in names)
        rank = config["rank_pattern"].get(module, config["r"])
        update = config["alpha_pattern"].get(module, config["lora_alpha"]) / rank * b @ a
        update = update.T if is_table else update
        magnitude = remaining.pop(f"base_model.model.{module}.lora_magnitude_vector", None)
        assert (magnitude is not None) is config["use_dora"]
        assert len(a) == rank
        layer = base.get_submodule(module)
        is_transposed = config["fan_in_fan_out"] and not isinstance(layer, torch.nn.Linear | torch.nn.Embedding)
        weight = (layer.weight.data.T if is_transposed else layer.weight.data) + update
        weight = weight if magnitude is None else weight * (magnitude / weight.norm(dim=1))[:, None]
        layer.weight.data = weight.T if is_transposed else weight
    assert not remaining
    return base


def merge_with_peft(base, folder: Path):
    """Apply the adapter with PEFT itself."""
    import peft

    return peft.PeftModel.from_pretrained(base, folder).eval()


ADAPTERS = [
    *((name, "") for name in MODELS),  # all linear layers of the blocks
    ("llama3", "recipe.targets=[q,k,o,ffn_*]"),
    ("mamba2", "recipe.targets=[in_proj]"),
    *((name, "recipe.targets=[embed_tokens,lm_head,all-linear]") for name in ("llama", "granite", "gpt2_untied")),
    ("olmo2", "recipe.rank_pattern={q:5,blk.1.*:2} recipe.alpha_pattern={down:9}"),
    ("gpt2", "recipe.rank_pattern={qkv:5} recipe.rslora=true"),
    *((name, "recipe.dora=true") for name in ("llama", "gpt2", "gemma3", "qwen3moe")),
]


@pytest.mark.parametrize(("name", "settings"), ADAPTERS)
def test_an_adapter_has_the_same_logits_in_transformers_and_peft(tmp_path, name, settings):
    write_random_model(Path("base.gguf"), name, Bytes())
    Path("book.txt").write_text("It was a bright cold day in April.\n" * 60)
    words = f"""recipe=lora recipe.base=base.gguf {settings} recipe.rank=3 recipe.alpha=5
        recipe.init_scale=0.3 model.context={CONTEXT} data=text data.path=book.txt steps=6 lr=0.05 eval_every=6
        engine=cpu engine.threads=1 checkpoint_every=0 callbacks=[gguf_export,hf_export] hydra.run.dir=run"""
    assert main(words.split()) == 0
    assert main(["export", "base.gguf", "--type", "hf"]) == 0
    with GGUFFile("base.gguf") as file:
        model = read_model(type(MODELS[name]), file)
    ids = np.random.default_rng(0).integers(0, 257, (2, CONTEXT))
    is_dora = "dora" in settings  # no adapter.gguf can hold it
    assert Path("run/adapter.gguf").exists() is not is_dora
    trained = [Path("run/model.gguf")] if is_dora else [Path("base.gguf"), Path("run/adapter.gguf")]
    ours = compute_logits(model, trained[0], ids, *trained[1:])
    assert np.abs(ours - compute_logits(model, tmp_path / "base.gguf", ids)).max() > 0.5
    np.testing.assert_allclose(
        transformers_logits(load_with_transformers(tmp_path / "run" / "model-hf"), ids), ours, rtol=0, atol=1e-4
    )
    with_peft = find_spec("peft") and not (name.startswith("mamba2") and not settings)  # PEFT refuses Mamba's out_proj
    for merge in (merge_by_hand, merge_with_peft) if with_peft else (merge_by_hand,):
        theirs = merge(load_with_transformers(tmp_path / "base-hf"), tmp_path / "run" / "adapter-hf")
        np.testing.assert_allclose(transformers_logits(theirs, ids), ours, rtol=0, atol=1e-4)
    if not find_spec("peft"):
        pytest.skip("merged by hand, the adapter has the same logits; PEFT itself is missing: pip install peft")


# -- images -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", ["layernorm_gelu", "layernorm_gelu_erf"])
def test_a_vit_has_the_same_logits_and_pixels_in_transformers(tmp_path, block):
    import transformers

    from toyexp_torch.engines import TorchCPU

    model = ViT(
        d_model=32, n_layers=2, n_heads=4, d_ff=48, patch=4, norm_eps=3e-3, image_size=12, channels=3, classes=5,
        block=block,
    )  # fmt: skip
    data = {"classes": ["a", "b", "c"], "image_mean": [0.1, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3]}
    write_model(tmp_path / "v.gguf", model, draw_values(model), None, data=data)
    assert main(["export", "v.gguf", "--type", "hf"]) == 0
    theirs = load_with_transformers(tmp_path / "v-hf", "AutoModelForImageClassification")
    assert theirs.config.id2label == {0: "a", 1: "b", 2: "c", 3: "LABEL_3", 4: "LABEL_4"}
    images = np.random.default_rng(0).normal(size=(2, 12, 12, 3)).astype(np.float32)
    patches = cut(images, 4)
    inputs = {"patches": InputSpec(patches.shape[1:], "float32"), "targets": InputSpec((), "int32")}
    setup = Setup({**inputs, "weights": InputSpec((), "float32")}, rows=2)
    plan = frozen_plan(model, tmp_path / "v.gguf", setup)
    with TorchCPU(threads=1).realize(plan) as session:
        session.build()
        ours = session.logits({"patches": patches})
    assert ours.std() > 0.3
    with torch.no_grad():
        their_logits = theirs(torch.tensor(images.transpose(0, 3, 1, 2))).logits.numpy()
    np.testing.assert_allclose(their_logits, ours, rtol=0, atol=2e-5)
    pixels = np.random.default_rng(0).integers(0, 256, (12, 12, 3), np.uint8)
    processed = transformers.AutoImageProcessor.from_pretrained(tmp_path / "v-hf")(pixels, return_tensors="np")
    expected = (pixels / 255 - data["image_mean"]) / data["image_std"]
    np.testing.assert_allclose(processed["pixel_values"][0].transpose(1, 2, 0), expected, rtol=0, atol=1e-5)
