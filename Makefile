# `make run` and `make test` do all their own set-up in .venv; nothing else is needed but Python and a compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Two processes: more do not fit into the memory of small machines, and the tests of one use more than one core at times.
PYTEST ?= --numprocesses=2 --durations=15 --durations-min=3
# ggml-python's own defaults leave out llamafile's matrix products, which are 1.5 times faster, and Metal.
GGML_FLAGS := -DGGML_LLAMAFILE=ON $(if $(filter Darwin,$(shell uname -s)),-DGGML_METAL=ON)

.PHONY: run test test-all again docs pictures docs-test faults check donor bench table objectives speeds golden notebooks wheel clean

run: $(INSTALLED)  ## train the main job: a warm-started nano llama, exported to GGUF
	$(BIN)/python -m toyexp recipe=warm

test: $(INSTALLED) check  ## lint, types, and the default test suite
	$(BIN)/python -m pytest $(PYTEST) || { test $$? -eq 1 && test -n "$(AGAIN)" && $(MAKE) again; }

test-all: PYTEST += -m "not full and not faults and not docs"
test-all: test  ## the same with environments, browsers, notebooks, the site and more kills

again: $(INSTALLED)  ## run the last failed tests once more, one at a time, if they are no more than AGAIN
	$(BIN)/python -c "import json; n = len(json.load(open('.pytest_cache/v/cache/lastfailed'))); print(n, 'failed'); exit(n > $(AGAIN))"
	$(BIN)/python -m pytest --numprocesses=0 -m "" --last-failed --last-failed-no-failures=none

docs: $(INSTALLED)  ## build the documentation into outputs/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --config-file docs/mkdocs.yml

docs-test: $(INSTALLED)  ## run every command and block of code that the documentation shows, and list what is not run
	$(BIN)/python -m pytest tests/test_snippets.py tests/test_site.py -m "docs or release" -rs $(PYTEST)

pictures: $(INSTALLED)  ## draw the documentation's pictures from real runs; those of the report need chromium and playwright
	rm -rf outputs/pictures
	$(BIN)/python -m toyexp experiment=vit_digits engine=cpu 'callbacks=[default,plots]' hydra.run.dir=outputs/pictures/vit_digits
	mkdir -p docs/pages/pictures
	cp outputs/pictures/vit_digits/plots/curves.svg docs/pages/pictures/curves.svg
	$(BIN)/python -m toyexp -m recipe=scratch,warm lr=1e-3,3e-3,1e-2 seed=0,1,2 hydra.sweep.dir=outputs/pictures/sweep
	$(BIN)/python -m toyexp -m 'lr=tag(log, interval(1e-4, 1e-1))' optim.weight_decay=0,0.1 sweep.search=tpe sweep.trials=24 sweep.prune=asha eval_every=20 hydra.sweep.dir=outputs/pictures/search
	$(BIN)/python -m toyexp compare outputs/pictures/sweep --plot docs/pages/pictures/sweep.svg
	$(BIN)/python -m toyexp compare outputs/pictures/sweep --plot docs/pages/pictures/sweep_narrow.svg --column single
	$(BIN)/python docs/pictures.py outputs/pictures

faults: $(INSTALLED)  ## kill processes, fill disks, break files: 20 minutes on 2 cores; the figures go to tests/faults/figures.txt
	TOYEXP_FIGURES=tests/faults/figures.txt $(BIN)/python -m pytest tests/faults -m "faults or not faults" $(PYTEST)

check: $(INSTALLED)  ## lint, types, and clear sentences and names
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/support/prose.py

donor: $(INSTALLED)  ## train the shipped donor again and put it into the package
	$(BIN)/python tests/make_donor.py

bench: $(INSTALLED)  ## what toyexp costs over a bare PyTorch loop, and the engines side by side
	$(BIN)/python tests/benchmarks/overhead.py
	$(BIN)/python tests/benchmarks/objectives.py rounds=31
	for shape in 100k 1m 6m; do $(BIN)/python -m toyexp bench experiment=bench_$$shape --baseline || exit; done

table: $(INSTALLED)  ## hold every architecture, type and direction against llama.cpp, and write the documentation's table
	$(BIN)/python tests/support/make_table.py

objectives: $(INSTALLED)  ## compare every objective, engine and family with torch in float64, and write the documentation's table
	$(BIN)/python tests/support/make_objectives.py

speeds: $(INSTALLED)  ## measure the engines of the CPU on this machine, and write the documentation's table of speeds
	$(BIN)/python tests/support/make_speeds.py measure

golden: $(INSTALLED)  ## record the numbers of tests/golden.json again, after a change of numbers that is meant
	$(BIN)/python tests/support/golden.py

notebooks: $(INSTALLED)  ## execute the documentation's notebooks and write their outputs into them
	$(BIN)/python tests/support/notebooks.py

wheel: $(INSTALLED)  ## build the wheel into dist/
	$(BIN)/python -m build --wheel

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	CMAKE_ARGS="$(GGML_FLAGS)" $(BIN)/python -m pip install --quiet --no-cache-dir 'ggml-python>=0.0.45,<0.1'
	rm -rf toyexp.egg-info  # of an older install; it would be found beside the new one
	$(BIN)/python -m pip install --quiet --editable '.[all,test]'
	touch $(INSTALLED)

clean:  ## remove what was built; outputs/ stays
	rm -rf $(VENV) dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
