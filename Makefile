PYTHON ?= python3
VENV ?= .venv
# threads that wait spin briefly, then sleep: endless spinning made a shared machine up to 100 times slower
export GOMP_SPINCOUNT ?= 10000

BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo tiny rehearsal test test-slow test-long test-elsewhere test-newest test-oldest test-engines lint format docs clean

DEMO ?=  # --tiny: no model is downloaded, a small one is made; two to five minutes

demo: $(READY)  ## the shipped head of a real model, which is downloaded, then a head of your own: six minutes
	$(BIN)/python -m recipes.tiny.demo $(DEMO)

tiny: runs/tiny/eagle1/head  ## the small model of recipes/tiny with its data, features and an EAGLE-1 head

rehearsal: $(READY)  ## every stage in bf16 at the shapes of Qwen3-0.6B, with random weights
	rm -rf runs/rehearsal
	$(BIN)/python -m bench.rehearsal

test test-slow test-long test-newest test-oldest test-engines: export OMP_NUM_THREADS = 1  # models this small run faster on one thread
# kept byte code: else every process compiles all it imports anew, and pytest rewrites every file of tests
test test-slow test-long test-elsewhere test-newest test-oldest: export PYTHONDONTWRITEBYTECODE =

JOBS ?= 2  # processes that tests are spread over, each on one thread

test: $(READY)  ## everything that is fast
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

CASES ?= new  # of what is drawn: other ones at every run; with `same` the same ones, without those of the fast suite

test-slow: $(READY)  ## what takes longer, and new cases of what is drawn
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "$(if $(filter same,$(CASES)),slow,(slow or hypothesis)) and not long and not engine" \
		--hypothesis-profile=$(CASES)

test-long: $(READY)  ## what takes minutes: the full target, the rehearsal, every method under ZeRO
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m long

test-elsewhere: $(READY)  ## everything fast as on other machines: other weights, kernels, threads, load, order
	$(BIN)/python -m tests.elsewhere -n $(JOBS) --dist worksteal

PYTHONS ?= $(PYTHON)  # of which the last one's versions become constraints-newest.txt

test-newest: $(READY)  ## everything fast with today's newest of every dependency, installed anew: 7 GB
	$(BIN)/python -m tests.newest --python $(PYTHONS) -- -n $(JOBS) --dist worksteal

LOWEST ?= python3.10  # the lowest Python that pyproject.toml allows

test-oldest: $(READY)  ## everything fast with the lower bounds of pyproject.toml, installed anew: 7 GB
	$(BIN)/python -m tests.newest --oldest --python $(LOWEST) -- -n $(JOBS) --dist worksteal

# each in an environment of its own, of the versions that docs/results/engines.json belongs to
ENGINES ?= build/engines
HEADS := $(patsubst %,runs/tiny/%/head,eagle1 hass eagle3 eagle3-full eagle3.1 eagle3-normed medusa dflash dspark peagle)

test-engines: $(READY) $(HEADS)  ## exported heads in real engines, which are made first: 10 GB, most of an hour
	$(BIN)/python -m tests.engines.engine_builds $(ENGINES)
	EAGLE_VLLM=$(ENGINES)/vllm EAGLE_OPENVINO=$(ENGINES)/openvino EAGLE_LLAMACPP=$(ENGINES)/llamacpp \
		$(BIN)/python -m pytest -m engine

TRAIN := $(BIN)/python recipes/train_eagle.py
EAGLE3 := recipes/tiny/eagle3.yaml train.lr=3e-3

runs/tiny/eagle1/head: | $(READY)
	$(BIN)/python -m recipes.tiny.make_target
	$(BIN)/python -m data_prep.regenerate recipes/tiny/eagle1.yaml
	$(BIN)/python -m data_prep.draft_vocab recipes/tiny/eagle1.yaml --size 512 --out runs/tiny/draft_vocab.safetensors
	$(BIN)/python -m data_prep.extract recipes/tiny/eagle1.yaml
	$(TRAIN) recipes/tiny/eagle1.yaml

runs/tiny/features3: | runs/tiny/eagle1/head
	$(BIN)/python -m data_prep.extract $(EAGLE3)

runs/tiny/hass/head: | runs/tiny/eagle1/head
	$(TRAIN) recipes/tiny/hass.yaml

runs/tiny/medusa/head: | runs/tiny/eagle1/head
	$(TRAIN) recipes/tiny/medusa.yaml

runs/tiny/eagle3/head: | runs/tiny/features3
	$(TRAIN) $(EAGLE3)

runs/tiny/eagle3-full/head: | runs/tiny/features3
	$(TRAIN) $(EAGLE3) drafter.draft_vocab=null train.out=runs/tiny/eagle3-full

runs/tiny/eagle3.1/head: | runs/tiny/features3
	$(TRAIN) $(EAGLE3) drafter.fc_norm=true drafter.norm_output=true train.out=runs/tiny/eagle3.1

runs/tiny/features_dflash: | runs/tiny/eagle1/head
	$(BIN)/python -m data_prep.extract recipes/tiny/dflash.yaml

runs/tiny/dflash/head runs/tiny/dspark/head: runs/tiny/%/head: | runs/tiny/features_dflash
	$(TRAIN) recipes/tiny/$*.yaml train.lr=3e-3

runs/tiny/peagle/head: | runs/tiny/features3
	$(TRAIN) recipes/tiny/peagle.yaml train.lr=3e-3

runs/tiny/eagle3-normed/head: | runs/tiny/features3
	$(TRAIN) $(EAGLE3) drafter.draft_vocab=null drafter.norm_before_residual=true train.out=runs/tiny/eagle3-normed

lint: $(READY)  ## style, types and density
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m docs_build.density

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# the theme's note on its successor is silenced: the versions are bounded in pyproject.toml
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/ready-docs  ## the site, in build/site, to be opened from disk
	$(BIN)/python -m mkdocs build
	$(BIN)/python -m docs_build.links build/site

$(VENV)/ready-docs: $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	touch $@

# torch comes first and pinned, so that nothing else may pull another build of it
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $(READY)

clean:
	rm -rf runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache
