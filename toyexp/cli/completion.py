"""Tab completion of command lines: `toyexp completion`.

Candidates come from the same tables that parse the command line. Only conf/ and directories given with --config-dir
are read; files below the working directory are listed but not opened.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from argparse import Action
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from toyexp.base.errors import UserError, suggest
from toyexp.base.terminal import COLOUR_CHOICES, print_line
from toyexp.cli.commands import find
from toyexp.cli.new import KINDS
from toyexp.cli.pages import topics
from toyexp.config.flags import SHORT_FLAGS
from toyexp.config.flags import parser as flag_parser
from toyexp.config.paths import CONF
from toyexp.config.top_level import GROUPS, HYDRA_KEYS, top_level_settings
from toyexp.inference.llamacpp import LLAMA_CPP
from toyexp.interfaces.command import Arguments, Command
from toyexp.plugins.discovery import load
from toyexp.plugins.settings import Setting, list_settings

PATH = re.compile(r"\b(file|folder|GGUF|directory)\b")  # in a setting's comment: its value is a path
RUNS = 20  # number of newest runs offered
SHELLS = ("bash", "fish", "zsh")


@dataclass(frozen=True)
class Candidate:
    """A possible completion of the word at the cursor."""

    text: str  # the whole completed word
    help: str = ""  # description that zsh and fish show
    more: bool = False  # True: the shell adds no space after it, because more text must follow
    path: bool = False  # True: the text is a path, so bash needs its special characters escaped


def complete(words: Sequence[str]) -> list[Candidate]:
    """Return the completions of the last word, which may be empty. `words` are those after `toyexp` on the line."""
    *before, word = words
    command = find(before[0], before) if before and before[0].isidentifier() else None
    unique: dict[str, Candidate] = {}
    for candidate in Line(before, word).candidates(command):
        if candidate.text.startswith(word):
            unique.setdefault(candidate.text.removesuffix("/"), candidate)  # offer a run once, without slash
    return sorted(unique.values(), key=lambda c: c.text)


class Line:
    """A command line: the word at the cursor and the words before it."""

    def __init__(self, before: Sequence[str], word: str):
        self.before, self.word, self.registry = before, word, load()

    # -- kinds of words ------------------------------------------------------------------------------------------

    def candidates(self, command: Command | None) -> Iterator[Candidate]:
        """Yield possible completions of the word at the cursor. `complete` drops those that do not begin with it.

        `command` is the sub-command of the line, or None for a run or sweep. After an option, yield values of that
        option. If the word begins with a dash, yield options. Otherwise yield settings, files or names.
        """
        parser = command.parser() if command else flag_parser()
        kinds = ["settings"] if self.before else ["settings", "commands"]
        if command:
            kinds = command.completions.split()
        options = parser.options
        flag, equals, value = self.word.partition("=")
        last = SHORT_FLAGS.get(self.before[-1], self.before[-1]) if self.before else ""
        if last in options and options[last].nargs != 0:
            yield from self._option_values(last, options[last], self.word)
        elif equals and flag in options:
            yield from (replace(c, text=f"{flag}={c.text}") for c in self._option_values(flag, options[flag], value))
        elif self.word.startswith("-"):
            yield from (Candidate(flag, option.help or "") for flag, option in options.items())
            yield from map(Candidate, (*(f"--color={choice}" for choice in COLOUR_CHOICES), "--help"))
            yield from map(Candidate, () if command else ("--version",))
        else:
            for kind in kinds:
                yield from self._words_of_kind(kind)

    def _words_of_kind(self, kind: str) -> Iterator[Candidate]:
        match kind:
            case "settings":
                yield from self.settings()
            case "commands":
                yield from self._plugin_names("command")
            case "names":
                for offered in self.registry.offers:
                    yield from self._plugin_names(offered)
            case "topics":
                yield from map(Candidate, topics())
            case "kinds":
                yield from map(Candidate, KINDS)
            case "shells":
                yield from map(Candidate, SHELLS)
            case "directory":
                yield from paths(self.word, ("/",))
            case "file":
                yield from runs()
                yield from paths(self.word, (".gguf",))

    def _plugin_names(self, kind: str, form: str = "{}") -> Iterator[Candidate]:
        return (Candidate(form.format(n), o.help) for n, o in self.registry.offers.get(kind, {}).items())

    def _option_values(self, flag: str, option: Action, word: str) -> Iterator[Candidate]:
        """Yield values of the option `flag`; `word` is the part of the value that is typed.

        Depending on the option, the values are engines, file types, directories, files, or a fixed list of choices.
        """
        match flag:
            case "--engine":
                yield from [*self._choices("engine"), Candidate(LLAMA_CPP)]
            case "--type":
                yield from map(Candidate, self.registry.types())
            case "--config-dir" | "--config-path":
                yield from paths(word, ("/",))
            case _ if option.choices:
                yield from map(Candidate, map(str, option.choices))
            case _ if option.type in (None, str) and Path(str(option.metavar)).suffix:
                yield from paths(word)

    # -- settings ----------------------------------------------------------------------------------------------------

    def settings(self) -> Iterator[Candidate]:
        """Yield keys of settings. If the word at the cursor is `key=...`, yield values of that key instead."""
        key, equals, value = self.word.partition("=")
        if equals:
            for c in self._values(key.lstrip("+~"), value):
                yield replace(c, text=f"{key}={c.text}")
            return
        prefix = self.word[: len(self.word) - len(self.word.lstrip("+~"))]
        candidates = (
            self._plugin_names("callbacks", "callbacks.{}") if prefix == "~" else self._keys(self.word[len(prefix) :])
        )
        yield from (replace(c, text=prefix + c.text) for c in candidates)

    def _keys(self, word: str) -> Iterator[Candidate]:
        """Yield keys that complete `word`, each only up to its next dot: first `optim.`, then `optim.lr=`.

        A key of a callback's setting has two dots, as in callbacks.sample.every.
        """
        short = "." not in word
        keys = [(name, "") for name in (*GROUPS, *(f"{name}." for name in GROUPS if short and name != "experiment"))]
        keys += [(key, s.comment) for key, s in self._settings(word)]
        for key, comment in keys:
            dot = key.find(".", len(word)) + 1 if short or word.startswith("callbacks.") else 0
            yield Candidate(key[:dot], more=True) if dot else Candidate(f"{key}=", comment, more=True)

    def _values(self, key: str, value: str) -> Iterator[Candidate]:
        if key in GROUPS:
            yield from self._group_names(key, value)
            return
        for setting in [setting for name, setting in self._settings(key) if name == key]:
            choices, suffixes = possible_values(setting)
            yield from map(Candidate, choices)
            if "run's directory" in setting.comment:
                yield from runs()
            if suffixes is not None:
                yield from paths(value, suffixes)

    def _group_names(self, kind: str, value: str) -> Iterator[Candidate]:
        """Yield completions of `value`, which consists of names in the config group `kind`.

        `value` may be one name, a list such as [default,sample], or several names separated by commas for a sweep.
        Names that `value` contains already are left out.
        """
        head = value[: max(value.rfind("["), value.rfind(",")) + 1] or ("[" if kind == "callbacks" else "")
        typed = re.split(r"[\[,]", head)
        candidates = [c for c in self._choices(kind) if c.text not in typed]
        for c in candidates:
            if not head.startswith("["):
                yield replace(c, text=head + c.text)
            elif [f for f in candidates if (head + f.text).startswith(value)] == [
                c
            ]:  # the only match: offer what follows it
                yield from (replace(c, text=f"{head}{c.text}{end}", more=end == ",") for end in "],")
            else:
                yield replace(c, text=head + c.text, more=True)

    # -- sources --------------------------------------------------------------------------------------------------

    def _choices(self, kind: str) -> list[Candidate]:
        """Return the names in the config group `kind`: those of plugins, and of presets in the config directories."""
        pairs = zip(self.before, self.before[1:], strict=False)
        chosen = [value for flag, value in pairs if SHORT_FLAGS.get(flag, flag) in ("--config-dir", "--config-path")]
        roots = [d / kind for d in (*map(Path, chosen), CONF)]
        candidates = [Candidate(p.relative_to(d).with_suffix("").as_posix()) for d in roots for p in d.rglob("*.yaml")]
        candidates += [Candidate("auto", "The best engine on this machine.")] if kind == "engine" else []
        return list({c.text: c for c in (*candidates, *self._plugin_names(kind))}.values())

    def _settings(self, key: str) -> Iterator[tuple[str, Setting]]:
        """Yield (full key, setting) for every top-level setting, and for settings of parts in the group of `key`.

        In the group data, for example, these are the settings of the data plugin that the line chooses with data=NAME.
        If the line chooses none, they are the settings of every data plugin. In the group callbacks, they are the
        settings of every callback.
        """
        yield from top_level_settings()
        yield from ((key, Setting("dir", "str", "", "")) for key in HYDRA_KEYS[:3])
        kind = key.partition(".")[0]
        offers = self.registry.offers.get(kind, {}) if "." in key else {}
        chosen = next((w.partition("=")[2] for w in self.before if w.startswith(f"{kind}=")), "")
        for name, offer in offers.items():
            where = f"{kind}.{name}" if kind == "callbacks" else kind
            if where != kind or name == chosen or chosen not in offers:
                yield from ((f"{where}.{s.name}", s) for s in list_settings(offer.cls))


def possible_values(setting: Setting) -> tuple[list[str], tuple[str, ...] | None]:
    """Return the values that a setting can have, and the suffixes of the files that it accepts.

    Both are read from the setting's type and from its comment, such as `one | other (why) | a GGUF file`. The suffixes
    are None if the setting is not a path, () if it accepts any file, and ("/",) if it accepts only directories.
    """
    if setting.type.startswith("bool"):
        return ["true", "false"], None
    if not setting.type.startswith("str"):
        return [], None
    comment = re.sub(r"\(.*?\)", "", setting.comment)
    first, *others = comment.split(" | ")
    words = [first.split()[-1], *(other.split()[0] for other in others)] if others else []
    choices = [word.strip(":,;.") for word in words if word != "a"]
    kinds = set(PATH.findall(comment)) | ({"directory"} if setting.name == "dir" else set())
    if not kinds or not (choices or setting.name == "dir" or setting.default in (None, "")):
        return choices, None
    return choices, (".gguf",) if "GGUF" in kinds else () if "file" in kinds else ("/",)


# -- files ----------------------------------------------------------------------------------------------


def paths(word: str, suffixes: Sequence[str] = ()) -> Iterator[Candidate]:
    """Yield directories and files that begin with `word`.

    If `suffixes` is not empty, yield only the files that end in one of them. With ("/",) yield only directories.
    """
    folder, slash, start = word.rpartition("/")
    with contextlib.suppress(OSError), os.scandir(Path(folder + slash or ".").expanduser()) as entries:
        for entry in entries:
            if not entry.name.startswith(start) or entry.name.startswith(".") > start.startswith("."):
                continue
            if entry.is_dir():
                yield Candidate(f"{folder}{slash}{entry.name}/", more=True, path=True)
            elif not suffixes or entry.name.endswith(tuple(suffixes)):
                yield Candidate(folder + slash + entry.name, path=True)


def runs() -> list[Candidate]:
    """Return the directories of the newest runs in outputs/ as completions, newest first."""
    with contextlib.suppress(OSError):
        directories = [path.parent for path in Path("outputs").glob("*/*/config.yaml")]
        newest = sorted(directories, key=lambda p: p.name, reverse=True)[:RUNS]
        return [Candidate(str(path), f"run of {path.parent.name}", path=True) for path in newest]
    return []


# -- shell scripts and their requests ----------------------------------------------------


HELP = """\
usage: toyexp completion bash|zsh|fish

