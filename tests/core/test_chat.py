"""`toyexp generate --chat`: which turns are kept, and how answers, lines and the conversation end."""

import io
import json
import os
import pty
import select
import sys
import time

import pytest
from tiny import chat_tokenizer, write_base

from toyexp.cli.main import main
from toyexp.tokenizers.byte_level import Bytes

NOOP = ["plugins=[toyexp.testing.null]", "--engine", "noop"]


@pytest.fixture(autouse=True)
def change_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_base(tmp_path / "chat.gguf", "llama", tokenizer=chat_tokenizer(), context=120)
    write_base(tmp_path / "text.gguf", "llama", tokenizer=Bytes(), context=30)


@pytest.fixture
def chat(monkeypatch, capsys):
    """Hold a conversation through a pipe; return its answers and the text on stderr."""

    def hold(lines, *words, code=0, file="chat.gguf"):
        raw = lines if isinstance(lines, bytes) else lines.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
        capsys.readouterr()
        command = ["generate", file, "--chat", "--json", *words, *([] if "--engine" in words else NOOP)]
        assert main(command) == code, capsys.readouterr().err
        output = capsys.readouterr()
        return [json.loads(line) for line in output.out.splitlines()], output.err

    return hold


def chatml_ids(*turns):
    """Return the ids of turns in ChatML, computed by hand."""
    words = []
    for role, ids in turns:
        words += [257, *f"{role}\n".encode(), *ids, 258, *b"\n"]
    return [*words, 257, *b"assistant\n"]


def test_each_answer_follows_from_all_turns_before_it(chat):
    answers, stderr = chat("Hi\n\n  You?  \n", "--tokens", "4", "--temperature", "0", "--engine", "ggml:threads=1")
    first, second = answers
    assert first["prompt_ids"] == chatml_ids(("user", b"Hi"))
    spoken = first["text"].encode("utf-8")
    assert second["prompt_ids"] == chatml_ids(("user", b"Hi"), ("assistant", spoken), ("user", b"You?"))
    assert "chat template of chat.gguf" in stderr and stderr.count("(token limit: --tokens 4)") == 2


def test_the_first_answer_equals_that_of_a_single_prompt_on_all_engines(chat, capsys):
    words = ["--tokens", "6", "--seed", "3", "--engine"]
    talks = [
        [answer["ids"] for answer in chat("Hi\nWhy?\n", *words, engine)[0]] for engine in ("cpu:threads=1", "ggml")
    ]
    assert talks[0] == talks[1] and len(talks[0]) == 2
    assert main(["generate", "chat.gguf", "--chat", "--prompt", "Hi", "--json", *words, "ggml"]) == 0
    assert json.loads(capsys.readouterr().out)["ids"] == talks[0][0]


