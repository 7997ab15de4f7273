# Both targets do their own set-up: `make demo` runs the main job, `make test` what every commit must pass.
#
# `make test TORCH=2.15.0` does the same in an environment of its own, with torch's own wheel (5 GB with CUDA's libraries).
PYTHON ?= python3
VENV   ?= .venv$(addprefix -,$(TORCH))
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PYTEST8 := $(VENV)/pytest8
COMPILED := $(VENV)/.compiled
PINS    := $(VENV)/constraints.txt
CONSTRAINTS ?= constraints.txt

# What setup.cfg's range of torch is tested with, besides constraints.txt's.
NEWEST_TORCH   := 2.15.0
TORCHS_BETWEEN := 2.14.1
SMOKE := tests/backends tests/parity tests/complex_params tests/checkpoint tests/simulation

# Every process that a test starts would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fast test-newest test-all test-first test-second test-rest cpus slow lint smoke torches next-torch wheel release docs gpu bench parity versions rows kills hosts clean

demo: $(READY)
	$(BIN)/fsshard demo --backends fairscale,fsdp2 --world-size 2 --n-train 400 --epochs 5 --plot darcy.png

# Three sessions side by side, since half of a distributed test is waiting, the last one after the linters; `pytest` alone
# runs them all in one. Divided by CPU time.
test: $(READY)
	$(MAKE) --no-print-directory --jobs=3 --keep-going lint test-first test-second test-rest

FIRST  := tests/parity tests/simulation tests/complex_params tests/oss tests/planning tests/launching
SECOND := tests/compat tests/examples tests/demo tests/cli tests/checkpoint tests/parallel tests/backends tests/portability

test-first: $(PYTEST8) $(COMPILED)
	$(BIN)/python -m pytest -p no:cacheprovider $(SET) $(FIRST)

test-second: $(PYTEST8) $(COMPILED)
	$(BIN)/python -m pytest -p no:cacheprovider $(SET) $(SECOND)

test-rest: $(PYTEST8) $(COMPILED)
	$(BIN)/python -m pytest -p no:cacheprovider $(SET) $(addprefix --ignore=,$(FIRST) $(SECOND))

# Run it while developing: a file of each room, and the fewest trainings that have every model, variant and optimizer.
test-fast: $(READY)
	$(BIN)/python -m pytest -p no:cacheprovider --fast

# Under what `pip install` brings today: behind `make test` on every commit (.ci/run). Six minutes, half of them the environment's.
test-newest:
	$(MAKE) --no-print-directory test-fast TORCH=$(NEWEST_TORCH)

# What `make test` leaves out as well: tests marked long, kills, two hosts (root), lesser CPUs, code paths of this CPU, all of
# torch's range. Three hours and 15 GB; .github/workflows/ci.yml has it every week.
test-all: $(READY)
	$(BIN)/python -m pip install --quiet --constraint $(PINS) --editable '.[ray]'
	$(MAKE) --no-print-directory test SET=--long
	$(MAKE) --no-print-directory kills hosts s3 eight-bit cpus machines torches

# Checkpoints on a server that speaks S3, with libraries of its own: they want other versions than the tests' environment has.
.PHONY: s3
s3: $(READY)
	$(BIN)/python -m pip install --quiet --target .stores s3fs moto flask flask-cors
	PYTHONPATH=.stores $(BIN)/python -m pytest tests/checkpoint/format/test_s3.py

# AdamW8bit of torchao and of bitsandbytes, on the CPU. Not in the tests' environment: other libraries import them if they are there.
.PHONY: eight-bit
eight-bit: $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --target .eight-bit torchao==0.18.0 bitsandbytes==0.50.2
	PYTHONPATH=.eight-bit $(BIN)/python -m pytest tests/sharded/test_eight_bit.py

# The same tests with the kernels that libraries choose on lesser CPUs, which add in other orders: no test may know the last
# bits of one CPU. Half an hour on two cores. (Intel's and AMD's take different ones of MKL's.)
cpus:
	ATEN_CPU_CAPABILITY=default $(MAKE) --no-print-directory test
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 $(MAKE) --no-print-directory test

# What each test file costs, in seconds of CPU: the dearest first.
slow: $(READY) $(PYTEST8)
	$(BIN)/python -m pytest -p no:cacheprovider --long --cpu-times

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

smoke: $(READY)
	$(BIN)/python -m pytest -p no:cacheprovider $(SMOKE)

# All of the range, and what comes next, which blocks nothing. An hour and 15 GB.
torches:
	$(MAKE) --no-print-directory test TORCH=$(NEWEST_TORCH)
	for torch in $(TORCHS_BETWEEN); do $(MAKE) --no-print-directory smoke TORCH=$$torch || exit 1; done
	-$(MAKE) --no-print-directory next-torch

