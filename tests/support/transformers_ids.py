"""Tokenize texts with transformers: `python transformers_ids.py < questions.json > answers.json`.

Runs as its own process, so that it can use another version of transformers than the installed one. A question is
{"path", "texts", "chat", "options"}; the options go to AutoTokenizer. Its answer holds the ids of the texts without and
with special tokens, the decoded texts, the ids of the chat, the vocabulary size and the special ids.
"""

import json
import os
import sys


def answer_all(questions):
    """Return the version of transformers and an answer to each question."""
    import transformers

    return {"version": transformers.__version__, "answers": [answer_question(transformers, q) for q in questions]}


def answer_question(transformers, question):
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        question["path"], local_files_only=True, **question["options"]
    )
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in question["texts"]]
    chat = question["chat"]
    return {
        "ids": ids,
        "prompts": [tokenizer(text).input_ids for text in question["texts"]],
        "decoded": [tokenizer.decode(i, skip_special_tokens=True) for i in ids],
        "chat": chat and tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False),
        "size": len(tokenizer),
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
        "padded": tokenizer(["", question["texts"][-1]], padding=True, add_special_tokens=False).input_ids[0],
    }


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    json.dump(answer_all(json.load(sys.stdin)), sys.stdout)
