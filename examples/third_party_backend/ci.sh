#!/bin/sh
# What the toy's continuous integration runs: install, own tests, anychip's conformance suite.
# Run it in an environment where anychip is installed. The reports lie in ./reports afterwards:
# JUnit for the CI system, the page for people, the JSON for whoever wants the proof.
set -eu
cd "$(dirname "$0")"
level=${1:-full}

python -m pip install --no-deps --no-build-isolation .
python -m pytest
anychip doctor toy
mkdir -p reports
anychip conformance --backend toy --level "$level" \
    --json reports/conformance.json --html reports/conformance.html --junit reports/conformance.xml
anychip conformance verify reports/conformance.json
