"""llama.cpp writes text, in a process of its own: on some files it ends its process.

Its module run as a program reads one request in JSON and answers in lines of JSON: {"prompt_ids": [...]}, then
{"text": ...} as it comes, and at last {"count": ..., "stopped": "eos" or "limit"}. Its key/value cache is float32 and
flash attention off, so that nothing is rounded that our engines do not round.
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
from typing import Any

from toyexp.base.errors import RunFailed, Unavailable, printable
from toyexp.base.packages import why_not_apart

PACKAGES = ("xllamacpp", "llama_cpp")
MARGIN = 1024  # positions for what a chat template adds

Tell = Callable[..., None]


def installed() -> str:
    """The Python package to use; Unavailable when none works here."""
    reasons = {name: why_not_apart(name) for name in PACKAGES}
    for name, reason in reasons.items():
        if reason is None:
            return name
    told = ", ".join(f"{name} {reason}" for name, reason in reasons.items())
    raise Unavailable(f"--engine llama.cpp: {told}: pip install xllamacpp, or llama-cpp-python")


def stream(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What the process answers, line by line; RunFailed with llama.cpp's own words when it does not get through.

    `request` has the `package`, `file` and `adapter` (or None), `threads` (0: its own choice), either `ids` or `text`
    and whether that is a `chat`, the model's `context` and how many positions to reserve (`n_ctx`), the number of
    `tokens`, `sampling` with `seed`, and whether to answer with all `ids` at the end in place of a `stream`: llama.cpp
    does not say which tokens made a character of several.
    """
    with tempfile.TemporaryFile("w+") as asked, tempfile.TemporaryFile("w+", errors="replace") as log:
        json.dump(request, asked)
        asked.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", "toyexp.commands.llamacpp"],
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},  # an abort is told in one line, without starting a debugger
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield json.loads(line)
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


def through_xllamacpp(request: Mapping[str, Any], tell: Tell) -> None:
    """Answers through the server of xllamacpp, which speaks HTTP on this machine."""
    server = _server(request)  # kept in a name: the server stops when it is collected
    # The server is on this machine: whatever proxy the environment names has no say in it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def post(path: str, **body: Any) -> Any:
        head = {"Content-Type": "application/json"}
        try:
            return opener.open(urllib.request.Request(server.listening_address + path, json.dumps(body).encode(), head))
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{path} error {error.read().decode(errors='replace')}") from None

    ids = request["ids"]
    if ids is None:
        text = request["text"]
        if request["chat"]:
            text = json.load(post("/apply-template", messages=[{"role": "user", "content": text}]))["prompt"]
        found = post("/tokenize", content=text, add_special=True, parse_special=request["chat"])
        ids = json.load(found)["tokens"]
    tell(prompt_ids=ids)
    room = request["context"] - len(ids) + 1
    if room < 1:
        return
    wanted = {"prompt": ids, "n_predict": min(request["tokens"], room), "stream": request["stream"]}
    # Only what was asked for: its own defaults know more samplers.
    cuts = {"samplers": ["top_k", "top_p", "min_p", "temperature"], "repeat_penalty": 1.0, "return_tokens": True}
    with post("/completion", **wanted, **cuts, **request["sampling"]) as reply:
        for line in reply:
            if request["stream"] and not line.startswith(b"data: "):
                continue
            piece = json.loads(line.removeprefix(b"data: "))
            if "error" in piece:
                raise SystemExit(f"error {piece['error']}")
            tell(text=piece["content"])
            if piece["stop"]:
                tell(count=piece["tokens_predicted"], stopped=piece["stop_type"], ids=piece["tokens"])
                return


def _server(request: Mapping[str, Any]) -> Any:
    """xllamacpp's server with the model in memory."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = request["file"]
    if request["adapter"]:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(request["adapter"], 1.0)]
    params.n_ctx = request["n_ctx"]
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if request["threads"]:
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = request["threads"]
    params.warmup = False
    params.offline = True
    return xllamacpp.Server(params)


def through_llama_cpp(request: Mapping[str, Any], tell: Tell) -> None:
    """Answers through llama-cpp-python."""
    import llama_cpp

    model = llama_cpp.Llama(
        request["file"], n_ctx=request["n_ctx"], n_gpu_layers=0, lora_path=request["adapter"], flash_attn=False,
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32, n_threads=request["threads"] or None,
        n_threads_batch=request["threads"] or None, seed=request["sampling"]["seed"], verbose=False,
    )  # fmt: skip
    vocabulary = llama_cpp.llama_model_get_vocab(model.model)
    ids = request["ids"]
    if ids is None:
        text, begin = request["text"], True
        if request["chat"]:
            from llama_cpp.llama_chat_format import Jinja2ChatFormatter

            eos, bos = (model._model.token_get_text(i) for i in (model.token_eos(), model.token_bos()))
            template = model.metadata.get("tokenizer.chat_template")
            if template is None:
                raise SystemExit("error: the file has no chat template")
            text = Jinja2ChatFormatter(template, eos, bos)(messages=[{"role": "user", "content": text}]).prompt
            begin = not text.startswith(bos)
        ids = model.tokenize(text.encode(), add_bos=begin, special=request["chat"])
    tell(prompt_ids=ids)
    limit = min(request["tokens"], request["context"] - len(ids) + 1)
    sampling = request["sampling"]
    cuts = {"temp": sampling["temperature"], **{name: sampling[name] for name in ("top_k", "top_p", "min_p")}}
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    written: list[int] = []
    for token in model.generate(ids, repeat_penalty=1.0, **cuts):
        if llama_cpp.llama_vocab_is_eog(vocabulary, token):
            break
        written.append(token)
        tell(text=decode(model.detokenize([token], prev_tokens=ids)))
        if len(written) >= limit:
            break
    tell(text=decode(b"", True))
    tell(count=len(written), stopped="limit" if len(written) >= limit else "eos", ids=written)


def main() -> None:
    """Answers the request on standard input."""
    request = json.load(sys.stdin)

    def tell(**answer: Any) -> None:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()

    {"xllamacpp": through_xllamacpp, "llama_cpp": through_llama_cpp}[request["package"]](request, tell)
    os._exit(0)  # a server that is stopped right after its start may never end


if __name__ == "__main__":
    main()
