"""Ask llama.cpp about one GGUF file: `python judge.py < question.json > answer.json`.

The script runs in its own process because llama.cpp aborts on some bad files.

A list of questions about the vocabularies of several files, each {"model": path, "texts": [...], "special": [...],
"prompts": [...], "chats": [...], "plain": id, "draw": [id, ...]}, is answered with a list of {"tokens", "special",
"prompts", "chats", "stopped_by"}: the ids of texts without special tokens, of texts with special tokens, of texts with
the file's begin and end tokens, of conversations, and the reason why generation ended at each id drawn.

question: {"model": path, "adapter": path or null, "texts": [text, ...], "windows": [[id, ...], ...], "vocab": V,
           "plain": id, "eos": id or null, "chats": [[message, ...], ...]}
answer:   {"tokens": [[id, ...], ...], "pieces": [[byte, ...], ...], "log_probabilities": [[[x] * V] * T] * windows,
           "stopped_by": "eos" or "limit", "chats": [[id, ...], ...]}

`tokens` and `pieces` are llama.cpp's ids of each text and the bytes of these ids. Row t of a window's
log-probabilities is the distribution after its first t + 1 ids. `plain` is any token that is complete UTF-8.
`stopped_by` is the reason why generation ended after `eos` was forced. `chats` are the ids of each conversation,
rendered with the file's chat template, up to the assistant's answer.
"""

import json
import os
import sys
import urllib.error
import urllib.request

import xllamacpp

# The server runs on this machine, so a proxy in the environment must not be used.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


SERVERS = []  # keeps servers alive: a server stops when it is garbage-collected


def serve(path, adapter):
    """Start a llama.cpp server without lossy options: f32 key/value cache and no flash attention."""
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
    params.swa_full = True  # keep all positions of layers with a window, so that a prompt can replace the previous one
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
    """Return the ids of a text without special tokens, and the bytes of their pieces."""
    body = {"content": text, "add_special": True, "parse_special": False, "with_pieces": True}
    tokens = post(address, "/tokenize", body)["tokens"]
    pieces = b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in (t["piece"] for t in tokens))
    return [t["id"] for t in tokens], list(pieces)


def tokenize_many(address, texts, parse_special):
    """Return the ids of each text in one request; the invalid id -1 separates them."""
    content = [part for text in texts for part in (-1, text)]
    body = {"content": content, "add_special": False, "parse_special": parse_special}
    id_lists = []
    for token in post(address, "/tokenize", body)["tokens"]:
        if token == -1:
            id_lists.append([])
        else:
            id_lists[-1].append(token)
    return id_lists


def answer_vocabulary(question):
    """Return a file's token ids of texts, prompts and chats, and its end tokens."""
    server = serve(question["model"], None)
    SERVERS.append(server)
    address = server.listening_address
    bodies = [{"content": text, "add_special": True, "parse_special": False} for text in question["prompts"]]
    return {
        "tokens": tokenize_many(address, question["texts"], False),
        "special": tokenize_many(address, question["special"], True),
        "prompts": [post(address, "/tokenize", body)["tokens"] for body in bodies],
        "chats": [chat_ids(address, messages) for messages in question["chats"]],
        "stopped_by": {i: draw(address, [question["plain"]], i, 0)["stop_type"] for i in question["draw"]},
    }


def chat_ids(address, messages):
    """Return the ids of a chat as the model gets it, with the template's control tokens as special tokens."""
    text = post(address, "/apply-template", {"messages": messages})["prompt"]
    return post(address, "/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]


def draw(address, ids, forced, probabilities):
    """Generate one token after `ids`. The bias forces the token `forced`; reported probabilities ignore the bias.

    Without forcing, a token that is not complete UTF-8 would be reported without probabilities.
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
            "cache_prompt": True,  # so that each position costs one token
        },
    )


def distribution(address, ids, forced, vocab):
    """Return the log-probabilities after `ids`, by token id."""
    top = draw(address, ids, forced, vocab)["completion_probabilities"][0]["top_logprobs"]
    by_id = {entry["id"]: entry["logprob"] for entry in top}
    return [by_id[i] for i in range(vocab)]


def main():
    question = json.load(sys.stdin)
    if isinstance(question, list):
        write_answer([answer_vocabulary(one) for one in question])
    server = serve(question["model"], question["adapter"])  # a variable keeps the server alive
    address = server.listening_address
    texts = [tokenize(address, text) for text in question["texts"]]
    vocab, plain, eos = question["vocab"], question["plain"], question["eos"]
    write_answer(
        {
            "tokens": [ids for ids, _ in texts],
            "pieces": [pieces for _, pieces in texts],
            "log_probabilities": [
                [distribution(address, window[: t + 1], plain, vocab) for t in range(len(window))]
                for window in question["windows"]
            ],
            "stopped_by": None if eos is None else draw(address, [plain], eos, 0)["stop_type"],
            "chats": [chat_ids(address, messages) for messages in question["chats"]],
        }
    )


def write_answer(answer):
    json.dump(answer, sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # a server stopped right after its start may never end


if __name__ == "__main__":
    main()
