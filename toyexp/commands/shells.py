"""Tab completion in bash, zsh and fish: the script of each, and what it is answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toyexp.base.errors import UserError, choose
from toyexp.base.terminal import say
from toyexp.commands.completion import SHELLS, Candidate, complete
from toyexp.contract.command import Arguments

HELP = """\
usage: toyexp completion bash|zsh|fish

Prints what makes the shell complete toyexp's command lines. To switch it on, for this shell or in its start-up file:
  ~/.bashrc                     eval "$(toyexp completion bash)"
  ~/.zshrc                      eval "$(toyexp completion zsh)"
  ~/.config/fish/config.fish    toyexp completion fish | source"""

# Readline replaces what stands behind the last of COMP_WORDBREAKS, such as `=`, and not the whole word.
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
    local kind text told
    local -a plain plain_told more more_told
    while IFS=$'\t' read -r kind text told; do
        told="$text${told:+  -- $told}"
        [[ -n $text ]] || continue
        if [[ $kind == more ]]; then
            more+=("$text") more_told+=("$told")
        else
            plain+=("$text") plain_told+=("$told")
        fi
    done < <("${${(Q)words[1]}/#\~/$HOME}" completion --for zsh "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)
    (( $#plain )) && compadd -l -d plain_told -- "${plain[@]}"
    (( $#more )) && compadd -S '' -l -d more_told -- "${more[@]}"
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
SPECIAL = frozenset(" \t\n\"'`\\$&;<>|()!*?")  # what bash would read otherwise than as itself, in a path


def run(arguments: Arguments) -> int:
    """Prints a shell's script, or behind --for what that script asks."""
    words = arguments.rest
    if words[:1] == ["--for"] and words[1:2] and words[1] in SHELLS:
        say("\n".join(answer(words[1], words[2:])))
        return 0
    if len(words) != 1 or words[0] not in SHELLS:
        hint = choose(words[0] if words else "", SHELLS)
        raise UserError(f"completion {' '.join(words)}".rstrip() + f": takes one shell, {hint}")
    say(SCRIPTS[words[0]])
    return 0


def answer(shell: str, words: Sequence[str]) -> list[str]:
    """The lines that a shell's script reads, about the words before the cursor; bash gives the line and its breaks."""
    if shell == "bash":
        typed = read_line(*words[:2])
        return [typed.replacement(c) for c in complete(typed.words[1:] or [""])]
    *before, word = words or [""]
    if shell == "zsh":
        return ["\t".join(("more" if c.more else "word", c.text, c.help)) for c in complete([*before, word])]
    return [f"{c.text}\t{c.help}" for c in complete([*before, read_line(word).words[-1]])]  # fish leaves the quotes


@dataclass(frozen=True)
class Typed:
    """A command line up to the cursor, as bash reads it."""

    words: list[str]  # without their quotes
    kept: int  # characters of the last word that a completion leaves alone
    quote: str  # that is open

    def replacement(self, found: Candidate) -> str:
        """What takes the place of the rest of the word."""
        text = found.text[self.kept :]
        if self.quote:  # which readline closes
            return text
        if found.path:
            text = "".join(f"\\{c}" if c in SPECIAL else c for c in text)
        return text if found.more else f"{text} "


def read_line(line: str, breaks: str = "") -> Typed:
    """The words of a line that may end in the middle of one; assignments before the command are left out."""
    words, quote, kept, inside, escaped = [""], "", 0, False, False
    for c in line:
        if escaped:
            words[-1], escaped = words[-1] + c, False
        elif c == "\\" and quote != "'":
            inside = escaped = True
        elif c == quote:
            quote, kept = "", len(words[-1])
        elif not quote and c in "\"'":
            quote, kept, inside = c, len(words[-1]), True
        elif not quote and c in " \t\n":
            words, kept, inside = [*words, ""] if inside else words, 0, False
        else:
            words[-1], inside = words[-1] + c, True
            kept = len(words[-1]) if not quote and c in breaks else kept
    while len(words) > 1 and words[0].partition("=")[0].isidentifier() and "=" in words[0]:
        del words[0]
    return Typed(words, kept, quote)