def test_the_system_message_comes_first_and_is_kept_when_turns_are_dropped(chat, capsys):
    system = ["--system", "Be brief."]
    answers, stderr = chat("Hi\n" * 5, *system, "--tokens", "8", "--temperature", "0")
    head = chatml_ids(("system", b"Be brief."))[: -len(b"assistant\n") - 1]
    assert answers[0]["prompt_ids"] == chatml_ids(("system", b"Be brief."), ("user", b"Hi"))
    assert all(answer["prompt_ids"][: len(head)] == head for answer in answers)
    assert "the model forgets the oldest messages" in stderr
    command = ["generate", "chat.gguf", "--chat", "--prompt", "Hi", "--json", *system, *NOOP]
    assert main([*command, "--tokens", "8", "--temperature", "0"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_ids"] == answers[0]["prompt_ids"]


def test_a_system_message_without_a_template_for_it_is_rejected(chat, capsys, tmp_path):
    assert main(["generate", "chat.gguf", "--prompt", "Hi", "--system", "x"]) == 2
    said = "generate --system: only works with --chat: toyexp generate chat.gguf --chat --system ... --prompt ..."
    assert said in capsys.readouterr().err
    _, stderr = chat("Hi\n", "--system", "x", file="text.gguf", code=2)
    assert "text.gguf: has no chat template, which --system needs" in stderr
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    write_base(tmp_path / "deaf.gguf", "llama", tokenizer=tokenizer, context=120)
    _, stderr = chat("Hi\n", "--system", "Be brief.", file="deaf.gguf", code=2)
    assert "deaf.gguf: the chat template ignores --system" in stderr


def test_quit_ends_the_chat_and_further_input_is_not_read(chat):
    assert len(chat("a\n/quit\nb\n", "--tokens", "1")[0]) == 1
    assert chat("", "--tokens", "1")[0] == []


def test_without_a_template_the_text_is_continued(chat):
    answers, stderr = chat("ab\ncd\n", "--tokens", "2", "--temperature", "0", file="text.gguf")
    assert "no chat template: messages are continued as plain text" in stderr
    assert answers[1]["prompt_ids"] == [*b"ab", *answers[0]["ids"], *b"\ncd"]


def test_the_oldest_turns_are_dropped_when_the_context_is_full_with_one_note(chat):
    """Only complete exchanges are dropped, so that the template sees valid conversations."""
    answers, stderr = chat("".join(f"message {i}\n" for i in range(6)), "--tokens", "8", "--temperature", "0")
    assert stderr.count("the context of 120 tokens is full; the model forgets the oldest messages") == 1
    for i, answer in enumerate(answers):
        ids = answer["prompt_ids"]
        assert len(ids) + 8 <= 120 and ids[:6] == [257, *b"user\n"]
        assert bytes(i for i in ids if i < 256).endswith(f"message {i}\nassistant\n".encode())
    assert b"message 0" not in bytes(i for i in answers[-1]["prompt_ids"] if i < 256)
    assert b"message 4" in bytes(i for i in answers[-1]["prompt_ids"] if i < 256)


@pytest.mark.parametrize(("tokens", "room"), [(8, 112), (40, 90)])
def test_turns_leave_room_for_the_answers_tokens_or_a_quarter_of_the_context(chat, tokens, room):
    """An earlier exchange stays where all takes just that, and is left out where it takes one token more."""
    before = ("user", b"a"), ("assistant", b"\0" * tokens)  # what this engine says
    for more in (0, 1):
        message = b"c" * (room + more - len(chatml_ids(*before, ("user", b""))))
        answers, _ = chat(b"a\n" + message + b"\n", "--tokens", str(tokens), "--temperature", "0")
        assert answers[1]["prompt_ids"] == chatml_ids(*(() if more else before), ("user", message))


def test_a_message_that_is_too_long_is_reported_and_the_chat_continues(chat):
    answers, stderr = chat(f"{'x' * 200}\nHi\n", "--tokens", "2", code=1)
    assert "the message was skipped: it has 219 tokens; the model's context is 120" in stderr
    assert [answer["prompt_ids"] for answer in answers] == [chatml_ids(("user", b"Hi"))]


def test_an_answer_may_be_longer_than_the_context(chat):
    (answer,), stderr = chat("Hi\n", "--tokens", "150", "--temperature", "0")
    assert answer["tokens"] == 150 and answer["slides"] >= 1 and stderr.count("continuing from the last 60") == 1


@pytest.mark.parametrize(("lines", "words", "said"), [
    (b"\xff\n", [], "not UTF-8 text (byte 0 is 0xff)"),
    (b"Hi\n", ["--engine", "llama.cpp"], "cannot chat; add --prompt"),
    (b"Hi\n", ["--ids", "1"], "has no effect with --ids; use --prompt"),
    (b"Hi\n", ["--tokens", "0"], "--tokens 0: must be a whole number"),
])  # fmt: skip
def test_invalid_input_gives_a_one_line_error(chat, lines, words, said):
    stderr = chat(lines, *words, code=2)[1]
    assert said in stderr and stderr.count("toyexp: error: ") == 1


def test_a_chat_needs_a_tokenizer(chat, tmp_path):
    write_base(tmp_path / "ids.gguf", "llama")
    assert "has no tokenizer, which --chat needs" in chat(b"Hi\n", code=2, file="ids.gguf")[1]


class Terminal:
    """A chat in a terminal of its own."""

    def __init__(self, *words):
        self.pid, self._terminal = pty.fork()
        if not self.pid:
            os.execv(sys.executable, [sys.executable, "-m", "toyexp", "generate", *words])
        self.shown = ""

    def waits_for(self, text, seconds=60):
        """Wait until `text` appears after the last match."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < end, self.shown
            if select.select([self._terminal], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self._terminal, 4096).decode(errors="replace")
                except OSError:  # it ended
                    assert text in self.shown, self.shown
        before, _, self.shown = self.shown.partition(text)
        return before

    def waits_for_more(self, characters, seconds=60):
        """Wait until that many characters have appeared since the last match."""
        end = time.monotonic() + seconds
        while len(self.shown) < characters:
            assert time.monotonic() < end, self.shown
            if select.select([self._terminal], [], [], 0.1)[0]:
                self.shown += os.read(self._terminal, 4096).decode(errors="replace")

    def types(self, text):
        os.write(self._terminal, text.encode())

    def ends(self):
        """Return the exit code."""
        with open(self._terminal, "rb", buffering=0, closefd=True) as rest:
            while True:
                try:
                    if not rest.read(4096):
                        break
                except OSError:
                    break
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_in_a_terminal_ctrl_c_stops_the_answer_and_not_the_chat():
    """An answer without end, for the likeliest token of this model is never the end; then one at the prompt."""
    words = ["--chat", "--tokens", "1000000", "--temperature", "0", "--engine", "ggml:threads=1"]
    terminal = Terminal("text.gguf", *words)
    terminal.waits_for("> ")
    terminal.types("ab\n")
    terminal.waits_for("continuing from")  # in the middle of the answer
    terminal.types("\x03")
    terminal.waits_for("(stopped)")
    terminal.waits_for("> ")
    time.sleep(0.5)  # readline prints its prompt before it waits; a signal in between acts at the next key
    terminal.types("\x03")
    terminal.waits_for("/quit or end of input")
    terminal.types("cd\n")
    terminal.waits_for("cd\r\n")
    terminal.waits_for_more(200)  # an answer is on its way, however busy the machine is
    terminal.types("\x03")
    terminal.waits_for("(stopped)")
    terminal.waits_for("> ")
    terminal.types("/quit\n")
    assert terminal.ends() == 0
