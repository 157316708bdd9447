#!/usr/bin/env bash
# Runs the tests and benchmarks of wholemem on this machine's GPU, and writes a report of at most 8 files for each part.
#
#   run REPORT-FOLDER [PART]     all (the default), tests, memory, rows, reduce, collectives, python, calls, launches, capi, peers
#
# tests: all test suites, without benchmarks; memory: the tests and benchmarks of memory; rows: gather and scatter; reduce:
# collectives of ranks that share the GPU, and all-reduce compared with PyTorch; collectives: only the tests of collectives; python:
# the Python package with this machine's Python, PyTorch, CuPy and JAX; calls: the cost of a call from PyTorch; launches: the time of a
# launch and of short eager calls, and with OLD_PROGRAMS="PATH ..." the calls compared with those programs; capi: the C and
# C++ interface, for which the machine needs nvcc; peers: gather compared with PyTorch and WholeGraph, if the bundle was built with
# --peers.
# Every step has a time limit. Tests with several processes on the GPU run under an MPS server in private folders, which stops
# when the script exits. The settings of the GPU are not changed.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
report=${1:?usage: run REPORT-FOLDER [PART]}
part=${2:-all}
case "$part" in all | tests | memory | rows | reduce | collectives | python | calls | launches | capi | peers) ;; *) echo "error: unknown part $part" >&2 && exit 2 ;; esac
mkdir -p "$report"
private=$(mktemp -d)
export WHOLEMEM_REQUIRE_CUDA=1 WHOLEMEM_TEST_SECONDS=120 NO_COLOR=1
export CUDA_MPS_PIPE_DIRECTORY="$private/pipe" CUDA_MPS_LOG_DIRECTORY="$private/log"
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
program="$private/wholemem"
gunzip --stdout "$here/wholemem.gz" >"$program" && chmod +x "$program"
tests="$private/tests"
mkdir -p "$tests"
for packed in "$here"/test-*.gz; do
    binary="$tests/$(basename "$packed" .gz)"
    gunzip --stdout "$packed" >"$binary" && chmod +x "$binary"
done

mps_runs=0
end_mps() {
    if [ "$mps_runs" = 1 ]; then
        echo quit | timeout 30 nvidia-cuda-mps-control >/dev/null 2>&1
        mps_runs=0
    fi
}
# Starts the MPS server; if that fails, reports the step as skipped and returns 1.
begin_mps() {
    if command -v nvidia-cuda-mps-control >/dev/null && timeout 30 nvidia-cuda-mps-control -d >>"$report/log.txt" 2>&1; then
        mps_runs=1
        return 0
    fi
    printf '%-28s skipped: cannot start an MPS server\n' "$1" | tee -a "$report/summary.txt"
    return 1
}
trap 'end_mps; rm -rf "$private"' EXIT

# step NAME SECONDS COMMAND...: runs a command; its output is appended to log.txt, its outcome to summary.txt. Steps may run at the
# same time, so the output is appended when the command has ended.
step() {
    local name=$1 limit=$2 start=$SECONDS rc output
    shift 2
    output=$(mktemp -p "$private")
    echo "== $name" | tee "$output"
    timeout --kill-after=10 "$limit" "$@" >>"$output" 2>&1
    rc=$?
    local outcome=ok
    [ "$rc" -ne 0 ] && outcome="FAILED ($rc)" && touch "$private/failed"
    cat "$output" >>"$report/log.txt"
    printf '%-28s %-14s %4d s\n' "$name" "$outcome" $((SECONDS - start)) | tee -a "$report/summary.txt"
}

# bench NAME SECONDS ARGUMENT...: runs a benchmark; its JSON goes to the file $OUTPUT.
bench() {
    local name=$1 limit=$2
    shift 2
    step "bench $name" "$limit" sh -c '"$0" "$@" >"$OUTPUT"' "$program" bench "$@" --backend cuda --json
}

{
    echo "wholemem $(cat "$here/commit")"
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    uname -sr
} >"$report/summary.txt" 2>&1
: >"$report/log.txt"

