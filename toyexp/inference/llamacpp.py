"""Write text by llama.cpp, in a process of its own, as some files end it: it reads a `Task` and prints `Answer`s.

Its key/value cache is float32 and flash attention off, so that nothing is rounded that our engines do not round.
"""

from __future__ import annotations

import codecs
import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from toyexp.base.errors import RunFailed, Unavailable, printable
from toyexp.base.packages import probe_import

LLAMA_CPP = "llama.cpp"  # what it is called among engines
PACKAGES = ("xllamacpp", "llama_cpp")
MARGIN = 1024  # positions for what a chat template adds


@dataclass(frozen=True)
class Task:
    """What is to be written."""

    package: str  # one of PACKAGES
    file: str
    adapter: str | None
    threads: int  # 0: as many as llama.cpp chooses
    ids: list[int] | None  # the prompt; None: it is the text
    text: str
    chat: bool  # whether that is a user's message
    context: int  # the model's
    n_ctx: int  # positions to reserve
    tokens: int  # to write at most
    sampling: Mapping[str, float]  # with its seed
    stream: bool  # text as it comes; False: all ids at the end, as llama.cpp tells no ids of a character of several


@dataclass(frozen=True)
class Answer:
    """First the prompt's ids, then text as it comes, and at last how many tokens that was and why it ends."""

    prompt_ids: list[int] | None = None
    text: str = ""
    count: int | None = None
    stopped: str = ""  # eos or limit
    ids: list[int] = field(default_factory=list)


Tell = Callable[[Answer], None]


def find_package() -> str:
    """The Python package to use; Unavailable when none works here."""
    reasons = {name: probe_import(name) for name in PACKAGES}
    for name, reason in reasons.items():
        if reason is None:
            return name
    told = ", ".join(f"{name} {reason}" for name, reason in reasons.items())
    raise Unavailable(f"--engine llama.cpp: {told}: pip install xllamacpp, or llama-cpp-python")


def stream(task: Task) -> Iterator[Answer]:
    """What the process answers, line by line; RunFailed with llama.cpp's own words when it does not get through."""
    with tempfile.TemporaryFile("w+") as asked, tempfile.TemporaryFile("w+", errors="replace") as log:
        json.dump(asdict(task), asked)
        asked.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", "toyexp.inference.llamacpp"],
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},  # an abort is told in one line, without starting a debugger
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield Answer(**json.loads(line))
            if process.wait():
                log.seek(0)
                raise RunFailed(f"llama.cpp: {_cause(log.read(), process.returncode)}")
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def _cause(log: str, code: int) -> str:
    """The line of its log that says most: the first of an error or a failed assertion, or else the last."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    marks = ("GGML_ASSERT", "GGML_ABORT", " E ", "error", "SystemExit")
    telling = [line for mark in marks for line in lines if mark in line]
    words = (telling or lines[-1:] or [f"it ended with {code}"])[0]
    return printable(words.partition(" E ")[2] or words, 300)


# -- in the process of its own ----------------------------------------------------------------------------------------


def answer_with_xllamacpp(task: Task, tell: Tell) -> None:
    """Answers through the server of xllamacpp, which speaks HTTP on this machine."""
    server = _server(task)  # kept in a name: the server stops when it is collected
    # The server is on this machine: whatever proxy the environment names has no say in it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def post(path: str, **body: Any) -> Any:
        head = {"Content-Type": "application/json"}
        try:
            return opener.open(urllib.request.Request(server.listening_address + path, json.dumps(body).encode(), head))
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{path} error {error.read().decode(errors='replace')}") from None

    ids = task.ids
    if ids is None:
        text = task.text
        if task.chat:
            text = json.load(post("/apply-template", messages=[{"role": "user", "content": text}]))["prompt"]
        found = post("/tokenize", content=text, add_special=True, parse_special=task.chat)
        ids = json.load(found)["tokens"]
    tell(Answer(prompt_ids=ids))
    room = task.context - len(ids) + 1
    if room < 1:
        return
    wanted = {"prompt": ids, "n_predict": min(task.tokens, room), "stream": task.stream}
    # Only what was asked for: its own defaults know more samplers.
    cuts = {"samplers": ["top_k", "top_p", "min_p", "temperature"], "repeat_penalty": 1.0, "return_tokens": True}
    with post("/completion", **wanted, **cuts, **task.sampling) as reply:
        for line in reply:
            if task.stream and not line.startswith(b"data: "):
                continue
            piece = json.loads(line.removeprefix(b"data: "))
            if "error" in piece:
                raise SystemExit(f"error {piece['error']}")
            tell(Answer(text=piece["content"]))
            if piece["stop"]:
                tell(Answer(count=piece["tokens_predicted"], stopped=piece["stop_type"], ids=piece["tokens"]))
                return


def _server(task: Task) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = task.file
    if task.adapter:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(task.adapter, 1.0)]
    params.n_ctx = task.n_ctx
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if task.threads:
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = task.threads
    params.warmup = False
    params.offline = True
    return xllamacpp.Server(params)


def answer_with_llama_cpp(task: Task, tell: Tell) -> None:
    """Answers through llama-cpp-python."""
    import llama_cpp

    model = llama_cpp.Llama(
        task.file, n_ctx=task.n_ctx, n_gpu_layers=0, lora_path=task.adapter, flash_attn=False,
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32, n_threads=task.threads or None,
        n_threads_batch=task.threads or None, seed=task.sampling["seed"], verbose=False,
    )  # fmt: skip
    vocabulary = llama_cpp.llama_model_get_vocab(model.model)
    ids = task.ids
    if ids is None:
        text, begin = task.text, True
        if task.chat:
            from llama_cpp.llama_chat_format import Jinja2ChatFormatter

            eos, bos = (model._model.token_get_text(i) for i in (model.token_eos(), model.token_bos()))
            template = model.metadata.get("tokenizer.chat_template")
            if template is None:
                raise SystemExit("error: the file has no chat template")
            text = Jinja2ChatFormatter(template, eos, bos)(messages=[{"role": "user", "content": text}]).prompt
            begin = not text.startswith(bos)
        ids = model.tokenize(text.encode(), add_bos=begin, special=task.chat)
    tell(Answer(prompt_ids=ids))
    limit = min(task.tokens, task.context - len(ids) + 1)
    sampling = task.sampling
    cuts = {"temp": sampling["temperature"], **{name: sampling[name] for name in ("top_k", "top_p", "min_p")}}
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    written: list[int] = []
    for token in model.generate(ids, repeat_penalty=1.0, **cuts):
        if llama_cpp.llama_vocab_is_eog(vocabulary, token):
            break
        written.append(token)
        tell(Answer(text=decode(model.detokenize([token], prev_tokens=ids))))
        if len(written) >= limit:
            break
    tell(Answer(text=decode(b"", True)))
    tell(Answer(count=len(written), stopped="limit" if len(written) >= limit else "eos", ids=written))


def main() -> None:
    """Answers the task on standard input."""
    task = Task(**json.load(sys.stdin))

    def tell(answer: Answer) -> None:
        sys.stdout.write(json.dumps(asdict(answer)) + "\n")
        sys.stdout.flush()

    {"xllamacpp": answer_with_xllamacpp, "llama_cpp": answer_with_llama_cpp}[task.package](task, tell)
    os._exit(0)  # a server that is stopped right after its start may never end


if __name__ == "__main__":
    main()
