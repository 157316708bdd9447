#!/usr/bin/env bash
# Runs wholemem's suite and benches on this machine's GPU, and writes a report of at most 8 files.
#
#   run REPORT-FOLDER
#
# Every step has a time limit. Tests that need several processes on one GPU at once run under an MPS server of our own,
# in private folders, which is ended with the script. Nothing of the card's settings is changed.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
report=${1:?usage: run REPORT-FOLDER}
mkdir -p "$report"
failed=0
private=$(mktemp -d)
export WHOLEMEM_REQUIRE_CUDA=1 WHOLEMEM_TEST_SECONDS=120 NO_COLOR=1
export CUDA_MPS_PIPE_DIRECTORY="$private/pipe" CUDA_MPS_LOG_DIRECTORY="$private/log"
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"

mps_runs=0
end_mps() {
    if [ "$mps_runs" = 1 ]; then
        echo quit | timeout 30 nvidia-cuda-mps-control >/dev/null 2>&1
        mps_runs=0
    fi
}
trap 'end_mps; rm -rf "$private"' EXIT

# step NAME SECONDS COMMAND...: its output goes to the summary's log, its outcome to the summary.
step() {
    local name=$1 limit=$2 start=$SECONDS rc
    shift 2
    echo "== $name" | tee -a "$report/log.txt"
    timeout --kill-after=10 "$limit" "$@" >>"$report/log.txt" 2>&1
    rc=$?
    local outcome=ok
    [ "$rc" -ne 0 ] && outcome="FAILED ($rc)" && failed=1
    printf '%-28s %-14s %4d s\n' "$name" "$outcome" $((SECONDS - start)) | tee -a "$report/summary.txt"
}

# bench NAME SECONDS ARGUMENT...: one JSON object, kept.
bench() {
    local name=$1 limit=$2
    shift 2
    step "bench $name" "$limit" sh -c '"$0" "$@" >"$OUTPUT"' "$here/wholemem" bench "$@" --backend cuda --json
}

{
    echo "wholemem $(cat "$here/commit")"
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    uname -sr
} >"$report/summary.txt" 2>&1
: >"$report/log.txt"

step "doctor" 120 sh -c '"$0" doctor --json >"$1"' "$here/wholemem" "$report/doctor.json"
step "suite" 300 "$here/test-cuda" --test-threads=1 suite:: gpu::
step "rows" 300 "$here/test-rows" --test-threads=1 gpu::
step "graphs" 120 "$here/test-graphs" --test-threads=1 gpu_
step "large" 120 "$here/test-large" --test-threads=1 gpu_
step "demo" 120 "$here/wholemem" demo --backend cuda --size 1GiB
OUTPUT="$report/alloc.json" bench alloc 180 alloc --sizes 2MiB,8MiB,32MiB,128MiB,512MiB,2GiB,8GiB,16GiB,64GiB
OUTPUT="$report/share.json" bench share 180 share --sizes 2MiB,32MiB,512MiB,2GiB,16GiB,64GiB
OUTPUT="$report/hand.json" bench hand 180 hand --sizes 2MiB,32MiB,512MiB,2GiB,16GiB,64GiB
OUTPUT="$report/copy.json" bench copy 120 copy

if command -v nvidia-cuda-mps-control >/dev/null && timeout 30 nvidia-cuda-mps-control -d >>"$report/log.txt" 2>&1; then
    mps_runs=1
    step "suite under MPS" 300 "$here/test-cuda" --test-threads=1 suite:: gpu::
    step "processes under MPS" 200 "$here/test-processes" --test-threads=1 gpu_
    end_mps
else
    echo "suite under MPS              skipped: no MPS server could be started" | tee -a "$report/summary.txt"
fi

if command -v compute-sanitizer >/dev/null; then
    # One process at a time, and without the ten thousand cycles, which the sanitizer would make an hour of.
    step "suite under memcheck" 400 compute-sanitizer --tool memcheck --error-exitcode 9 --report-api-errors no \
        "$here/test-cuda" --test-threads=1 suite:: gpu:: --skip ten_thousand --skip two_processes --skip outlives
    step "rows under memcheck" 300 env PROPTEST_CASES=24 compute-sanitizer --tool memcheck --error-exitcode 9 \
        --report-api-errors no "$here/test-rows" --test-threads=1 gpu::
else
    echo "suite under memcheck         skipped: no compute-sanitizer" | tee -a "$report/summary.txt"
fi

exit "$failed"
