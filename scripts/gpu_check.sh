#!/bin/bash
# Builds the programs for this machine's GPU, checks everything that needs a GPU, and measures. Run it once on each kind of GPU.
#
#   scripts/gpu_check.sh [--quick] [--out DIR] [SECTION...]          out/gpu_check, all sections
#
#   build        the trainers, the kernels' tests and the workshop, only for this GPU
#   tests        every op against float64, whole models against transformers; ranks that share a GPU, and over NCCL ranks with one GPU each
#   runs         short training runs: the same bits twice, GPU against CPU, several ranks against one, train_gpt2
#   sanitizer    compute-sanitizer on the tests of ops: memcheck, racecheck, synccheck
#   ladders      every version of every op in dev/cuda, checked and timed; with --quick only the shipped versions
#   ops, attention, training                                         the sections of scripts/gpu_bench.py; `bench` is all three
#
# The script needs the CUDA toolkit with cuBLAS, g++ and python3 with numpy, and for comparisons PyTorch and transformers. It needs no network: if
# CLI11, nlohmann/json, xxHash, GoogleTest or boost.context are not installed, they are read from build/deps, which `make deps` fills if there is
# a network. Each step has a time limit and its own log in DIR, and the script continues after a failure. A section ends within ten minutes, so
# sections can be run one by one. DIR/benchmarks.md contains the tables. The last line is "N passed, M failed".
set -u
cd "$(dirname "$0")/.." || exit 1

out=out/gpu_check quick='' sections=()
all=(build tests runs sanitizer ladders ops attention training)
while [ $# -gt 0 ]; do
    case $1 in
        --quick) quick=--quick ;;
        --out) out=${2:?--out needs a directory}; shift ;;
        bench) sections+=(ops attention training) ;;
        *)  if [[ " ${all[*]} " != *" $1 "* ]]; then
                echo "scripts/gpu_check.sh: there is no section $1"$'\n'"  fix: use some of ${all[*]}, or bench" >&2
                exit 1
            fi
            sections+=("$1") ;;
    esac
    shift
