"""Ask llama.cpp about many GGUF files in one process, which starts only once and aborts with the first bad file.

A line of standard input asks {"model": path, "adapter": path or null, "windows": [[id, ...], ...], "vocab": V, "plain":
id}. A line of standard output answers with the log-probabilities [[[x] * V] * T] * windows; see judge.py.
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
        del server  # stops the server before the next one starts
        print(json.dumps(answer), flush=True)
    os._exit(0)  # as in judge.py


if __name__ == "__main__":
    main()
