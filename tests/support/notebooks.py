"""Execute the notebooks of the documentation, and write their outputs into them: `make notebooks`."""

import ast
import base64
import contextlib
import hashlib
import io
import json
import os
import pprint
import re
import sys
import tempfile
import types
from pathlib import Path

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))
REFRESH = "make notebooks"
# Text that differs from run to run: dates, times, speeds.
TIMES = r"\d{4}-\d\d-\d\d_\d{6}_\d{6}|[\d.]+ (ms|s)\b|[\d.]+[kM]? \w+/s|(?<=<td>)\d+\.\d(?=</td>)|\b\d+\.\d +(?=[\d-])"
BUSY = re.compile(r"^note +\d+ of \d+ cores busy.*\n", re.MULTILINE)  # says what else this machine was doing
ENGINES = {"cpu", "cuda", "mps", "metal"}  # engine=auto takes another one on another machine
BUNDLES = {"text/html": "_repr_html_", "image/png": "_repr_png_"}


class Kernel:
    """The outputs of one cell, in the notebook format. It stands in for a Jupyter kernel, which is not installed."""

    def __init__(self):
        self.outputs = []

    def write(self, text, name):
        """Append printed text; consecutive texts of a stream are one output."""
        if not self.outputs or self.outputs[-1].get("name") != name:
            self.outputs.append({"name": name, "output_type": "stream", "text": ""})
        self.outputs[-1]["text"] += text

    def display(self, data, raw, display_id):
        """Append an output that its handle can update, as IPython.display.display does."""
        self.outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
        return types.SimpleNamespace(update=lambda data, raw, output=self.outputs[-1]: output.update(data=data))

    def show(self, value, number):
        """Append the value of a cell's last expression."""
        data, metadata = {"text/plain": pprint.pformat(value, width=79, sort_dicts=False)}, {}
        for kind, method in BUNDLES.items():
            if method in dir(value):
                data[kind] = getattr(value, method)()
        if "image/png" in data:
            content, metadata["image/png"] = data["image/png"]
            data["image/png"] = base64.b64encode(content).decode() + "\n"
        self.outputs.append({"data": data, "execution_count": number, "metadata": metadata,
                             "output_type": "execute_result"})  # fmt: skip


class Stream(io.TextIOBase):
    """Standard output or error of the cells."""

    def __init__(self, kernel, name):
        self.kernel, self.name = kernel, name

    def write(self, text):
        """Append the text to the outputs of the cell that runs."""
        self.kernel.write(text, self.name)
        return len(text)


def execute(notebook):
    """Return the parsed notebook with the outputs of its code, which runs in an empty directory."""
    content, kernel, namespace = json.loads(notebook.read_text()), Kernel(), {"__name__": "__main__"}
    shell = types.ModuleType("IPython")
    shell.version_info = (9, 0)  # matplotlib reads it
    shell.get_ipython = lambda: types.SimpleNamespace(kernel=kernel)
    shell.display = types.ModuleType("IPython.display")
    shell.display.display = kernel.display
    modules = {"IPython": shell, "IPython.display": shell.display}
    streams = Stream(kernel, "stdout"), Stream(kernel, "stderr")
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(stack.enter_context(tempfile.TemporaryDirectory())))
        stack.callback(lambda: [sys.modules.pop(name) for name in modules])
        sys.modules.update(modules)
        stack.enter_context(contextlib.redirect_stdout(streams[0]))
        stack.enter_context(contextlib.redirect_stderr(streams[1]))
        for number, cell in enumerate((c for c in content["cells"] if c["cell_type"] == "code"), 1):
            body = ast.parse("".join(cell["source"]))
            last = body.body.pop() if isinstance(body.body[-1], ast.Expr) else None
            exec(compile(body, notebook.name, "exec"), namespace)
            value = eval(compile(ast.Expression(last.value), notebook.name, "eval"), namespace) if last else None
            if value is not None:
                kernel.show(value, number)
            cell["execution_count"], cell["outputs"], kernel.outputs = number, kernel.outputs, []
            for output in cell["outputs"]:
                if "data" in output:
                    output["data"] = {kind: as_lines(text) for kind, text in sorted(output["data"].items())}
                else:
                    output["text"] = as_lines(BUSY.sub("", output["text"]))
    content["metadata"]["toyexp"] = {"source": source_digest(content)}
    return content


def as_lines(text):
    """Return a text as the list of lines that the notebook format has."""
    return text.splitlines(keepends=True)


def source_digest(content):
    """Return a digest of the code, which tells whether outputs were written for another code."""
    code = ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()[:16]


def without_times(content):
    """Return the outputs of all cells as text, with times and dates masked and columns closed up."""
    outputs = [cell["outputs"] for cell in content["cells"] if cell["cell_type"] == "code"]
    return re.sub(r" +", " ", re.sub(TIMES, "#", json.dumps(outputs, ensure_ascii=False)))


def structure(content):
    """Return what must be equal on every machine: the kinds of all outputs, the elements and words of values.

    Numbers, learned text and the names of engines are left out.
    """
    found = []
    for cell in (cell for cell in content["cells"] if cell["cell_type"] == "code"):
        for output in cell["outputs"]:
            page = "".join(output.get("data", {}).get("text/html", ""))
            value = page if output["output_type"] == "execute_result" else ""
            words = set(re.findall(r"[a-z_]{3,}", re.sub(r"<[^>]*>", " ", value))) - ENGINES
            found.append((output["output_type"], output.get("name"), [*output.get("data", {})],
                          re.findall(r"<(\w+)", page), sorted(words)))  # fmt: skip
    return found


def refresh(notebook):
    """Execute a notebook and write it, unless only times differ; return True if it was written."""
    old, new = json.loads(notebook.read_text()), execute(notebook)
    if old["metadata"] == new["metadata"] and without_times(old) == without_times(new):
        return False
    notebook.write_text(json.dumps(new, indent=1, ensure_ascii=False) + "\n")
    return True


if __name__ == "__main__":
    os.environ.pop("FORCE_COLOR", None)
    for path in NOTEBOOKS:
        print(f"{path.name}: {'written' if refresh(path) else 'only times differ, not written'}")
