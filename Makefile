# Targets for people and for CI. Everything installs into .venv, and over it the clients under test into
# .venv-clients, the oldest SDK of Tinker into .venv-sdk, that of SkyRL into .venv-sdk-skyrl, the tools of mutation
# testing into .venv-mutants, vLLM into .venv-vllm, a browser's driver into .venv-page, Ray into .venv-cluster, the
# libraries of environments into .venv-environments, verifiers' older API into .venv-verifiers, and coding agents into
# .venv-agents; the site's tools into .venv-docs, SkyRL's server into .venv-skyrl. Nothing else is touched.
PYTHON ?= python3
PYTHON312 ?= python3.12
VENV := .venv
CLIENTS := .venv-clients
MUTANTS := .venv-mutants
DOCS := .venv-docs
SDK := .venv-sdk
SKYRL := .venv-skyrl
SKYRL_SDK := .venv-sdk-skyrl
VLLM := .venv-vllm
PAGE := .venv-page
CLUSTER := .venv-cluster
ENVIRONMENTS := .venv-environments
VERIFIERS := .venv-verifiers
AGENTS := .venv-agents
EVALS := $(VENV)/inspect-evals/site-packages
BIN := $(VENV)/bin
BUNDLE := gpu-bundle.tar.xz
GPU_OPTIONS = --device $(or $(DEVICE),cuda) --output $(or $(OUTPUT),gpu.md)
# Modules are compiled when they are imported: most never are, and compiling them all takes a minute. What most
# need is imported once, so that not every process compiles it.
INSTALL = $(BIN)/python dev/install.py
# Images of containers like to set this variable. With it, each of the thousand processes that the tests start would
# compile all that it imports, which takes a trainer as long as the rest of its start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help environments-of-tests demo test check acceptance long clients chaos vllm tinker-servers page agents agents-long cluster cluster-long postgres bubblewrap environments environments-long screenshots gpu gpu-bundle mutants service vocabularies bench docs clean

help:  ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

$(VENV)/.installed: pyproject.toml constraints.txt dev/install.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip --disable-pip-version-check install --quiet --no-compile --upgrade pip==26.3
	$(INSTALL) --constraint constraints.txt --editable '.[all]' --group dev
	$(BIN)/python -c 'import inspect_tinker_bridge, tinkerscript.server.app, tinkerscript.train.run'
	touch $@

$(VENV)/.acceptance: $(VENV)/.installed
	$(INSTALL) --constraint constraints.txt --editable '.[tensorboard]' --group vocabularies --group recipes
	touch $@

# Without its dependencies, which are gigabytes: the tasks that are tried need two of them. In a folder of its
# own: where it is installed, every process that runs an Inspect task imports all of it. Inspect knows a package by
# "site-packages" in its path.
$(EVALS)/.installed: $(VENV)/.installed
	$(INSTALL) --constraint constraints.txt --no-deps --upgrade --target $(EVALS) inspect-evals backoff toml
	touch $@

# An environment over .venv: it sees those packages, its own come first.
define over
	rm -rf $(1)
	$(BIN)/python -m venv --without-pip $(1)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
	$(INSTALL) --python $(1)/bin/python --no-deps $(2)
endef

$(CLIENTS)/.installed: $(VENV)/.installed tests/clients/requirements.txt
	$(call over,$(CLIENTS),--requirement tests/clients/requirements.txt)
	touch $@

$(SDK)/.installed: $(VENV)/.installed tests/sdk/requirements.txt
	$(call over,$(SDK),--requirement tests/sdk/requirements.txt)
	touch $@

$(SKYRL_SDK)/.installed: $(VENV)/.installed tests/servers/requirements.txt
	$(call over,$(SKYRL_SDK),--requirement tests/servers/requirements.txt)
	touch $@

$(SKYRL)/.installed: tests/servers/skyrl.txt
	test -x $(SKYRL)/bin/python || $(PYTHON312) -m venv $(SKYRL)
	$(SKYRL)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --requirement tests/servers/skyrl.txt
	touch $@

