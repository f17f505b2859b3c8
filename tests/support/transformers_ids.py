"""What transformers makes of directories: `python transformers_ids.py < questions.json > answers.json`.

A process of its own for a version of transformers that is not the one installed. A question is {"path", "texts",
"chat", "options"}, the last for AutoTokenizer; its answer holds the ids of the texts alone and with what goes around
them, the texts of those ids, the ids of the conversation, how many tokens there are, and which are special.
"""

import json
import os
import sys


def answers(questions):
    """transformers' version, and an answer to each question."""
    import transformers

    return {"version": transformers.__version__, "answers": [answer(transformers, q) for q in questions]}


def answer(transformers, question):
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
    told = answers(json.load(sys.stdin))
    json.dump(told, sys.stdout)