memory_tests() {
    step "doctor" 120 sh -c '"$0" doctor --json >"$1"' "$program" "$report/doctor.json"
    step "suite" 300 "$tests/test-cuda" --test-threads=1 suite:: gpu::
    step "rows" 300 "$tests/test-rows" --test-threads=1 gpu::
    step "slices" 120 "$tests/test-slices" --test-threads=1 gpu::
    step "graphs and large" 120 "$tests/test-whole" --test-threads=1 graphs::gpu_ large::gpu_
    step "store" 120 "$tests/test-store" --test-threads=1 gpu::suite adopt::suite
    step "demo" 120 "$program" demo --backend cuda --size 1GiB

    if begin_mps "suite under MPS"; then
        step "suite under MPS" 300 "$tests/test-cuda" --test-threads=1 suite:: gpu::
        step "processes under MPS" 200 "$tests/test-whole" --test-threads=1 processes::gpu_
        end_mps
    fi

    if command -v compute-sanitizer >/dev/null; then
        # Single-process tests only, and without the test of ten thousand cycles, which takes an hour under the sanitizer.
        step "suite under memcheck" 400 compute-sanitizer --tool memcheck --error-exitcode 9 --report-api-errors no \
            "$tests/test-cuda" --test-threads=1 suite:: gpu:: --skip ten_thousand --skip two_processes --skip outlives
        step "rows under memcheck" 300 env PROPTEST_CASES=24 compute-sanitizer --tool memcheck --error-exitcode 9 \
            --report-api-errors no "$tests/test-rows" --test-threads=1 gpu::
    else
        echo "suite under memcheck         skipped: no compute-sanitizer" | tee -a "$report/summary.txt"
    fi
}

memory_benches() {
    OUTPUT="$report/alloc.json" bench alloc 180 alloc --sizes 2MiB,8MiB,32MiB,128MiB,512MiB,2GiB,8GiB,16GiB,64GiB
    OUTPUT="$report/share.json" bench share 180 share --sizes 2MiB,32MiB,512MiB,2GiB,16GiB,64GiB
    OUTPUT="$report/hand.json" bench hand 180 hand --sizes 2MiB,32MiB,512MiB,2GiB,16GiB,64GiB
    OUTPUT="$report/copy.json" bench copy 120 copy
    OUTPUT="$report/store.json" bench store 120 store --packs 300,10000 --pack-bytes 16GiB
}

# Gather with every row size on one rank; with all kinds, locations, index types and distributions; with ranks that share the GPU;
# from a table of another process and from one with 17 uneven chunks; scatter.
rows() {
    OUTPUT="$report/gather.json" bench gather 240 gather
    OUTPUT="$report/gather-kinds.json" bench "gather, kinds" 300 gather --row-bytes 64,512,1KiB --rounds 7 \
        --kind continuous,chunked --location device,host --index i32,i64 --spread uniform,zipf
    OUTPUT="$report/gather-places.json" bench "gather, places" 300 gather --row-bytes 64,512,1KiB --rounds 9 \
        --ranks 2,17 --first-only --share first,last,uneven --kind continuous,chunked
    OUTPUT="$report/scatter.json" bench scatter 240 scatter --row-bytes 4,12,64,130,256,512,1KiB,4KiB --rounds 7
    if begin_mps "bench gather, ranks"; then
        OUTPUT="$report/gather-ranks.json" bench "gather, ranks" 300 gather --row-bytes 64,1KiB --ranks 1,2,4,8 \
            --rounds 5 --rows 1000000
        end_mps
    fi
}

# Windows and collectives: with ranks in one process, then with ranks in several processes under MPS. Without MPS, the GPU would
# switch between processes in time slices of milliseconds.
collective_tests() {
    # Up to nine ranks run in one process; with fewer hardware queues, the work of one rank would wait for that of another.
    step "windows and collectives" 300 env CUDA_DEVICE_MAX_CONNECTIONS=32 "$tests/test-symmetric" --test-threads=1 gpu_ \
        --skip killed_rank --skip of_processes
    begin_mps "collectives of processes" || return
    step "collectives of processes" 300 "$tests/test-symmetric" --test-threads=1 gpu_killed_rank of_processes
    # With one hardware queue, independent streams wait for each other: ordered calls must still succeed, and calls that would
    # deadlock must end with an error.
    step "one connection" 200 env CUDA_DEVICE_MAX_CONNECTIONS=1 "$tests/test-symmetric" --test-threads=1 call_order:: gpu_gathers
    step "blocking launches" 200 env CUDA_LAUNCH_BLOCKING=1 "$tests/test-symmetric" --test-threads=1 call_order:: gpu_gathers
    end_mps
}