$(VLLM)/.installed: $(VENV)/.installed tests/vllm/requirements.txt
	$(call over,$(VLLM),--requirement tests/vllm/requirements.txt)
	touch $@

# The browser is the system's: Debian's package where there is none.
$(PAGE)/.installed: $(VENV)/.installed tests/page/requirements.txt
	command -v chromium || command -v chromium-browser || command -v google-chrome || \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; }
	$(call over,$(PAGE),--requirement tests/page/requirements.txt)
	touch $@

$(CLUSTER)/.installed: $(VENV)/.installed tests/cluster/requirements.txt
	$(call over,$(CLUSTER),--requirement tests/cluster/requirements.txt)
	touch $@

# inspect-harbor asks for Python 3.12 and runs on 3.11; uv takes packages at their word.
$(ENVIRONMENTS)/.installed: $(VENV)/.installed tests/environments/requirements.txt
	$(call over,$(ENVIRONMENTS),--requirement tests/environments/requirements.txt)
	$(BIN)/pip --disable-pip-version-check --python $(ENVIRONMENTS)/bin/python install --quiet --no-compile --no-deps \
		--ignore-requires-python inspect-harbor==1.0.0
	touch $@

$(VERIFIERS)/.installed: $(VENV)/.installed tests/environments/requirements-verifiers-0.3.txt
	$(call over,$(VERIFIERS),--requirement tests/environments/requirements-verifiers-0.3.txt)
	touch $@

# Agents as their users install them: whole, since their sandboxes show this folder and not .venv. They may not write
# there, so what they import is compiled before. The sandbox and npm are the system's: Debian's packages where there
# are none.
$(AGENTS)/.installed: $(VENV)/.installed tests/agents/requirements.txt tests/agents/npm.txt
	command -v bwrap > /dev/null && command -v npm > /dev/null || \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends bubblewrap npm; }
	rm -rf $(AGENTS)
	$(PYTHON) -m venv --without-pip $(AGENTS)
	$(INSTALL) --python $(AGENTS)/bin/python --no-deps --requirement tests/agents/requirements.txt
	LITELLM_LOCAL_MODEL_COST_MAP=True MSWEA_GLOBAL_CONFIG_DIR=$(AGENTS)/config \
		$(AGENTS)/bin/python -c 'import minisweagent.models.litellm_model, minisweagent.run.mini' > /dev/null
	npm install --global --prefix $(AGENTS) --no-fund --no-audit --loglevel=error $$(cat tests/agents/npm.txt)
	touch $@

$(MUTANTS)/.installed: $(VENV)/.installed
	$(call over,$(MUTANTS),mutmut==3.8.1 libcst==1.9.0 coverage==7.17.3)
	touch $@

$(DOCS)/.installed: docs/requirements.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip --disable-pip-version-check install --quiet --requirement docs/requirements.txt
	touch $@

# What `.ci/run` installs side by side; without those that may have to ask apt-get, which runs once at a time.
environments-of-tests: $(VENV)/.acceptance $(CLIENTS)/.installed $(EVALS)/.installed $(SDK)/.installed \
		$(VLLM)/.installed $(CLUSTER)/.installed $(ENVIRONMENTS)/.installed $(VERIFIERS)/.installed

demo: $(VENV)/.installed  ## Train the tiny model on arithmetic through every part of the system
	$(BIN)/tinkerscript train examples/arithmetic.yaml

test: $(VENV)/.installed  ## Unit and integration tests
	$(BIN)/python -m pytest -q -n 3 --dist loadgroup tests/integration tests/unit

check: $(VENV)/.installed  ## Lint, formatting, types, import cycles, homonyms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python dev/house.py --check

acceptance: $(VENV)/.acceptance $(CLIENTS)/.installed $(EVALS)/.installed $(SDK)/.installed  ## Whole runs, the command line, real clients, random conversations
	CONVERSATIONS=5000 $(BIN)/python -m pytest -q -n 3 --dist loadgroup --no-loadscope-reorder -m 'not long' \
		tests/acceptance tests/runs tests/sdk \
		tests/unit/gateway/test_gateway_conversations.py tests/unit/train/test_metric_loggers.py
	$(CLIENTS)/bin/python -m pytest -q -n 2 --dist loadfile tests/clients \
		tests/integration/test_gateway_anthropic_sdk.py
	PYTHONPATH=$(CURDIR)/$(EVALS) $(BIN)/python -m pytest -q tests/evals

long: $(VENV)/.acceptance $(VLLM)/.installed postgres  ## The acceptance tests that take minutes each; `make chaos` in short
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup -m long tests/runs tests/acceptance
	$(BIN)/python -m pytest -q -m long tests/vllm

clients: $(CLIENTS)/.installed  ## Try every client and write docs/clients.md from what is found
	CLIENTS_RECORD=1 $(BIN)/python -m pytest -q tests/clients
	$(BIN)/python scripts/clients_table.py

chaos: $(VENV)/.installed postgres  ## Kill every process in every state, crowd the server, attack it (SEED=7)
	CHAOS_SEED=$(or $(SEED),1) $(BIN)/python -m pytest -q -s tests/chaos
	BRIDGE_STORM=500 $(BIN)/python -m pytest -q tests/unit/bridge/test_bridge_leaks.py
	$(BIN)/python -m pytest -q --hypothesis-profile=chaos tests/unit/server/test_episodes.py \
		tests/integration/test_api_machine.py

