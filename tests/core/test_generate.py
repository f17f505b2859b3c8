"""Text generation: sampling of tokens, and the command line. No framework is used."""

import contextlib
import io
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import write_lora
from tiny import chat_tokenizer, plan, write_base

from toyexp import Decoder, RunFailed
from toyexp.base.random import stream
from toyexp.cli.commands import COMMANDS
from toyexp.cli.main import main
from toyexp.formats.file_plan import read_adapter
from toyexp.formats.gguf.open_model import load_open_model
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.write import write_adapter, write_model
from toyexp.inference.generate import TextBuilder
from toyexp.interfaces.sampling import Sampling, generate_endlessly, generate_tokens, top_tokens
from toyexp.plugins.discovery import load
from toyexp.testing import image_dataset
from toyexp.tokenizers.byte_level import Bytes
from toyexp_models.vit import ViT
from toyexp_recipes.lora import Lora

LOGITS = np.array([0.5, 2.0, -1.0, 1.0, 0.0], np.float32)
EVERYTHING = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


# -- drawing ----------------------------------------------------------------------------------------------------------


def softmax(logits):
    shares = np.exp(logits.astype(np.float64) - logits.max())
    return shares / shares.sum()


def token_shares(logits, count=4000, **cuts):
    """Return the share of each token for random numbers spread evenly over [0, 1)."""
    sampling = Sampling(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, **cuts})
    chosen = [sampling.choose(logits, (i + 0.5) / count) for i in range(count)]
    return np.bincount(chosen, minlength=len(logits)) / count


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_are_sampled_with_softmax_probabilities(temperature):
    # Even spacing puts each share within one draw of its value at either border.
    assert token_shares(LOGITS, temperature=temperature) == pytest.approx(softmax(LOGITS / temperature), abs=2 / 4000)


# The probabilities of LOGITS: 0.126, 0.563, 0.028, 0.207, 0.076.
@pytest.mark.parametrize(
    ("cuts", "count"),
    [
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 100}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.5}, [1]),
        ({"top_p": 0.6}, [1, 3]),
        ({"top_p": 0.89}, [0, 1, 3]),
        ({"min_p": 0.2}, [0, 1, 3]),
        ({"min_p": 0.1}, [0, 1, 3, 4]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 2, "top_p": 0.74}, [1, 3]),  # of two tokens, the likelier one has 0.73
        ({"top_k": 2, "top_p": 0.72}, [1]),
        ({"top_p": 0.9, "min_p": 0.3}, [1, 3]),
        ({"top_p": 0.89, "temperature": 3.0}, [0, 1, 3]),  # the cut does not see the temperature
    ],
)
def test_filtered_tokens_are_never_sampled_and_the_rest_is_renormalised(cuts, count):
    shares = np.zeros(5)
    shares[count] = softmax(LOGITS[count] / cuts.get("temperature", 1.0))
    assert token_shares(LOGITS, **cuts) == pytest.approx(shares, abs=2 / 4000)


@given(st.lists(st.floats(-8, 8, width=16), min_size=1, max_size=30), st.floats(0.01, 1), st.integers(0, 40))
@settings(deadline=None, max_examples=100)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(numbers, top_p, top_k):
    logits = np.array(numbers, np.float32)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    assert top_tokens(logits, top_k).tolist() == order[: top_k or None]
    order = order[: top_k or None]
    shares = softmax(logits[order])
    fewest = next((n for n in range(1, len(order) + 1) if math.fsum(shares[:n]) >= top_p), len(order))
    sampling = Sampling(temperature=50.0, top_k=top_k, top_p=top_p)
    seen = {sampling.choose(logits, (i + 0.5) / 200) for i in range(200)}
    if abs(math.fsum(shares[:fewest]) - top_p) > 1e-9 and (
        fewest == 1 or abs(math.fsum(shares[: fewest - 1]) - top_p) > 1e-9
    ):
        assert seen == set(order[:fewest])


def test_temperature_zero_takes_the_most_probable_token():
    assert {Sampling(0, k, 0.5).choose(LOGITS, u) for k in (0, 3) for u in (0.0, 0.5, 0.999)} == {1}


