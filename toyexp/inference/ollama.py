"""Export a model for Ollama: a GGUF file, and beside it a Modelfile, from which `ollama create` makes a model."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from toyexp.base.errors import UserError, suggest
from toyexp.base.writing import convert_write_errors, replace_synced
from toyexp.formats.gguf.header import source_path
from toyexp.formats.gguf.open_model import load_open_model, open_model_file
from toyexp.formats.gguf.quantise import FILE_TYPES, K_QUANTS
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.tokenizer import has_text, read_chat_template, read_tokenizer
from toyexp.inference.export import ExportResult, default_target, export, require_free, training_settings
from toyexp.inference.model_files import find_model_file, find_reader
from toyexp.interfaces.command import Answer
from toyexp.interfaces.sampling import Sampling
from toyexp.plugins.registry import Registry

MAX_CONTEXT = 8192  # tokens; a longer context may take gigabytes of memory


@dataclass(frozen=True)
class OllamaResult(Answer):
    """Result of an export for Ollama."""

    model: str  # path of the GGUF file
    modelfile: str  # path of the Modelfile
    export: ExportResult | None  # None if the GGUF file existed already

    def lines(self) -> list[str]:
        """Return the lines of the export and a line with the command that loads the model."""
        command = shlex.join(["ollama", "create", "my-model", "-f", self.modelfile])
        return [*(self.export.lines() if self.export else []), f"{self.modelfile}  to load it: {command}"]


def export_for_ollama(
    model: Path, word: str | None, to: str | None, settings: Sequence[str], registry: Registry, force: bool,
    requantize: bool, system: str | None = None,
) -> OllamaResult:  # fmt: skip
    """Write a Modelfile beside the GGUF file of a model.

    With `word`, a value of `--type`, first convert the model as `export` does. If `force` is True, replace files that
    toyexp wrote. `system` replaces the system message of the run's data. Raise UserError, before anything is written,
    if Ollama cannot load the model or a file exists.
    """
    types = (*FILE_TYPES, *K_QUANTS)
    if word is not None and word not in types:
        raise UserError(f"--type={word} --ollama: Ollama loads a GGUF file; {suggest(word, types)}")
    with open_model_file(find_model_file(model, registry=registry)) as file:
        is_converted = source_path(file.path) != file.path or find_reader(file.path, registry) is not None
        if word is None and (is_converted or len(file.paths) > 1 or to or settings):
            raise UserError(f"export {model}: --ollama without --type takes one GGUF file and no --to; add --type f16")
        shape = load_open_model(file, registry)
        if not (shape.reads.text and "gguf" in shape.forms and has_text(file)):
            raise file.error("Ollama cannot load it: it runs only language models with a tokenizer, as llama.cpp does")
        target = file.path if word is None else Path(to) if to else default_target(file, f"-{word}.gguf")
        path, text = target.with_name("Modelfile"), _modelfile(file, target.name, shape.context, system)
        require_free(f"--ollama: {path}", path, [], force, "Modelfile")
    exported = export(model, word, to, settings, registry, force, requantize) if word else None
    with convert_write_errors(path):
        replace_synced(path, text.encode())
    return OllamaResult(str(target), str(path), exported)


def _modelfile(file: GGUFFile, name: str, context: int, system: str | None) -> str:
    """Return the text of a Modelfile for a model with the metadata of `file`; `name` is the name of its GGUF file."""
    parameters = {"num_ctx": min(context, MAX_CONTEXT), **asdict(Sampling())}
    lines = ["# Written by toyexp. To load the model: ollama create my-model -f Modelfile", f"FROM ./{name}"]
    lines += [f"PARAMETER {key} {value}" for key, value in parameters.items()]
    if read_chat_template(file):
        tokenizer = read_tokenizer(file)
        lines += [f'PARAMETER stop "{tokenizer.spelling(i)}"' for i in sorted(tokenizer.end_ids)]
        if system is None:
            system = training_settings(file).get("data", {}).get("system")
        if any(line.rstrip().endswith('"""') for line in (system or "").splitlines()[:-1]):
            raise UserError('--system: a line ends with """, which would end the text; pass another one with --system')
        if system:
            lines.append(f'SYSTEM """{system}"""')
        lines.append("# Ollama 0.30 and later use the chat template in the GGUF file.")
    elif system is not None:
        raise file.error("--system: has no effect, because the file has no chat template; leave it out")
    else:
        lines += ["# The GGUF file has no chat template: the model continues the prompt.", "TEMPLATE {{ .Prompt }}"]
    return "\n".join([*lines, ""])