# PostgreSQL and its pooler are the system's: Debian's packages where there are none.
postgres:
	ls /usr/lib/postgresql/*/bin/postgres /usr/sbin/pgbouncer > /dev/null 2>&1 || \
		{ command -v postgres > /dev/null && command -v pgbouncer > /dev/null; } || \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends postgresql pgbouncer; }

bubblewrap:
	command -v bwrap > /dev/null || \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends bubblewrap; }

vllm: $(VLLM)/.installed  ## Train the demo through two vLLM replicas (CPU build), and what may go wrong with them
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m 'not long' tests/vllm

tinker-servers: $(SKYRL)/.installed $(SKYRL_SDK)/.installed  ## Train the demo at SkyRL's server; installs 6 GB (PYTHON312=python3.12)
	$(BIN)/python -m pytest -q -s tests/servers

page: $(PAGE)/.installed  ## The page in a real browser: every view, a live run, login, the exported file, accessibility
	$(PAGE)/bin/python -m pytest -q -n 2 --dist worksteal tests/page

agents: $(VENV)/.installed $(AGENTS)/.installed  ## Claude Code, Codex, mini-swe-agent, opencode as rollouts, isolated; one that cheats
	$(BIN)/python -m pytest -q -m 'not long' tests/agents

agents-long: $(VENV)/.installed $(AGENTS)/.installed  ## Each agent twenty times at once
	$(BIN)/python -m pytest -q -m long tests/agents

cluster: $(CLUSTER)/.installed postgres  ## Ray clusters, PostgreSQL and fail-over, the examples for Slurm, Kubernetes and systemd
	CHAOS_EPISODES=100 CHAOS_WORKERS=4 CHAOS_KILLS=1 CHAOS_CLAIM_S=20 \
		$(CLUSTER)/bin/python -m pytest -q -n 3 --dist worksteal -m 'not long' \
		tests/chaos/test_failover_kills.py tests/cluster

cluster-long: $(CLUSTER)/.installed $(VLLM)/.installed  ## Twenty workers, replicas and server restarted one by one; fifty workers, real vLLM on Ray; a run at a URL
	$(CLUSTER)/bin/python -m pytest -q -m long tests/cluster

# A package that reasoning-gym needs warns when it is compiled. inspect-harbor asks for Python 3.12 and runs with 3.11.
environments: $(ENVIRONMENTS)/.installed $(VERIFIERS)/.installed bubblewrap  ## Environments of other libraries: verifiers, reasoning-gym, TextArena, OpenEnv, Harbor
	$(ENVIRONMENTS)/bin/python -m pytest -q -n 2 --dist loadfile -m 'not long' -W ignore::SyntaxWarning tests/environments \
		--ignore tests/environments/test_verifiers_legacy.py
	$(VERIFIERS)/bin/python -m pytest -q -m 'not long' tests/environments/test_verifiers_legacy.py tests/environments/test_openenv.py

environments-long: $(ENVIRONMENTS)/.installed  ## An environment of verifiers trains the tiny model
	$(ENVIRONMENTS)/bin/python -m pytest -q -s -m long tests/environments/test_verifiers_training.py

screenshots: $(PAGE)/.installed  ## Take the pictures of docs/page.md
	$(PAGE)/bin/python scripts/screenshots.py

gpu:  ## What a GPU shows, in ten minutes, into gpu.md; with gpu-bundle.tar.xz here, without a network (DEVICE=cuda)
	if [ -f $(BUNDLE) ]; then tar xf $(BUNDLE); else $(MAKE) $(VENV)/.installed; fi
	if [ -f $(BUNDLE) ]; then PYTHONPATH=gpu-bundle/site $(PYTHON) gpu-bundle/bench/gpu.py $(GPU_OPTIONS); \
		else $(BIN)/python bench/gpu.py $(GPU_OPTIONS); fi

gpu-bundle: $(VENV)/.installed  ## gpu-bundle.tar.xz, for a GPU's machine that has torch, transformers and PEFT (TARGET=3.12)
	$(BIN)/python scripts/gpu_bundle.py $(BUNDLE) --python-version $(or $(TARGET),3.11)

mutants: $(MUTANTS)/.installed  ## Put faults into what must not fail: do the tests notice? (MODULE="book link" SAMPLE=20 SEED=1)
	$(MUTANTS)/bin/python dev/mutants.py $(MODULE) --sample $(or $(SAMPLE),20) --seed $(or $(SEED),1)

service: $(VENV)/.installed  ## Check the Tinker service with your TINKER_API_KEY (MODEL=a Qwen3 instruct model there); costs cents
	@test -n "$$TINKER_API_KEY" || { echo "set TINKER_API_KEY"; exit 1; }
	CHECK_SERVICE=1 SERVICE_MODEL=$(MODEL) $(BIN)/python -m pytest -q -rA tests/runs/test_service.py

vocabularies: $(VENV)/.acceptance  ## Every id of four real vocabularies, in every form of the wire
	VOCABULARIES=all $(BIN)/python -m pytest -q -s -n 2 tests/acceptance/test_vocabularies.py

bench: $(VENV)/.installed $(VLLM)/.installed $(PAGE)/.installed postgres  ## Benchmarks, each against a reference measured in the same run
	$(BIN)/python bench/bridge.py
	$(BIN)/python bench/transcripts.py
	$(BIN)/python bench/engine.py
	$(BIN)/python bench/asynchronous.py
	$(BIN)/python bench/episodes.py
	$(BIN)/python bench/interchange.py
	$(BIN)/python bench/failover.py
	$(BIN)/python bench/passing.py
	$(BIN)/python bench/agents.py
	$(BIN)/python bench/gateway.py
	$(BIN)/python bench/mirror.py
	$(BIN)/python bench/merge.py
	$(BIN)/python bench/memory.py
	$(BIN)/python bench/distillation.py
	$(PAGE)/bin/python bench/page.py
	$(BIN)/python bench/vllm.py

docs: $(DOCS)/.installed  ## Build the documentation site in site/; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet

clean:  ## Remove the virtual environments and build leftovers
	rm -rf $(VENV) $(CLIENTS) $(MUTANTS) $(DOCS) $(SDK) $(SKYRL) $(SKYRL_SDK) $(VLLM) $(PAGE) $(CLUSTER) $(ENVIRONMENTS) $(VERIFIERS) $(AGENTS) site build dist src/*.egg-info .pytest_cache .ruff_cache
