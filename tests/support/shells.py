"""A shell that a person types into, in a terminal of its own."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = Path(sys.executable).parent / "toyexp"
START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
}
SETUP = {
    "bash": "PS1=''; bind 'set enable-bracketed-paste off'; bind 'set bell-style none'",
    "zsh": "PS1=''; PROMPT_EOL_MARK=''; bindkey -e; unsetopt beep; zstyle ':completion:*' menu no",
}


class Shell:
    """bash or zsh with toyexp's completion switched on."""

    def __init__(self, name, cwd):
        self.master, slave = pty.openpty()
        path = f"{PROGRAM.parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "TERM": "dumb", "HOME": str(cwd), "ZDOTDIR": str(cwd), "COLUMNS": "200"}
        self.process = subprocess.Popen(
            START[name], cwd=cwd, env=env, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.count = 0
        self.run(f"{SETUP[name]}; autoload -Uz compinit && compinit -u -D" if name == "zsh" else SETUP[name])
        self.run(f'eval "$(toyexp completion {name})"')
        self.run("print_words() { printf 'BEGIN%s-' $1; printf '<%s>' \"${@:2}\"; printf 'END%s-\\n' $1; }")

    def run(self, line):
        """What the shell prints in answer to a line."""
        self.count += 1
        os.write(self.master, f"{line}; echo DONE{self.count}'-'\n".encode())
        return self.read(f"DONE{self.count}-")

    def tab(self, line, then=""):
        """The words that the line becomes by a press of TAB at its end, each in < >; `then` is typed after it."""
        self.count += 1
        # Ctrl-A goes to its beginning; then the shell shows it, word by word, as it would have run it.
        os.write(self.master, f"{line}\t{then}\x01print_words {self.count} \n".encode())
        told = self.read(f"END{self.count}-")
        return re.search(rf"BEGIN{self.count}-(.*?)END{self.count}-", told, re.DOTALL)[1].strip("\r\n")

    def read(self, mark):
        """Everything up to a mark."""
        found, until = b"", time.monotonic() + 60
        while mark.encode() not in found:
            if not select.select([self.master], [], [], max(0, until - time.monotonic()))[0]:
                raise TimeoutError(found.decode(errors="replace"))
            found += os.read(self.master, 1 << 16)
        return found.decode(errors="replace")

    def close(self):
        """Ends it."""
        self.process.kill()
        self.process.wait()
        os.close(self.master)


def fish(line, cwd):
    """What fish offers for a line."""
    program = f"{PROGRAM} completion fish | source; complete -C $argv[1]"
    path = f"{PROGRAM.parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "HOME": str(cwd)}
    done = subprocess.run(
        ["fish", "--no-config", "-c", program, line], capture_output=True, text=True, cwd=cwd, env=env, timeout=60
    )
    assert done.stderr == "", done.stderr
    return [offer.partition("\t")[0] for offer in done.stdout.splitlines()]