def test_a_tiny_temperature_neither_overflows_nor_changes_the_choice():
    for temperature in (1e-6, 1e-308):
        assert {Sampling(temperature, 0, 1.0).choose(1000 * LOGITS, u) for u in (0.0, 0.5, 0.999)} == {1}


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53, 1.0])
def test_the_ends_of_the_unit_interval_choose_a_token(uniform):
    assert EVERYTHING.choose(LOGITS, uniform) in range(5)


def test_equal_logits_are_sampled_equally():
    assert token_shares(np.zeros(4, np.float32)) == pytest.approx([0.25] * 4, abs=2 / 4000)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_end_the_generation(wrong):
    with pytest.raises(RunFailed, match="not finite"):
        EVERYTHING.choose(np.array([0, wrong], np.float32), 0.5)


class Counting(Decoder):
    """Predict the last token plus one, and record the fed ids."""

    def __init__(self, context):
        self.context, self.position, self.fed = context, 0, []

    def feed(self, ids):
        self.fed += list(ids)
        self.position += len(ids)
        assert self.position <= self.context
        logits = np.zeros(100, np.float32)
        logits[ids[-1] + 1] = 9
        return logits

    do_feed = feed


GREEDY = Sampling(temperature=0)


def test_tokens_follow_until_the_context_is_full():
    decoder = Counting(5)
    assert list(generate_tokens(decoder, [1, 2], GREEDY, stream(0), 100)) == [3, 4, 5, 6]
    assert decoder.fed == [1, 2, 3, 4, 5]
    assert list(generate_tokens(Counting(1), [1, 2], GREEDY, stream(0), 100)) == []


def test_no_token_beyond_the_vocabulary_is_drawn():
    assert next(generate_tokens(Counting(5), [4], GREEDY, stream(0), 5)) < 5


