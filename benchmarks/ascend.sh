#!/usr/bin/env bash
# What is to be done when an Ascend device can be had: look, check, train, measure, one file to send.
#
#   benchmarks/ascend.sh [--small] [--python PYTHON] [--folder DIR] [STAGE ...]
#
#   --small    minutes in place of an hour: tries the stages, as tests do on the emulator
#   --python   the Python with torch, torch_npu and anychip; default: python3
#   --folder   for what is written; default: build/ascend
#   STAGE      doctor conformance train cpu ranks bench; default: all of them
#
# Needs CANN's environment (source .../set_env.sh) and anychip installed beside torch_npu; nothing is
# downloaded. A stage that fails does not stop the others. The file to send is DIR.tar.gz: a page
# report.md, what each stage printed, the conformance report, the curves and the figures. It
# names the machine's chip and versions, and holds no data and no environment variables.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=python3 folder=build/ascend small=
stages=()
while (($#)); do
    case $1 in
        --small) small=yes && shift ;;
        --python) python=$2 && shift 2 ;;
        --folder) folder=$2 && shift 2 ;;
        -h | --help) sed -n '2,15s/^# \{0,1\}//p' "$0" && exit 0 ;;
        doctor | conformance | train | cpu | ranks | bench) stages+=("$1") && shift ;;
        *) echo "$1 is no stage and no option; see $0 --help" && exit 2 ;;
    esac
done
((${#stages[@]})) || stages=(doctor conformance train cpu ranks bench)
anychip() { "$python" -m anychip "$@"; }

# The same configuration on the chip and on the CPU, so that their curves can be compared.
size=(run.precision=fp32)
[[ $small ]] && size+=(model.width=32 model.layers=2 model.heads=2 model.context=32 data.batch_size=4)
steps=$([[ $small ]] && echo 4 || echo 200)

stage_doctor() {
    anychip doctor npu
    anychip backends
    "$python" -m pip list 2> /dev/null | grep -i -E '^(torch|torch.npu|anychip|numpy) '
    uname -srm
    ! command -v npu-smi > /dev/null || npu-smi info
}
stage_conformance() {
    local chosen=(--level full --isolate)
    [[ $small ]] && chosen=(--level quick --chapter device)
    anychip conformance --backend npu "${chosen[@]}" \
        --json "$folder/conformance.json" --html "$folder/conformance.html"
}
stage_train() { anychip train --backend npu --steps "$steps" --out "$folder/train" "${size[@]}"; }
stage_cpu() { anychip train --backend cpu --steps "$steps" --out "$folder/cpu" "${size[@]}"; }
stage_ranks() {
    local devices
    devices=$("$python" -c 'import torch; print(torch.npu.device_count())' | tail -n 1)
    if ((devices < 2)); then
        echo "left out: it needs two devices, and there is $devices"
        return
    fi
    anychip train --backend npu --nproc 2 optimizer.stage=2 --steps "$steps" \
        --out "$folder/ranks" "${size[@]}"
    [[ $small ]] && return
    anychip train --backend npu --nproc 2 parallel.pipeline=2 data.accumulation=4 --steps "$steps" \
        --out "$folder/pipeline" "${size[@]}"
}
stage_bench() {
    local dtype
    if [[ $small ]]; then
        anychip bench ops --backend npu --op softmax --rounds 3 --no-compile \
            --json "$folder/ops-float32.json"
        return
    fi
    for dtype in float32 bfloat16; do
        anychip bench ops --backend npu --dtype "$dtype" --no-compile \
            --json "$folder/ops-$dtype.json"
    done
    anychip bench dispatch --backend npu --json "$folder/dispatch.json"
    "$python" -m benchmarks.record optim --backend npu --folder "$folder"
}

# The emulator has a function that CANN has not.
what_ran='
import ctypes, torch
name, version = torch.npu.get_device_name(0), ctypes.create_string_buffer(128)
library = ctypes.CDLL("libascendcl.so")
if hasattr(library, "aclsysGetVersionStr"):
    library.aclsysGetVersionStr(None, version)
emulated = hasattr(ctypes.CDLL("libopapi.so"), "cann_operator_calls")
print("EMULATED: this ran on an emulated CANN, not on Ascend silicon. It says nothing of a device,"
      " and no time in it means anything." if emulated else f"Ran on a device: {name}.")
import torch_npu
print(f"\n{name}, CANN {version.value.decode() or None}, torch {torch.__version__},"
      f" torch_npu {torch_npu.__version__}")
'

if [[ -e $folder && ! -e $folder/report.md && $(ls -A "$folder") ]]; then
    echo "$folder holds something else than a report: name another --folder" && exit 2
fi
rm -rf "$folder"
mkdir -p "$folder"
ran=$("$python" -c "$what_ran" 2> "$folder/device.txt" | sed '/^Warning/d')
{
    echo "# anychip on an Ascend device, $(date -u +%F)"
    echo
    echo "${ran:-No device could be used: see doctor.txt and device.txt.}"
    printf '\n| stage | ended with | seconds |\n|---|---|---|\n'
} > "$folder/report.md"
echo "${ran:-no device could be used; its error is in $folder/device.txt}"
failed=0
for stage in "${stages[@]}"; do
    echo "== $stage"
    begin=$SECONDS
    (set -e && "stage_$stage") > "$folder/$stage.txt" 2>&1
    status=$?
    echo "| $stage | $status | $((SECONDS - begin)) |" >> "$folder/report.md"
    ((status == 0)) || { failed=1 && tail -n 5 "$folder/$stage.txt"; }
done
for stage in "${stages[@]}"; do
    printf '\n## %s\n\n```text\n%s\n```\n' "$stage" "$(tail -n 60 "$folder/$stage.txt")"
done >> "$folder/report.md"
# Checkpoints are large and nobody needs them.
tar -czf "$folder.tar.gz" -C "$folder" --exclude=checkpoint .
echo "to send: $folder.tar.gz"
exit $failed
