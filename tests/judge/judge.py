"""Asks llama.cpp about one GGUF file: `python judge.py < question.json > answer.json`.

It runs as a process of its own because llama.cpp aborts on some bad files.

A list of questions about the vocabularies of several files, each {"model": path, "texts": [...], "special": [...],
"prompts": [...], "chats": [...], "plain": id, "draw": [id, ...]}, is answered with a list of {"tokens", "special",
"prompts", "chats", "stopped_by"}: the ids of texts in which nothing is special, of texts whose control tokens are
meant, of texts with what the file says goes around one, of conversations, and what ended generation at each id drawn.

question: {"model": path, "adapter": path or null, "texts": [text, ...], "windows": [[id, ...], ...], "vocab": V,
           "plain": id, "eos": id or null, "chats": [[message, ...], ...]}
answer:   {"tokens": [[id, ...], ...], "pieces": [[byte, ...], ...], "log_probabilities": [[[x] * V] * T] * windows,
           "stopped_by": "eos" or "limit", "chats": [[id, ...], ...]}

`tokens` and `pieces` are llama.cpp's ids of each text and the bytes those ids stand for. Row t of a window's
log-probabilities is the distribution after its first t + 1 ids. `plain` is any token that is whole UTF-8.
`stopped_by` is what ended generation when llama.cpp was made to draw `eos`. `chats` are the ids of each conversation,
written by the file's chat template, up to where the assistant answers.
"""

import json
import os
import sys
import urllib.error
import urllib.request

import xllamacpp

# The server answers on this machine: whatever proxy the environment names has no say in it.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


SERVERS = []  # a server stops when it is collected


def serve(path, adapter):
    """A llama.cpp server with everything off that rounds: f32 key/value cache and no flash attention."""
    params = xllamacpp.CommonParams()
    params.model.path = path
    if adapter:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(adapter, 1.0)]
    params.n_ctx = 256  # llama.cpp pads to this anyway, and cuts to the model's own context
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup = False
    params.offline = True
    return xllamacpp.Server(params)


def post(address, path, body):
    request = urllib.request.Request(address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with OPENER.open(request) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        raise SystemExit(f"llama.cpp answered {path} with {error.read().decode()}") from None


def tokenize(address, text):
    """The ids of a text, in which no token is special, and the bytes of their pieces."""
    body = {"content": text, "add_special": True, "parse_special": False, "with_pieces": True}
    tokens = post(address, "/tokenize", body)["tokens"]
    pieces = b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in (t["piece"] for t in tokens))
    return [t["id"] for t in tokens], list(pieces)


def tokenize_many(address, texts, parse_special):
    """The ids of each text, in one request: an id that is none stands before each."""
    content = [part for text in texts for part in (-1, text)]
    body = {"content": content, "add_special": False, "parse_special": parse_special}
    found = []
    for token in post(address, "/tokenize", body)["tokens"]:
        if token == -1:
            found.append([])
        else:
            found[-1].append(token)
    return found


def vocabulary(question):
    """What a file's tokenizer makes of texts."""
    server = serve(question["model"], None)
    SERVERS.append(server)
    address = server.listening_address
    bodies = [{"content": text, "add_special": True, "parse_special": False} for text in question["prompts"]]
    return {
        "tokens": tokenize_many(address, question["texts"], False),
        "special": tokenize_many(address, question["special"], True),
        "prompts": [post(address, "/tokenize", body)["tokens"] for body in bodies],
        "chats": [prompt(address, messages) for messages in question["chats"]],
        "stopped_by": {i: draw(address, [question["plain"]], i, 0)["stop_type"] for i in question["draw"]},
    }


def prompt(address, messages):
    """The ids that a chat hands to the model, in which the template's control tokens are special."""
    text = post(address, "/apply-template", {"messages": messages})["prompt"]
    return post(address, "/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]


def draw(address, ids, forced, probabilities):
    """One token after `ids`. The bias makes llama.cpp draw `forced`; the probabilities it reports ignore the bias.

    A token that is no whole UTF-8 would be reported without probabilities, hence the forcing.
    """
    return post(
        address,
        "/completion",
        {
            "prompt": ids,
            "n_predict": 1,
            "n_probs": probabilities,
            "temperature": 0,
            "logit_bias": [[forced, 1e4]],
            "cache_prompt": True,  # each position then costs one token
        },
    )


def distribution(address, ids, forced, vocab):
    """The log-probabilities after `ids`, by token id."""
    top = draw(address, ids, forced, vocab)["completion_probabilities"][0]["top_logprobs"]
    by_id = {entry["id"]: entry["logprob"] for entry in top}
    return [by_id[i] for i in range(vocab)]


def main():
    question = json.load(sys.stdin)
    if isinstance(question, list):
        tell([vocabulary(one) for one in question])
    server = serve(question["model"], question["adapter"])  # kept in a name: the server stops when it is collected
    address = server.listening_address
    texts = [tokenize(address, text) for text in question["texts"]]
    vocab, plain, eos = question["vocab"], question["plain"], question["eos"]
    tell(
        {
            "tokens": [ids for ids, _ in texts],
            "pieces": [pieces for _, pieces in texts],
            "log_probabilities": [
                [distribution(address, window[: t + 1], plain, vocab) for t in range(len(window))]
                for window in question["windows"]
            ],
            "stopped_by": None if eos is None else draw(address, [plain], eos, 0)["stop_type"],
            "chats": [prompt(address, messages) for messages in question["chats"]],
        }
    )


def tell(answer):
    json.dump(answer, sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # a server that is stopped right after its start may never end


if __name__ == "__main__":
    main()
