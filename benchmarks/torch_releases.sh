#!/bin/sh
# Does the bridge work with the releases of torch that anychip supports? A virtual environment for
# each, with the CPU's torch where the index has one; in it the bridge is built, and the cases of
# devices run on minichip. Needs gigabytes and a network.
#   benchmarks/torch_releases.sh [RELEASE ...]    default: 2.11.* 2.13.* and the newest, ''
set -eu
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
[ $# -gt 0 ] || set -- 2.11.* 2.13.* ""
for release in "$@"; do
    python3 -m venv "$work/env"
    "$work/env/bin/pip" install --quiet "torch${release:+==$release}" pytest pytest-timeout
    "$work/env/bin/pip" install --quiet .
    cc "-Icsrc/include" -shared -fPIC -pthread examples/minichip/minichip.c -o "$work/libminichip.so"
    "$work/env/bin/python" -c 'import torch; print("torch", torch.__version__)'
    ANYCHIP_CACHE_DIR="$work/cache" ANYCHIP_TEST_CHIP="$work/libminichip.so" PYTHONPATH=core \
        "$work/env/bin/python" -m pytest -q -p no:cacheprovider tests/integration/cabi/device_cases.py
    rm -rf "$work/env" "$work/cache"
done