@pytest.mark.parametrize(("context", "prompt"), [(6, 2), (6, 9), (5, 5), (1, 3)])
def test_beyond_the_context_the_second_half_is_processed_again(context, prompt):
    decoders = []

    class Session:
        def decoder(self):
            decoders.append(Counting(context))
            return decoders[-1]

    words = generate_endlessly(Session(), list(range(prompt)), GREEDY, stream(0), 100)
    assert [next(words) for _ in range(20)] == list(range(prompt, prompt + 20))
    assert decoders[0].fed[0] == max(0, prompt - context)
    for before, after in itertools.pairwise(decoders):
        assert before.position == context and after.fed[0] == before.fed[-1] + 2 - max(1, context // 2)


# -- writing ----------------------------------------------------------------------------------------------------------


def test_text_is_streamed_in_complete_characters():
    parts = []
    scribe = TextBuilder(Bytes(), parts.append)
    for byte in "aé🙂".encode():
        scribe.add(byte)
    assert parts == ["a", "é", "🙂"] and scribe.text == "aé🙂"
    for byte in (0xE4, 0xB8, 0x41, 0xFF, 0xE4):
        scribe.add(byte)
    assert parts[3:] == ["\ufffdA", "\ufffd"]
    scribe.finish()
    assert parts[5:] == ["\ufffd"] and scribe.text == "aé🙂\ufffdA\ufffd\ufffd"


# -- the command line -------------------------------------------------------------------------------------------------

NOOP = ["plugins=[toyexp.testing.null]", "--engine", "noop"]


@pytest.fixture(autouse=True)
def change_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def files(tmp_path):
    """Files of every kind: with a tokenizer, with a chat's, with none, a classifier's, and an adapter's."""
    write_base(tmp_path / "text.gguf", "llama", tokenizer=Bytes(), context=30)
    write_base(tmp_path / "chat.gguf", "llama", tokenizer=chat_tokenizer(), context=80)
    silent = chat_tokenizer()
    silent.chat_template = "{{ messages.__class__ }}"
    write_base(tmp_path / "silent.gguf", "llama", tokenizer=silent)
    write_base(tmp_path / "ids.gguf", "llama")
    model = ViT(d_model=8, n_layers=1, n_heads=2, d_ff=8).fit(image_dataset())
    write_model(tmp_path / "vit.gguf", model, {t.name: t.init.draw(t.shape, 0, t.name) for t in model.tensors()}, None)
    write_base(tmp_path / "base.gguf", "llama")
    lora = plan("llama", recipe=Lora(base="base.gguf", rank=2))
    write_adapter(tmp_path / "adapter.gguf", lora, {t.name: lora.initial_values(t) for t in lora.tensors})
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and then nothing")
    (tmp_path / "run").mkdir()
    (tmp_path / "empty").mkdir()
    os.link(tmp_path / "text.gguf", tmp_path / "run" / "model.gguf")
    return tmp_path


@pytest.fixture
def run_generate(files, capsys):
    """Run the command line on the null engine; return its output, parsed if it is JSON."""

    def run(*words):
        capsys.readouterr()
        code = main(["generate", *words, *([] if "--engine" in words else NOOP)])
        output = capsys.readouterr()
        assert code == 0, output.err
        return json.loads(output.out) if "--json" in words else output

    return run


def test_text_goes_to_stdout_and_the_speed_to_stderr(run_generate):
    result = run_generate("text.gguf", "--prompt", "ab", "--tokens", "5", "--temperature", "0")
    assert result.out == "\0" * 5 + "\n"  # of equal logits the first is taken: the byte 0
    assert result.err.startswith("5 tokens in ") and "token limit" in result.err and result.err.count("\n") == 1


def test_json_is_one_object_on_one_line(run_generate, capsys):
    result = run_generate("text.gguf", "--prompt=ab", "--tokens=3", "--seed=7", "--json")
    assert result.keys() == {
        "file", "engine", "prompt", "prompt_ids", "text", "ids", "tokens", "reason", "seconds", "seed",
        "template", "slides", "tokens_per_second",
    }  # fmt: skip
    assert result["prompt"] == "ab" and result["prompt_ids"] == [97, 98] and result["seed"] == 7
    assert len(result["ids"]) == result["tokens"] == 3 and result["reason"] == "token limit"
    assert result["text"] == Bytes().decode(result["ids"])


def test_the_same_seed_repeats_and_another_differs(run_generate):
    first, again, other = (
        run_generate("text.gguf", "--prompt", "ab", "--top-k", "0", "--seed", seed, "--json")["ids"] for seed in "112"
    )
    assert first == again != other


def test_generation_continues_beyond_the_context_with_one_note(run_generate):
    result = run_generate("text.gguf", "--prompt", "x" * 28, "--temperature", "0")
    assert result.err.count("the context of 30 tokens is full; continuing from the last 15") == 1
    assert "64 tokens in" in result.err and result.err.count("\n") == 2
    with contextlib.redirect_stdout(io.StringIO()) as seen, contextlib.redirect_stderr(seen):  # as on a terminal
        run_generate("text.gguf", "--prompt", "x" * 28, "--temperature", "0")
    assert seen.getvalue().startswith("\0" * 64 + "\nnote: the context"), "behind the text, and not in it"
    result = run_generate("text.gguf", "--prompt", "x" * 28, "--temperature", "0", "--json")
    assert (result["tokens"], result["reason"], result["slides"]) == (64, "token limit", 4)  # 3, and 16 after each


@pytest.mark.parametrize("engine", ["cpu:threads=1", "ggml:threads=1"])
def test_beyond_the_context_each_token_follows_from_the_second_half(run_generate, engine):
    words = ["--temperature", "0", "--json", "--engine", engine, "--tokens"]
    ids = run_generate("ids.gguf", "--ids", "1,2,3", *words, "40")["ids"]  # with a context of 12
    seen = [1, 2, 3, *ids]
    for full in (13, 20, 27):  # tokens that there are when it is read anew: each time the later 6
        again = run_generate("ids.gguf", "--ids", ",".join(map(str, seen[full - 6 : full])), *words, "7")["ids"]
        assert seen[full : full + 7] == again


def test_an_end_token_ends_the_generation_and_is_not_written(run_generate):
    ends = [run_generate("chat.gguf", "--prompt", "x", "--top-k", "0", "--top-p", "1", "--tokens", "70",
                         "--seed", str(s), "--json") for s in range(4)]  # fmt: skip
    assert "end of text" in {result["reason"] for result in ends}
    for result in ends:
        assert not set(result["ids"]) & {256, 257, 258}


def test_only_the_first_of_several_devices_is_used(run_generate, monkeypatch):
    torch_cpu = load().offers["engine"]["cpu"].cls
    monkeypatch.setattr(torch_cpu, "available_devices", lambda self: (2, "2 cores"))
    words = ["text.gguf", "--prompt", "ab", "--tokens", "5", "--temperature", "0", "--json", "--engine"]
    first, second = (run_generate(*words, f"cpu:threads=1{more}") for more in ("", ":devices=2:shard=true"))
    assert first["ids"] == second["ids"]
    assert first["engine"] in second["engine"] and second["engine"].endswith("its first device only")


def test_a_run_directory_stands_for_its_model(run_generate):
    assert run_generate("run", "--prompt", "a", "--json")["file"] == "run/model.gguf"


def test_a_prompt_can_be_piped(run_generate, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é\n".encode())))
    assert run_generate("text.gguf", "--prompt", "-", "--json")["prompt_ids"] == [0xC3, 0xA9, 0x0A]


def test_a_prompt_too_long_for_any_context_is_rejected_before_tokenizing(run_generate, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x" * ((16 << 20) + 1))))
    assert main(["generate", "text.gguf", "--prompt", "-"]) == 2
    assert "--prompt: the text has more than 16 MiB, more than any context" in capsys.readouterr().err


def test_an_empty_prompt_starts_with_end_of_text(run_generate):
    assert run_generate("text.gguf", "--prompt", "", "--json")["prompt_ids"] == [256]


def test_a_closed_stdin_is_reported(run_generate, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", "text.gguf", "--prompt", "-"]) == 2
    assert capsys.readouterr().err.startswith("toyexp: error: --prompt -: standard input is closed; ")


def test_ids_may_be_the_prompt_and_text_is_returned_if_there_is_a_tokenizer(run_generate):
    result = run_generate("text.gguf", "--ids", "97, 98", "--json", "--temperature", "0", "--tokens", "2")
    assert (result["prompt"], result["prompt_ids"], result["text"]) == (None, [97, 98], "\0\0")
    result = run_generate("ids.gguf", "--ids", "1,2", "--temperature", "0", "--tokens", "3")
    assert result.out == "0,0,0\n"
    assert run_generate("ids.gguf", "--ids", "1", "--json", "--tokens", "2")["text"] is None


def test_a_chat_uses_the_chat_template_of_the_file(run_generate):
    result = run_generate("chat.gguf", "--chat", "--prompt", "Hi", "--tokens", "1", "--json")
    words = [257, *b"user\nHi", 258, *b"\n", 257, *b"assistant\n"]
    assert result["prompt_ids"] == words and result["prompt"] == "Hi"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--prompt x", "generate: needs exactly one file or run directory"),
        ("text.gguf more --prompt x", "generate text.gguf more: needs exactly one"),
        ("text.gguf", "exactly one of --prompt TEXT"),
        ("text.gguf --prompt x --ids 1", "exactly one of --prompt TEXT"),
        ("text.gguf --prompt", "--prompt needs a value"),
        ("text.gguf --prompt --json", "--prompt needs a value"),
        ("text.gguf --prompt x --token 3", "did you mean --tokens?"),
        ("text.gguf --prompt x --topk=3", "did you mean --top-k?"),
        ("text.gguf --prompt x --json=yes", "takes no value"),
        ("text.gguf --prompt x --tokens 0", "--tokens 0: must be a whole number from 1 to"),
        ("text.gguf --prompt x --tokens 1.5", "whole number"),
        ("text.gguf --prompt x --tokens 1000000000", "from 1 to 1000000"),
        ("text.gguf --prompt x --engine llama.cpp:threads=100000", "at most 512"),
        ("text.gguf --prompt x --engine ggml:threads=100000", "512"),
        ("text.gguf --prompt x --tokens ²", "whole number"),
        (f"text.gguf --prompt x --tokens {'0' * 20}9999999", "whole number"),
        ("text.gguf --prompt x --seed -1", "--seed -1: must be a whole number from 0"),
        ("text.gguf --prompt x --top-k -1", "--top-k -1"),
        ("text.gguf --prompt x --temperature nan", "--temperature nan: must be a number from 0 to 100"),
        ("text.gguf --prompt x --temperature 101", "from 0 to 100"),
        ("text.gguf --prompt x --top-p 0", "--top-p 0: must be a number"),
        ("text.gguf --prompt x --min-p 1.1", "from 0 to 1"),
        ("text.gguf --ids 1,x", "--ids 1,x: must be token ids"),
        ("text.gguf --ids 1,-2", "must be token ids"),
        ("https://host/m.gguf --prompt x", "https://host/m.gguf: is an address, and only local files can be read"),
        ("text.gguf --prompt x --adapter empty", "empty: is a directory without adapter.gguf or adapter_config.json"),
        ("text.gguf --prompt x --adapter of", "of/adapter.gguf: is not a GGUF file"),
        ("text.gguf --ids 1,,2", "--ids 1,,2: must be token ids"),
        ("text.gguf --prompt x --adapter=", "generate --adapter '': is empty (an unset shell variable?)"),
        ("text.gguf -p x", "generate -p: unknown option; did you mean --prompt?"),
        ("text.gguf --prompt x --max_new_tokens 3", "did you mean --tokens?"),
        ("text.gguf --ids 300", "prompt id 300 must be between 0 and 256"),
        ("text.gguf --ids 99999999999999999999999", "must be token ids"),
        ("text.gguf --ids 1 --chat", "has no effect with --ids; use --prompt"),
        ("text.gguf --prompt x --chat", "has no chat template"),
        ("silent.gguf --prompt x --chat", "the chat template renders an empty prompt"),
        ("text.gguf --prompt " + 31 * "x", "the prompt has 31 tokens; use at most 30, the model's context"),
        ("text.gguf --prompt x --engine ggm", "--engine ggm: did you mean ggml?"),
        ("text.gguf --prompt x --engine llamacpp", "did you mean llama.cpp?"),
        ("text.gguf --prompt x --engine cpu:threads", "such as cpu:threads=1"),
        ("text.gguf --prompt x --engine ggml:threads=1,2", "such as ggml:threads=1"),
        ("text.gguf --prompt x --engine ggml:thread=1", "did you mean threads?"),
        ("text.gguf --prompt x --engine llama.cpp:blas=true", "llama.cpp takes only the setting threads"),
        ("ids.gguf --prompt x", "has no tokenizer; use --ids 1,2,3"),
        ("vit.gguf --prompt x", "reads images and cannot generate text"),
        ("vit.gguf --prompt x --engine llama.cpp", "has the architecture toyexp-vit, which llama.cpp cannot run"),
        ("adapter.gguf --prompt x", "pass this file with --adapter"),
        ("broken.gguf --prompt x", "broken.gguf: is not a GGUF file"),
        ("missing.gguf --prompt x", "missing.gguf: not found"),
        ("empty --prompt x", "empty: is a directory without model.gguf"),
        ("ids.gguf --ids 1 --adapter base.gguf", "base.gguf: holds no LoRA adapter"),
        ("ids.gguf --ids 1 --adapter missing.gguf", "missing.gguf: not found"),
        ("text.gguf --prompt \udcff", "not UTF-8 text (byte 0 is 0xff)"),
    ],
)
def test_bad_arguments_give_a_one_line_error(words, said, files, capsys):
    (files / "of").mkdir()
    (files / "of" / "adapter.gguf").touch()
    line = words.split(" ")
    assert main(["generate", *([] if "--engine" in line else NOOP), *line]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and err.startswith("toyexp: error: ")


def changed_adapter(files, change):
    """Write adapter.gguf with some of its tensors or keys changed."""
    from gguf import GGUFWriter

    from toyexp.formats.gguf.read import GGUFFile

    with GGUFFile(files / "adapter.gguf") as file:
        keys, arrays = dict(file.metadata), {name: file.read(name) for name in file.tensors}
    change(keys, arrays)
    writer = GGUFWriter(files / "changed.gguf", keys["general.architecture"])
    writer.add_type(keys["general.type"])
    writer.add_string("adapter.type", keys["adapter.type"])
    writer.add_float32("adapter.lora.alpha", keys["adapter.lora.alpha"])
    for name, array in arrays.items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


Q = "blk.0.attn_q.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda k, t: k.update({"general.architecture": "gpt2"}), "is an adapter of gpt2, the model is llama"),
        (lambda k, t: k.update({"adapter.type": "aloha"}), "holds no LoRA adapter"),
        (lambda k, t: k.update({"adapter.lora.alpha": math.nan}), "alpha is nan"),
        (lambda k, t: t.pop(f"{Q}.lora_b"), f"{Q} is 32 x 32"),
        (lambda k, t: t.update({f"{Q}.lora_a": t[f"{Q}.lora_a"].T}), f"{Q} is 32 x 32"),
        (lambda k, t: t.update({"blk.7.attn_q.weight.lora_a": t[f"{Q}.lora_a"]}), "lora_a matches no linear"),
        (lambda k, t: (t.clear(), t.update({"x": np.zeros(3, np.float32)})), "tensor x matches no linear"),
    ],
)
def test_an_adapter_that_does_not_fit_is_rejected_by_name(change, said, files, capsys):
    changed_adapter(files, change)
    assert main(["generate", "base.gguf", "--ids", "1", "--adapter", "changed.gguf", *NOOP]) == 2
    err = capsys.readouterr().err
    assert said in err and "changed.gguf" in err and err.count("\n") == 1


def start(files, *words):
    program = "from toyexp.cli.main import main; import sys; sys.exit(main(sys.argv[1:]))"
    return subprocess.Popen([sys.executable, "-c", program, "generate", *words, *NOOP], cwd=files,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


@pytest.fixture
def endless_file(tmp_path):
    write_base(tmp_path / "long.gguf", "llama", tokenizer=Bytes(), context=20_000)
    return tmp_path


WORDS = ["long.gguf", "--prompt", "x", "--tokens", "19000", "--temperature", "0"]


def test_ctrl_c_ends_the_line_with_130(endless_file):
    process = start(endless_file, *WORDS)
    assert process.stdout.read(4) == b"\0" * 4
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out.endswith(b"\n") and err == b"toyexp: interrupted by SIGINT\n"


def test_a_closed_pipe_ends_the_command_quietly(endless_file):
    process = start(endless_file, *WORDS)
    process.stdout.read(4)
    process.stdout.close()
    assert process.wait(timeout=60) == 0 and process.stderr.read() == b""
    process.stderr.close()


def test_help_names_every_option(capsys):
    assert main(["generate", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {flag} " in out for flag in COMMANDS["generate"]().parser().options)


def test_a_missing_llama_cpp_is_reported(run_generate, files, monkeypatch, capsys):
    monkeypatch.setattr("toyexp.inference.llamacpp.PACKAGES", ())
    assert main(["generate", "text.gguf", "--prompt", "x", "--engine", "llama.cpp"]) == 2
    assert "pip install xllamacpp" in capsys.readouterr().err


def test_an_adapter_is_scaled_by_its_alpha_over_its_rank():
    write_lora(Path("adapter.gguf"), Path("base.gguf"))
    with GGUFFile("base.gguf") as file:
        model = load_open_model(file, load())
    pairs, adapters = read_adapter(Path("adapter.gguf"), model)
    assert {a.scale for a in adapters} == {6 / 4}
    assert [t.name for t in pairs] == [name for a in adapters for name in (f"{a.target}.lora_a", f"{a.target}.lora_b")]
    assert not any(t.trainable for t in pairs)