# setup.cfg's upper bound lets no pre-release in: it is put over the newest.
next-torch:
	@next=$$($(PYTHON) -m pip index versions torch --pre 2>/dev/null | sed -n 's/^torch (\([^+)]*\).*/\1/p'); \
	case "$$next" in *[a-z]*) ;; *) echo "no pre-release of torch: the newest that pip finds is $${next:-none}"; exit;; esac; \
	$(MAKE) --no-print-directory .venv-next/.ready VENV=.venv-next TORCH=$(NEWEST_TORCH) && \
	.venv-next/bin/python -m pip install --quiet "torch==$$next" && $(MAKE) --no-print-directory smoke VENV=.venv-next

# On a machine with a GPU, or several: tests/gpu, whose outcomes and figures go to build/gpu-report.md and .json. The tests
# take less than ten minutes on one GPU, the environment of its own 5 GB before; `TORCH=2.14.1` takes another version.
gpu:
	@nvidia-smi -L 2>/dev/null | grep -q . || { echo "make gpu: no GPU here (nvidia-smi -L lists none): run it on a \
	machine with an NVIDIA GPU and its driver; without one, make test TORCH=$(NEWEST_TORCH) runs tests/stub_cuda"; exit 1; }
	@grep -qx "torch==$(or $(TORCH),$(NEWEST_TORCH))" .venv-gpu/constraints.txt 2>/dev/null || rm -f .venv-gpu/.ready
	$(MAKE) --no-print-directory .venv-gpu/.ready VENV=.venv-gpu TORCH=$(or $(TORCH),$(NEWEST_TORCH))
	FSSHARD_GPU_REPORT=build/gpu-report .venv-gpu/bin/python -m pytest -p no:cacheprovider tests/gpu

