#!/usr/bin/env bash
# What is to be done when a CUDA device can be had, within ten minutes: build, check, measure, one page.
#
#   benchmarks/h200.sh [--wheel FILE | --installed] [--python PYTHON] [options of python -m benchmarks.cuda]
#
#   --wheel FILE   install this wheel, built elsewhere, instead of building here
#   --installed    take what PYTHON has
#   --python       the Python whose torch is for CUDA devices; default: python3
#
# Takes torch, anychip's other needs and, to build, scikit-build-core, pybind11, cmake, ninja and nvcc
# as they are: nothing is downloaded. The page and its figures are in build/h200; what is worth keeping
# goes to benchmarks/results.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=python3 how=build wheel=
options=()
while (($#)); do
    case $1 in
        --wheel) how=wheel wheel=$2 && shift 2 ;;
        --installed) how=installed && shift ;;
        --python) python=$2 && shift 2 ;;
        -h | --help) sed -n '2,13s/^# \{0,1\}//p' "$0" && exit 0 ;;
        *) options+=("$1") && shift ;;
    esac
done

# The kernels for the host, which stage agreement compares with.
build_emulator() {
    cmake -G Ninja -S . -B build/cuda_emulator -DANYCHIP_CPU=OFF -DANYCHIP_CUDA=OFF \
        -DANYCHIP_BRIDGE=OFF -DANYCHIP_CUDA_EMULATOR=ON \
        -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" &&
        cmake --build build/cuda_emulator &&
        cp build/cuda_emulator/csrc/cuda/_emu.*.so tests/cuda_emulated/anychip_cuda_emulated &&
        "$python" -m pip install --no-build-isolation --no-deps --editable tests/cuda_emulated
}

folder=build/h200
mkdir -p "$folder"
begin=$SECONDS
case $how in
    build)
        "$python" -m pip install --no-build-isolation --no-deps \
            -Ccmake.define.ANYCHIP_CUDA=ON . >"$folder/build.txt" 2>&1
        ;;
    wheel)
        "$python" -m pip install --no-deps --force-reinstall "$wheel" >"$folder/build.txt" 2>&1
        ;;
    installed) true ;;
esac || {
    echo "the kernels could not be installed; the end of $folder/build.txt:"
    tail -n 20 "$folder/build.txt"
    exit 2
}
if [[ $how == build ]] && ! build_emulator >"$folder/build_emulator.txt" 2>&1; then
    echo "the emulator could not be built, so stage agreement will fail: $folder/build_emulator.txt"
fi
echo "build: $((SECONDS - begin)) s"
left=$((570 - (SECONDS - begin)))
exec "$python" -m benchmarks.cuda --seconds "$left" --folder "$folder" ${options[@]+"${options[@]}"}
