"""Generate text with llama.cpp. It runs in a subprocess, because some files make it crash.

The subprocess reads a `Task` from standard input and prints `Answer`s, both as JSON. The key/value cache is float32
and flash attention is off, so that llama.cpp rounds no more numbers than toyexp's engines do.
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

LLAMA_CPP = "llama.cpp"  # the value of --engine
PACKAGES = ("xllamacpp", "llama_cpp")
MARGIN = 1024  # positions for the tokens that a chat template adds


@dataclass(frozen=True)
class Task:
    """Request for one generation."""

    package: str  # one of PACKAGES
    file: str
    adapter: str | None
    threads: int  # 0: llama.cpp chooses
    ids: list[int] | None  # the prompt as token ids; None: `text` is the prompt
    text: str
    chat: bool  # True if `text` is a user message for the chat template
    context: int  # maximum number of tokens that the model reads at once
    n_ctx: int  # positions to reserve
    tokens: int  # maximum to generate
    sampling: Mapping[str, float]  # sampling settings and the seed
    stream: bool  # True: text as it is generated; False: text and all ids at the end


@dataclass(frozen=True)
class Answer:
    """Message of the subprocess.

    The first message has the ids of the prompt, and the last one has the number and ids of the generated tokens and the
    stop reason. Each message in between has a piece of text.
    """

    prompt_ids: list[int] | None = None
    text: str = ""
    count: int | None = None
    stop_reason: str = ""  # eos or limit
    ids: list[int] = field(default_factory=list)


Send = Callable[[Answer], None]


def find_package() -> str:
    """Return the name of the first package in PACKAGES that can be imported. Raise Unavailable if none can."""
    reasons = {name: probe_import(name) for name in PACKAGES}
    for name, reason in reasons.items():
        if reason is None:
            return name
    details = ", ".join(f"{name} {reason}" for name, reason in reasons.items())
    raise Unavailable(f"--engine llama.cpp: {details}: pip install xllamacpp, or llama-cpp-python")


def stream(task: Task) -> Iterator[Answer]:
    """Run a task in a subprocess and yield its answers. Raise RunFailed with llama.cpp's own error if it fails."""
    with tempfile.TemporaryFile("w+") as request, tempfile.TemporaryFile("w+", errors="replace") as log:
        json.dump(asdict(task), request)
        request.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", "toyexp.inference.llamacpp"],
            stdin=request,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},  # an abort prints one line and starts no debugger
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
    """Return the line of llama.cpp's log about a failed assertion or an error; the last line if there is none."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    marks = ("GGML_ASSERT", "GGML_ABORT", " E ", "error", "SystemExit")
    errors = [line for mark in marks for line in lines if mark in line]
    words = (errors or lines[-1:] or [f"it ended with {code}"])[0]
    return printable(words.partition(" E ")[2] or words, 300)


# -- in the subprocess ------------------------------------------------------------------------------------------------


def answer_with_xllamacpp(task: Task, send: Send) -> None:
    """Answer a task with xllamacpp. Its server runs on this machine and is called over HTTP."""
    server = _start_server(task)  # the variable keeps the server alive: it stops when it is garbage-collected
    # The server is local, so ignore a proxy that the environment sets.
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
        reply = post("/tokenize", content=text, add_special=True, parse_special=task.chat)
        ids = json.load(reply)["tokens"]
    send(Answer(prompt_ids=ids))
    room = task.context - len(ids) + 1
    if room < 1:
        return
    request = {"prompt": ids, "n_predict": min(task.tokens, room), "stream": task.stream}
    # Only the requested samplers: the defaults of llama.cpp include more.
    samplers = {"samplers": ["top_k", "top_p", "min_p", "temperature"], "repeat_penalty": 1.0, "return_tokens": True}
    with post("/completion", **request, **samplers, **task.sampling) as reply:
        for line in reply:
            if task.stream and not line.startswith(b"data: "):
                continue
            piece = json.loads(line.removeprefix(b"data: "))
            if "error" in piece:
                raise SystemExit(f"error {piece['error']}")
            send(Answer(text=piece["content"]))
            if piece["stop"]:
                send(Answer(count=piece["tokens_predicted"], stop_reason=piece["stop_type"], ids=piece["tokens"]))
                return


def _start_server(task: Task) -> Any:
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


def answer_with_llama_cpp(task: Task, send: Send) -> None:
    """Answer a task with llama-cpp-python."""
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
    send(Answer(prompt_ids=ids))
    limit = min(task.tokens, task.context - len(ids) + 1)
    sampling = task.sampling
    samplers = {"temp": sampling["temperature"], **{name: sampling[name] for name in ("top_k", "top_p", "min_p")}}
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    generated: list[int] = []
    for token in model.generate(ids, repeat_penalty=1.0, **samplers):
        if llama_cpp.llama_vocab_is_eog(vocabulary, token):
            break
        generated.append(token)
        send(Answer(text=decode(model.detokenize([token], prev_tokens=ids))))
        if len(generated) >= limit:
            break
    send(Answer(text=decode(b"", True)))
    stop_reason = "limit" if len(generated) >= limit else "eos"
    send(Answer(count=len(generated), stop_reason=stop_reason, ids=generated))


def main() -> None:
    """Read a task from standard input and print the answers."""
    task = Task(**json.load(sys.stdin))

    def send(answer: Answer) -> None:
        sys.stdout.write(json.dumps(asdict(answer)) + "\n")
        sys.stdout.flush()

    {"xllamacpp": answer_with_xllamacpp, "llama_cpp": answer_with_llama_cpp}[task.package](task, send)
    os._exit(0)  # stopping a server right after its start may hang


if __name__ == "__main__":
    main()
