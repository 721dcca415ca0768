# Each target makes its own environment on a machine that has only python3 with venv and pip; see bootstrap.py.
#   make test ARGS="-m gpu"         arguments for the task itself
#   make test TRANSFORMERS=5.17.0   one transformers release     VENV=.venv-5.17   folder of the environment
#   HYSPARSE_TORCH=...              pip requirement for torch    HYSPARSE_SYSTEM_SITE=0|1   build on the system's packages
PYTHON ?= python3
ARGS ?=
export VENV TRANSFORMERS HYSPARSE_TORCH HYSPARSE_SYSTEM_SITE

.PHONY: help demo test lint setup clean
help:
	@$(PYTHON) bootstrap.py --help

demo test lint setup:
	@$(PYTHON) bootstrap.py $@ $(ARGS)

clean:
	rm -rf build dist artifacts *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
	@$(PYTHON) bootstrap.py remove
