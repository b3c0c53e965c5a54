#!/bin/sh
# What the toy's continuous integration runs: install, own tests, anychip's conformance suite.
# Run it in an environment where anychip is installed.
set -eu
cd "$(dirname "$0")"

python -m pip install --no-deps --no-build-isolation .
python -m pytest
anychip doctor toy
anychip conformance --backend toy --level full --json conformance.json