Print a completion script. Run the command below in the shell to enable it, or add it to the startup file:
  ~/.bashrc                     eval "$(toyexp completion bash)"
  ~/.zshrc                      eval "$(toyexp completion zsh)"
  ~/.config/fish/config.fish    toyexp completion fish | source"""

# Readline only replaces the text after the last character of COMP_WORDBREAKS, such as `=`, not the whole word.
BASH = r"""_toyexp() {
    local IFS=$'\n' line
    COMPREPLY=()
    while read -r line; do
        [[ -n $line ]] && COMPREPLY+=("$line")
    done < <("${1/#\~/$HOME}" completion --for bash "${COMP_LINE:0:COMP_POINT}" "$COMP_WORDBREAKS" 2>/dev/null)
}
complete -o nospace -F _toyexp toyexp
"""
ZSH = r"""#compdef toyexp
_toyexp() {
    local kind text help
    local -a plain plain_lines more more_lines
    while IFS=$'\t' read -r kind text help; do
        help="$text${help:+  -- $help}"
        [[ -n $text ]] || continue
        if [[ $kind == more ]]; then
            more+=("$text") more_lines+=("$help")
        else
            plain+=("$text") plain_lines+=("$help")
        fi
    done < <("${${(Q)words[1]}/#\~/$HOME}" completion --for zsh "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)
    (( $#plain )) && compadd -l -d plain_lines -- "${plain[@]}"
    (( $#more )) && compadd -S '' -l -d more_lines -- "${more[@]}"
    (( $#plain + $#more ))
}
if [[ ${funcstack[1]} == _toyexp ]]; then
    _toyexp "$@"
else
    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
    compdef _toyexp toyexp
fi
"""
FISH = r"""function __toyexp
    set -l words (commandline -opc)
    set -l program (string replace -r '^~' $HOME -- $words[1])
    $program completion --for fish $words[2..-1] (commandline -ct) 2>/dev/null
end
complete -c toyexp -f -a '(__toyexp)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
SHELL_CHARACTERS = r"""[ \t\n"'`\\$&;<>|()!*?]"""  # characters that bash needs escaped in a path


def run(arguments: Arguments) -> int:
    """Print the completion script of a shell.

    With --for, print the completions of a command line instead. The completion script calls `toyexp completion --for`;
    users do not type this option.
    """
    words = arguments.rest
    if words[:1] == ["--for"] and words[1:2] and words[1] in SHELLS:
        print_line("\n".join(answer(words[1], words[2:])))
        return 0
    if len(words) != 1 or words[0] not in SHELLS:
        hint = suggest(words[0] if words else "", SHELLS)
        raise UserError(f"completion {' '.join(words)}".rstrip() + f": needs the name of one shell; {hint}")
    print_line(SCRIPTS[words[0]])
    return 0


def answer(shell: str, words: Sequence[str]) -> list[str]:
    """Return the completions of a command line as lines that the completion script of `shell` reads.

    For bash, `words` has two items: the line up to the cursor, and the value of bash's variable COMP_WORDBREAKS. For
    zsh and fish, `words` are the words after `toyexp` on the line.
    """
    if shell == "bash":
        typed = read_line(*words[:2])
        return [typed.replacement(c) for c in complete(typed.words[1:] or [""])]
    *before, word = words or [""]
    if shell == "zsh":
        return ["\t".join(("more" if c.more else "word", c.text, c.help)) for c in complete([*before, word])]
    return [f"{c.text}\t{c.help}" for c in complete([*before, read_line(word).words[-1]])]  # fish keeps the quotes


class TypedLine(NamedTuple):
    """Command line up to the cursor, split into words as in bash; the last word is the one to complete."""

    words: list[str]  # unquoted
    kept_length: int  # number of characters at the start of the last word that readline keeps
    quote: str  # the quote that the last word opens and does not close; empty: none

    def replacement(self, candidate: Candidate) -> str:
        """Return the text that readline puts into the command line for `candidate`.

        This text replaces the end of the last word, after the characters that readline keeps.
        """
        text = candidate.text[self.kept_length :]
        if self.quote:  # readline closes the quote
            return text
        if candidate.path:
            text = re.sub(SHELL_CHARACTERS, r"\\\g<0>", text)
        return text if candidate.more else f"{text} "


def read_line(line: str, breaks: str = "") -> TypedLine:
    """Split a command line, which may end within a word or a quote, into words.

    `breaks` are characters at which readline also splits words. If the last word contains one, readline replaces only
    the text after the last such character. Assignments before the command, such as CUDA_VISIBLE_DEVICES=0, are dropped.
    """
    for quote in ("", "'", '"'):
        with contextlib.suppress(ValueError):  # another quote is open
            words = shlex.split(f"{line}_{quote}")  # the letter makes a trailing space start a new word
            break
    words[-1] = words[-1][:-1]
    if quote:
        end = line.rpartition(quote)[2]
    else:
        unbroken = re.search(rf"(\\.|[^\\{re.escape(breaks)}])*$", line)
        end = re.sub(r"\\(.)", r"\1", unbroken[0]) if unbroken else ""
    while len(words) > 1 and words[0].partition("=")[0].isidentifier() and "=" in words[0]:
        del words[0]
    return TypedLine(words, len(words[-1]) - len(end), quote)
