"""Asks llama.cpp about many GGUF files, one after another in one process: it starts once, and aborts with one file.

A line of standard input asks {"model": path, "adapter": path or null, "windows": [[id, ...], ...], "vocab": V,
"plain": id}, a line of standard output answers with the log-probabilities [[[x] * V] * T] * windows; see judge.py.
"""

import json
import os
import sys

from judge import distribution, serve


def main():
    for line in sys.stdin:
        question = json.loads(line)
        server = serve(question["model"], question["adapter"])
        answer = [
            [
                distribution(server.listening_address, window[: t + 1], question["plain"], question["vocab"])
                for t in range(len(window))
            ]
            for window in question["windows"]
        ]
        del server  # which stops it, before the next one is started
        print(json.dumps(answer), flush=True)
    os._exit(0)  # as in judge.py


if __name__ == "__main__":
    main()
