"""Drive an interactive shell through a pseudo-terminal."""

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
    """An interactive bash or zsh with toyexp's completion enabled."""

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
        """Run a line and return the output of the shell."""
        self.count += 1
        os.write(self.master, f"{line}; echo DONE{self.count}'-'\n".encode())
        return self.read(f"DONE{self.count}-")

    def tab(self, line, then=""):
        """Press TAB at the end of a line, type `then`, and return the completed words, each in < >."""
        self.count += 1
        # Ctrl-A moves to the start of the line; print_words then shows the arguments as the shell would pass them.
        os.write(self.master, f"{line}\t{then}\x01print_words {self.count} \n".encode())
        output = self.read(f"END{self.count}-")
        return re.search(rf"BEGIN{self.count}-(.*?)END{self.count}-", output, re.DOTALL)[1].strip("\r\n")

    def read(self, mark):
        """Return the output up to a mark. Raise TimeoutError after 60 s."""
        output, deadline = b"", time.monotonic() + 60
        while mark.encode() not in output:
            if not select.select([self.master], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError(output.decode(errors="replace"))
            output += os.read(self.master, 1 << 16)
        return output.decode(errors="replace")

    def close(self):
        """Kill the shell and close the terminal."""
        self.process.kill()
        self.process.wait()
        os.close(self.master)


def complete_in_fish(line, cwd):
    """Return the completions that fish offers for a line."""
    program = f"{PROGRAM} completion fish | source; complete -C $argv[1]"
    path = f"{PROGRAM.parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "HOME": str(cwd)}
    done = subprocess.run(
        ["fish", "--no-config", "-c", program, line], capture_output=True, text=True, cwd=cwd, env=env, timeout=60
    )
    assert done.stderr == "", done.stderr
    return [offer.partition("\t")[0] for offer in done.stdout.splitlines()]