done
[ ${#sections[@]} -gt 0 ] || sections=("${all[@]}")

# ---- the machine --------------------------------------------------------------------------------------------------------------------

visible=${CUDA_VISIBLE_DEVICES:-0}
capability=$(nvidia-smi -i "${visible%%,*}" --query-gpu=compute_cap --format=csv,noheader 2> /dev/null) || capability=''
if [[ ! $capability =~ ^[0-9]+\.[0-9]$ ]]; then
    echo "scripts/gpu_check.sh: there is no GPU: nvidia-smi shows none"$'\n'"  fix: run it on a machine with one of compute capability 8.0 or later" >&2
    exit 1
fi
arch=${capability/./}
nvcc=/usr/local/cuda/bin/nvcc
[ -x $nvcc ] || nvcc=$(command -v nvcc)
if [ -z "$nvcc" ]; then
    echo "scripts/gpu_check.sh: there is no nvcc"$'\n'"  fix: install the CUDA toolkit, 12.8 or later" >&2
    exit 1
fi
mkdir -p "$out"
{
    nvidia-smi -i "${visible%%,*}" --query-gpu=name,driver_version,compute_cap,memory.total,power.limit --format=csv,noheader
    $nvcc --version | tail -n 2 | head -n 1
    g++ --version | head -n 1
    python3 - <<'PYTHON'
import importlib.metadata, sys
print("Python", sys.version.split()[0], *(f", {p} {importlib.metadata.version(p)}" for p in ("torch", "transformers", "numpy")
                                          if any(d.name == p for d in importlib.metadata.distributions())))
PYTHON
    git describe --always --dirty 2> /dev/null
} | tee "$out/machine.txt"

# ---- one step -----------------------------------------------------------------------------------------------------------------------

passed=0 failed=0
# check NAME SECONDS COMMAND...: runs one step, which passes if the command exits with 0 in time. Its output is in DIR/NAME.log.
check() {
    local name=$1 limit=$2 log="$out/$1.log" begin=$SECONDS code=0
    shift 2
    timeout --kill-after=10 "$limit" "$@" > "$log" 2>&1 || code=$?
    local summary
    summary=$(grep -aE '^[0-9]+ passed, [0-9]+ failed|PASSED  \]|ERROR SUMMARY|RACECHECK SUMMARY|the same bits|losses differ' "$log" | tail -n 1)
    if [ $code = 0 ]; then
        passed=$((passed + 1))
        printf 'passed  %-28s %4d s  %s\n' "$name" $((SECONDS - begin)) "$summary"
    else
        failed=$((failed + 1))
        printf 'FAILED  %-28s %4d s  %s; %s ends with\n' "$name" $((SECONDS - begin)) \
            "$([ $code = 124 ] || [ $code = 137 ] && echo "longer than $limit s" || echo "code $code")" "$log"
        tail -n 15 "$log" | sed 's/^/        /'
    fi
    return $code
}

# check_sharded NAME SECONDS COMMAND...: runs the tests of one GoogleTest program as several processes at once, because float64 references on the CPU
# take most of the time. The outputs are in DIR/NAME.*.log, and DIR/NAME.log lists the failed ones.
check_sharded() {
    local name=$1 limit=$2
    shift 2
    shards=$shards prefix="$out/$name" check "$name" "$limit" bash -c '
        for ((i = 0; i < shards; i++)); do
            OMP_NUM_THREADS=2 GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$i "$@" > "$prefix.$i.log" 2>&1 &
            processes[i]=$!
        done
        failed=0
        for ((i = 0; i < shards; i++)); do
            code=0; wait "${processes[i]}" || code=$?
            [ $code = 0 ] || { failed=1; echo "process $i ended with $code: $prefix.$i.log"; }
        done
        grep -ahE "FAILED  \]|========= (Error|Invalid|.* Error:|Race|Warning|Uninit)" "$prefix".*.log | sort | uniq -c | head -n 12
        cat "$prefix".*.log | grep -aoE "PASSED  \] [0-9]+" | awk "{ n += \$3 } END { print n + 0, \"[  PASSED  ]\" }"
        exit $failed' sharded "$@"
}
shards=$(( $(nproc) > 2 ? $(nproc) / 2 : 1 ))

test_cuda=build/gpu_$arch/test/test_cuda
programs=()
for file in dev/cuda/*.cu; do
    case $file in
        dev/cuda/timing.cu) ;;
        *hopper*) [ "$arch" != 90 ] || programs+=("build/${file%.cu}") ;;
        *) programs+=("build/${file%.cu}") ;;
    esac
done

# ---- sections -----------------------------------------------------------------------------------------------------------------------

build() {
    check build 590 make --keep-going STRICT=0 GPU_ARCHS="$arch" train_llama train_gpt2 "$test_cuda" "${programs[@]}"
}

# run NAME ARGUMENTS...: a training run of $trainer with output directory DIR/NAME
trainer=train_llama
run() {
    local name=$1
    shift
    check "run-$name" 120 "./$trainer" "$@" --overwrite --output_dir "$out/$name"
}
same() { check "$1" 30 python3 scripts/compare_runs.py "$out/$2" "$out/$3" "${@:4}"; }

tests() {
    check_sharded ops 300 "./$test_cuda" --gtest_filter='-*Goldens*:*GpuComm*:*OverGpus*'  # includes ranks that share a GPU
    check_sharded models 200 "./$test_cuda" --gtest_filter='*Goldens*'
    nccl
}

runs() {
    local steps=200 golden=test/golden/qwen2
    [ -z "$quick" ] || steps=20
    for time in 1 2; do
        for dtype in bf16 f32; do run demo-$dtype-$time demo --device cuda --dtype $dtype --max_steps $steps; done
        run golden-$time sft --model $golden --data $golden/golden.safetensors --device cuda --train_batch_size 3 --max_epochs 20 --learning_rate 1e-3
    done
    for name in demo-bf16 demo-f32 golden; do same twice-$name $name-1 $name-2; done

    check tasks 300 python3 scripts/same_bits.py --gpu  # each task, recomputation, offload, adapters, rings
    run profile demo --device cuda --max_steps 5 --profile

    # Compares the first steps on both devices. Different orders of sums cause differences that grow with the steps.
    run cpu demo --device cpu --dtype f32 --max_steps 10
    for dtype in bf16 f32; do run gpu-$dtype demo --device cuda --dtype $dtype --max_steps 10; done
    run gpu-tf32 demo --device cuda --dtype tf32 --max_steps 10
    same cpu-against-gpu-f32 cpu gpu-f32 --loss 1e-4
    same cpu-against-gpu-tf32 cpu gpu-tf32 --loss 1e-2
    same cpu-against-gpu-bf16 cpu gpu-bf16 --loss 2e-2
    ranks
    gpt2
}

# Several ranks train like one: on one GPU as threads, in two ways; and with a GPU for each rank.
ranks() {
    run ranks-ring demo --device cuda --dtype f32 --max_steps 10 --ranks 4 --ring_attn_size 4 --zero_stage 1
    run ranks-data demo --device cuda --dtype f32 --max_steps 10 --ranks 4 --ring_attn_size 2 --sp_mode gather --zero_stage 2
    same one-rank-against-ring gpu-f32 ranks-ring --loss 1e-5
    same one-rank-against-data gpu-f32 ranks-data --loss 1e-5
    local gpus
    gpus=$(nvidia-smi --list-gpus | wc -l)
    if [ "$gpus" -lt 2 ] || ! command -v mpirun > /dev/null; then
        echo 'skipped ranks with a GPU each: that takes two GPUs, and mpirun'
        return
    fi
    check run-ranks-nccl 120 bash scripts/launch.sh -np 2 ./train_llama demo --device cuda --dtype f32 --max_steps 10 \
        --zero_stage 2 --overwrite --output_dir "$out/ranks-nccl"
    same one-rank-against-nccl gpu-f32 ranks-nccl --loss 1e-5
}

# The first steps of a tiny GPT-2 and of the smallest published one, on both devices, and twice.
gpt2() {
    local trainer=train_gpt2 golden=test/golden/gpt2
    gpt2_runs golden --model $golden --data $golden/golden.safetensors --train_batch_size 3 --max_steps 10 --learning_rate 1e-3
    gpt2_runs d12 --preset d12 --data data/demo/train.safetensors --train_batch_size 16 --max_steps 3 --learning_rate 1e-4 --lr_warmup 0
}

gpt2_runs() {
    local name=gpt2-$1
    shift
    run $name-cpu pretrain "$@" --device cpu --dtype f32
    for dtype in bf16 f32; do
        for time in 1 2; do run $name-$dtype-$time pretrain "$@" --device cuda --dtype $dtype; done
        same twice-$name-$dtype $name-$dtype-1 $name-$dtype-2
    done
    same $name-against-cpu-f32 $name-cpu $name-f32-1 --loss 1e-4
    same $name-against-cpu-bf16 $name-cpu $name-bf16-1 --loss 2e-2
}

# One rank per GPU, at most 3. With one GPU the rank communicates with itself.
nccl() {
    if ! grep -q 'HAVE_NCCL := 1' build/probe.mk; then
        echo 'skipped nccl: this machine has no NCCL'
        return
    fi
    check nccl 200 "./$test_cuda" --gtest_filter='*GpuComm*:*OverGpus*'
    ! grep -q SKIPPED "$out/nccl.log" || echo 'skipped some of nccl: they need 2 or 3 GPUs'
}

ladders() {
    local versions=all
    [ -z "$quick" ] || versions=shipped
    for program in "${programs[@]}"; do check "ladder-$(basename "$program")" 150 "$program" $versions; done
}

sanitizer() {
    local tool
    tool=$(command -v compute-sanitizer "$(dirname "$nvcc")/compute-sanitizer" | head -n 1)
    if [ -z "$tool" ]; then
        echo 'skipped sanitizer: this toolkit has no compute-sanitizer'
        return
    fi
    # The tests of ops write all device memory before they read it, so initcheck would find nothing. The program itself reports API errors.
    # racecheck skips cuBLASLt's own kernels, and all tools skip NCCL's. racecheck does not order a warp's stores before the arrival of one of
    # its lanes at an mbarrier, so it also skips Hopper's attention.
    local ops='-*Slow*:*Goldens*:*CudaRanks*:*GpuComm*:*OverGpus*' kernels='-*Slow*:*Goldens*:*CudaRanks*:*GpuComm*:*OverGpus*:*Matmul*:Head*'
    [ -z "$quick" ] || ops='Rope*:Norms*:Attention*' kernels='Rope*:Norms*:Attention*-*Slow*'
    [ "$arch" != 90 ] || kernels+=':Attention/1*'  # in bf16
    check_sharded memcheck 280 "$tool" --tool memcheck --report-api-errors no --error-exitcode 1 "./$test_cuda" --gtest_filter="$ops"
    check_sharded memcheck-model 100 "$tool" --tool memcheck --report-api-errors no --error-exitcode 1 "./$test_cuda" --gtest_filter='Families/Goldens*qwen3'
    check_sharded racecheck 150 "$tool" --tool racecheck --report-api-errors no --error-exitcode 1 "./$test_cuda" --gtest_filter="$kernels"
    check_sharded synccheck 60 "$tool" --tool synccheck --report-api-errors no --error-exitcode 1 "./$test_cuda" --gtest_filter="$kernels"
}

for section in "${sections[@]}"; do
    echo "==== $section"
    case $section in
        ops | attention | training)
            check "bench-$section" 590 python3 scripts/gpu_bench.py "$section" $quick --out "$out/benchmarks.md" ;;
        *) "$section" ;;
    esac
done
# One file with all results: machine description, logs, tables, and the predictions to compare with the tables.
nvidia-smi -q > "$out/nvidia-smi.log" 2>&1
cp dev/cuda/gpu_counts.md "$out"
tar czf "$out.tar.gz" -C "$(dirname "$out")" "$(basename "$out")"
echo "$passed passed, $failed failed; logs and tables in $out, all of it in $out.tar.gz"
[ $failed = 0 ]