# The wheel in an environment that has nothing of this checkout, where README's code and commands run. Two minutes, and 5 GB
# with TORCH=2.15.0.
wheel:
	rm -rf build/lib build/bdist.* build/wheel $(VENV)-wheel
	$(if $(WHEEL),mkdir -p build/wheel && cp $(WHEEL) build/wheel,$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir build/wheel .)
	$(PYTHON) -m venv $(VENV)-wheel
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' $(CONSTRAINTS) > $(VENV)-wheel/constraints.txt
	$(VENV)-wheel/bin/python -m pip install --quiet --constraint $(VENV)-wheel/constraints.txt torch$(addprefix ==,$(TORCH))
	$(VENV)-wheel/bin/python -m pip install --quiet --constraint $(VENV)-wheel/constraints.txt \
		"$$(echo build/wheel/*.whl)[cli,neuralop,plot]" pytest scipy
	$(PYTHON) -m tests.wheel build/wheel/*.whl $(VENV)-wheel/bin

# dist/: the wheel and the source distribution, checked as an index does, whole, and built from what the other holds; then the
# site, and README's code from the wheel under the oldest and the newest torch (10 GB). Refused if the changelog's newest section is
# longer than a page.
release:
	$(PYTHON) -m tools.changelog
	rm -rf dist build/lib build/bdist.* .venv-release
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet build twine
	.venv-release/bin/python -m build --outdir dist .
	.venv-release/bin/python -m twine check --strict dist/*
	$(PYTHON) -m tests.wheel --whole dist/*
	$(MAKE) --no-print-directory docs
	$(MAKE) --no-print-directory wheel WHEEL="$$(echo dist/*.whl)"
	$(MAKE) --no-print-directory wheel WHEEL="$$(echo dist/*.whl)" TORCH=$(NEWEST_TORCH)

# The pages of docs/ as a site in build/site. A dead link, or a public name without a docstring, stops it. The environment of
# its own has no torch; once it is there, no network is needed.
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict

.venv-docs/.ready: setup.cfg constraints.txt
	$(PYTHON) -m venv .venv-docs
	$(PYTHON) -c 'import configparser; c = configparser.ConfigParser(); c.read("setup.cfg"); \
		print(c["options.extras_require"]["docs"])' > .venv-docs/requirements.txt
	.venv-docs/bin/python -m pip install --quiet --constraint constraints.txt --requirement .venv-docs/requirements.txt
	touch $@

# Writes docs/maintainers/benchmarks.md, and the table of docs/benchmarks.md. 36 minutes on two cores that have nothing else to do.
bench: $(READY)
	$(BIN)/python -m pip install --quiet --constraint $(PINS) --editable '.[peers]'
	$(BIN)/python benchmarks/run_all.py
	$(BIN)/python -m benchmarks.summary

# Tables in docs/data/parity.md. A quarter of an hour on two cores for the fewest trainings in which every two values meet; six
# hours for all with `make parity MATRIX=--all`.
parity: $(READY)
	$(BIN)/python -m tests.parity.matrix $(MATRIX) --table docs/data/parity.md

# Changes that fsshard compare finds, and pairs that it calls the same: docs/data/planted.md. Five minutes.
.PHONY: planted
planted: $(READY)
	$(BIN)/python -W ignore -m tests.parity.scripts.planted --table docs/data/planted.md

# This CPU's table in docs/data/parity.md: engines compared on each code path of the math libraries. A quarter of an hour on two cores.
.PHONY: machines
machines: $(READY)
	$(BIN)/python -W ignore -m tests.parity.machines --table docs/data/parity.md

# Trainings of the examples recorded under the torch of constraints.txt, compared under the newest: a table in docs/data/parity.md. At
# last two scripts: raw DDP under the one, raw FSDP2 under the other.
versions: $(READY)
	$(BIN)/python -m tests.parity.versions --record build/traces
	$(MAKE) --no-print-directory .venv-$(NEWEST_TORCH)/.ready VENV=.venv-$(NEWEST_TORCH) TORCH=$(NEWEST_TORCH)
	.venv-$(NEWEST_TORCH)/bin/python -m tests.parity.versions --against build/traces --table docs/data/parity.md
	$(BIN)/fsshard trace build/old.trace --overwrite -- $(BIN)/torchrun --standalone --nproc-per-node 2 \
		examples/prove_migration/old_train.py
	.venv-$(NEWEST_TORCH)/bin/fsshard trace build/new.trace --overwrite -- .venv-$(NEWEST_TORCH)/bin/torchrun --standalone \
		--nproc-per-node 2 examples/prove_migration/new_train.py
	$(BIN)/fsshard compare build/old.trace build/new.trace

# The table of docs/data/fairscale-faults.md. What shows its rows: python -m pytest --long -m fairscale_row, two minutes.
rows: $(READY)
	$(BIN)/python -m tests.compat.fairscale.rows

# Other libraries' own tests with ours put in, from checkouts of their repositories that FSSHARD_LIGHTNING_CHECKOUT,
# FSSHARD_TRANSFORMERS_CHECKOUT and FSSHARD_ACCELERATE_CHECKOUT name. Lightning's take twenty minutes on two cores, and are
# more with scikit-learn and jsonargparse; those of the others need parameterized, transformers' sentencepiece, too.
.PHONY: judges
judges: $(READY)
	$(BIN)/python -m tests.compat.judges.run

# Jobs that save are killed 200 times on two ranks and 200 times on four. About ten minutes on two cores.
kills: $(READY)
	$(BIN)/python -m tests.checkpoint.kills --ranks 2 4 --kills 200 200
	$(BIN)/python -m tests.checkpoint.kills --ranks 4 --kills 100 --moving

# examples/elastic.py on two hosts, which are network namespaces here: a rank is killed, the link is cut. Needs root.
hosts: $(READY)
	$(BIN)/python -m pytest --long tests/examples/two_hosts.py

# torch comes first and alone, so that no other requirement can choose another build of it. What is imported is compiled when it
# is: to compile all, most of which nothing imports, takes pip longer than the rest.
$(READY): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and "fsshard needs Python 3.11, 3.12 or 3.13")'
	$(PYTHON) -m venv $(VENV)
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' $(CONSTRAINTS) > $(PINS)
	$(BIN)/python -m pip install --quiet --no-compile --constraint $(PINS) torch$(addprefix ==,$(TORCH))
	$(BIN)/python -m pip install --quiet --no-compile --constraint $(PINS) --editable '.[dev]'
	touch $@

# The plugin is tested under the pytest before ours, too, which needs nothing that the other does not. Without a network
# there is none, and the tests say that they are skipped.
$(PYTEST8): | $(READY)
	-$(BIN)/python -m pip install --quiet --no-compile --no-deps --target $@ pytest==8.4.2

# What the tests import, compiled once: nine processes that begin at the same time would each compile all of it.
$(COMPILED): $(READY)
	-$(BIN)/python -W ignore -c 'import sys; [__import__(name) for name in sys.argv[1:]]' torch.distributed.checkpoint \
		torch.distributed.fsdp torch._inductor.compile_fx scipy.optimize matplotlib.pyplot nbclient fairscale.optim \
		transformers.models.t5.modeling_t5 transformers.trainer neuralop accelerate lightning.pytorch && touch $@

clean:
	rm -rf .venv .venv-* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