collective_benches() {
    begin_mps "collective benches" || return
    OUTPUT="$report/allreduce.json" bench allreduce 200 allreduce --ranks 2,4,8 --rounds 7 --place out
    OUTPUT="$report/allreduce-tune.json" bench "allreduce, every algorithm" 200 allreduce --tune --ranks 2,4 --rounds 5
    OUTPUT="$report/allgather.json" bench allgather 100 allgather --ranks 2,4 --rounds 5 --sizes 8,4KiB,64KiB,1MiB,16MiB
    OUTPUT="$report/broadcast.json" bench broadcast 100 broadcast --ranks 2,4 --rounds 5 --sizes 8,4KiB,64KiB,1MiB,16MiB
    OUTPUT="$report/barrier.json" bench barrier 60 barrier --ranks 2,3,4,8
    step "peers allreduce" 300 python3 "$here/allreduce.py" gpu --program "$program" --turns 3 \
        --json "$report/peers-allreduce.json"
    end_mps
}

# The package is unpacked for this run, and pytest too if the machine has none. Tests with several processes share the GPU through
# MPS. Each test file runs in its own process, so that a hang does not affect the others. Most of their time is the start of
# processes, so the files run side by side, except those that compare the free memory of the whole GPU before and after.
python() {
    local tests="$here/python/tests" wheel file
    unpack_python
    if ! python3 -c 'import pytest' 2>>"$report/log.txt"; then
        for wheel in "$here"/python/pytest/*.whl; do python3 -m zipfile -e "$wheel" "$private/python"; done
    fi
    export PYTHONFAULTHANDLER=1
    export WHOLEMEM_PROGRAM="$program" XLA_PYTHON_CLIENT_PREALLOCATE=false
    step "python packages" 60 python3 -c 'import wholemem, importlib.metadata as known, sys; print(sys.version)
for name in "wholemem", "torch", "cupy-cuda12x", "cupy-cuda13x", "cupy", "jax", "numpy", "pytest":
    try: print(name, known.version(name))
    except known.PackageNotFoundError: pass'
    for file in "$tests"/test_gpu*.py; do
        case "$file" in *_ranks.py) continue ;; esac
        pytest_of "$file"
    done
    begin_mps "python ranks" || return
    for file in "$tests"/test_guides.py "$tests"/test_torch*.py "$tests"/test_gpu*_ranks.py; do
        [ -e "$file" ] && pytest_beside "$file"
    done
    wait
    end_mps
}
# Starts `pytest_of` in the background, after waiting until fewer than PYTHON_TESTS test files run.
PYTHON_TESTS=6
pytest_beside() {
    while [ "$(jobs -rp | wc -l)" -ge "$PYTHON_TESTS" ]; do wait -n; done
    pytest_of "$1" &
}
unpack_python() {
    python3 -m zipfile -e "$here"/python/wholemem-*.whl "$private/python"
    export PYTHONPATH="$private/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
}
# Runs one test file; the log lists failures, skips with reasons, and the slowest tests.
pytest_of() {
    local name
    name=$(basename "$1" .py)
    step "python $name" 200 python3 -m pytest -q -ra --tb=short --durations=5 -p no:cacheprovider \
        --rootdir="$here/python" "$1"
}

# Calls from torch, compared with the same calls from Rust. Gathers use one process and run without MPS, like the gather benchmark
# of Rust above.
calls() {
    unpack_python
    from_torch gather
    begin_mps "allreduce from torch" || return
    from_torch allreduce
    end_mps
}
from_torch() {
    step "$1 from torch" 400 python3 "$here/python/from_torch.py" --program "$program" --only "$1" \
        --json "$report/$1-from-torch.json"
}

# Which part of a short eager call takes how long: `launch` has the driver alone and `Stream::launch`, for the lengths that the
# parameters of collective kernels have and had. `allreduce` has the time of the calling thread (`caller`) and that between events on
# the GPU: if they are equal, launches bound the calls, otherwise kernels do. With 1000 calls in a round, what only the begin of a
# round costs is a tenth. Processes differ by a tenth, so comparisons with older programs have 15 pairs, once on any cores and once
# on cores that share no execution units, if the even cores are such; all runs are in the JSON.
launches() {
    local pair old cores
    OUTPUT="$report/launch.json" bench_launch "launch" 60
    begin_mps "launches under MPS" || return
    OUTPUT="$report/launch-mps.json" bench_launch "launch under MPS" 60
    # Two processes at once, as two ranks are.
    pair='"$0" bench launch --rounds 200 --json >"$OUTPUT" & other=$!; "$0" bench launch --rounds 200 --json >/dev/null; wait "$other"'
    OUTPUT="$report/launch-two.json" step "launch, two processes" 120 sh -c "$pair" "$program"
    OUTPUT="$report/allreduce-100.json" bench "allreduce, 100 calls" 120 allreduce --ranks 1,2 --mode eager --rounds 50 \
        --sizes 1KiB,64KiB --place in --buffers window,staged,registered
    OUTPUT="$report/allreduce-1000.json" bench "allreduce, 1000 calls" 120 allreduce --ranks 1,2 --mode eager --rounds 20 \
        --sizes 1KiB,64KiB --place in --buffers window,staged,registered --calls 1000
    for old in ${OLD_PROGRAMS:-}; do
        for cores in "0-$(($(nproc --all) - 1))" "0-$(($(nproc --all) - 1)):2"; do
            step "compare $(basename "$old") $cores" 540 taskset --cpu-list "$cores" python3 "$here/compare.py" "$old" "$program" \
                --pairs 15 --json "$report/compare-$(basename "$old")-${cores//[-:]/_}.json" -- allreduce --backend cuda \
                --ranks 1,2 --mode eager --rounds 15 --sizes 1KiB,64KiB --place in --buffers window,staged
        done
    done
    end_mps
}
bench_launch() {
    local name=$1 limit=$2
    step "bench $name" "$limit" sh -c '"$0" bench launch --rounds 200 --json >"$OUTPUT"' "$program"
}
# The C and C++ interface: the tests of the host in threads and, under MPS, in processes; the headers and an example compiled with this
# machine's nvcc; and the cost of gathers and all-reduces compared with Rust.
capi() {
    local prefix="$private/capi" example="$private/capi/bin/neighbours"
    mkdir -p "$prefix"
    tar -xzf "$here/capi.tar.gz" -C "$prefix" && cp "$program" "$prefix/bin/wholemem"
    step "c++ threads" 300 env CUDA_DEVICE_MAX_CONNECTIONS=32 "$prefix/bin/ranks" threads 4
    step "c++ and rust" 300 sh -c '"$0" >"$1"' "$prefix/bin/device_cost" "$report/device-cost.txt"
    if command -v nvcc >/dev/null; then
        step "c++ nvcc" 300 nvcc -std=c++17 -arch=sm_90 -Xcompiler -Wall,-Wextra,-Werror -Werror all-warnings -I "$prefix/include" \
            -L "$prefix/lib" -lwholemem -Xlinker -rpath="$prefix/lib" -o "$example" "$prefix/examples/cuda/neighbours.cu"
        step "c++ example, one rank" 120 "$program" launch -n 1 -- "$example"
    else
        echo "c++ nvcc                     skipped: no nvcc" | tee -a "$report/summary.txt"
    fi
    if command -v compute-sanitizer >/dev/null; then
        step "c++ threads under memcheck" 400 env CUDA_DEVICE_MAX_CONNECTIONS=32 WHOLEMEM_TIMEOUT=300 compute-sanitizer --tool memcheck \
            --error-exitcode 9 --report-api-errors no "$prefix/bin/ranks" threads 4
        [ -x "$example" ] && step "c++ example under memcheck" 200 "$program" launch -n 1 -- compute-sanitizer --tool memcheck \
            --error-exitcode 9 --report-api-errors no "$example"
    else
        echo "c++ under memcheck           skipped: no compute-sanitizer" | tee -a "$report/summary.txt"
    fi
    begin_mps "c++ processes" || return
    step "c++ processes" 300 "$program" launch -n 4 -- "$prefix/bin/ranks" process
    [ -x "$example" ] && step "c++ example, two ranks" 120 "$program" launch -n 2 -- "$example"
    end_mps
}

# Nothing is installed: the peer libraries are in the bundle, and NCCL is that of PyTorch.
peers() {
    if [ ! -d "$here/peers" ]; then
        echo "peers                        skipped: the bundle was built without --peers" | tee -a "$report/summary.txt"
        return
    fi
    local nccl libraries
    nccl=$(python3 -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])' 2>>"$report/log.txt")/lib
    libraries=$(printf '%s:' "$here"/peers/*/lib64)$nccl
    step "peers gather" 540 env PYTHONPATH="$here/peers" LD_LIBRARY_PATH="$libraries:${LD_LIBRARY_PATH:-}" \
        python3 "$here/peers/gather.py" gpu --program "$program" --few 1,100 --rounds 9 \
        --json "$report/peers-gather.json"
}

case "$part" in
    all) parts=(memory_tests memory_benches rows collective_tests collective_benches python calls launches capi peers) ;;
    tests) parts=(memory_tests collective_tests python) ;;
    memory) parts=(memory_tests memory_benches) ;;
    reduce) parts=(collective_tests collective_benches) ;;
    collectives) parts=(collective_tests) ;;
    *) parts=("$part") ;;
esac
for name in "${parts[@]}"; do "$name"; done
[ ! -e "$private/failed" ]
