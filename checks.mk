# The builds for checks: races, GPUs, the PTX interpreter, sanitizers, mutants, fuzzers; and make test-all, which runs them. Part of the Makefile.

.PHONY: try test-all build-mutants test-mutants test-gpu test-ptx ptxas count

# CHECKS: the targets of test-all. PART=2/4: every fourth one of the longest tests, starting with the second. CI selects another part for each commit.
ALL_CHECKS := races sanitizers mutants fuzzers ptx ptxas
CHECKS     := $(ALL_CHECKS)
PART       := 1/1
check       = $(if $(filter $1,$(CHECKS)),$2)
part        = $(foreach i,$(shell seq $(subst /, ,$(PART)) $(words $(1))),$(word $(i),$(1)))
CLANG      := $(shell command -v clang++ 2> /dev/null)

$(call needs,try,test '$(filter $(L),$(LADDERS) $(HOPPER_LADDERS))',a ladder: "$(L)" is none,make try L=rope V=3; $(LADDERS) $(HOPPER_LADDERS))
$(if $(filter $(L),$(HOPPER_LADDERS)),$(call needs,try,test '$(NVCC)',nvcc: only the PTX interpreter has the instructions of $(L),install the CUDA toolkit))
$(call needs,test-all,test -z '$(filter-out $(ALL_CHECKS),$(CHECKS))',to know which checks: CHECKS="$(CHECKS)",CHECKS="$(ALL_CHECKS)" or some of them)
$(call check,fuzzers,$(call needs,test-all,test '$(CLANG)',clang++,make deps))
$(call needs,ptxas test-gpu count,test '$(NVCC)',nvcc,install the CUDA toolkit)
$(call needs,test-gpu,nvidia-smi --list-gpus,a GPU and NVIDIA's driver,make test runs the kernels on the CPU)

# ---- races: only the kernels' files call the race detector, at every load and store -----------------------------------------------------

# nvcc assumes that pointers of different types may alias, and loads a struct of 16 bytes at once. These flags do the same, so access counts agree.
SEE_ACCESSES := -O2 -fsanitize=thread -fno-strict-aliasing -fno-tree-sra
$(foreach source,%.cpp %.cu $(BUILD)/%.cpp,$(eval $(call compile_cpu,race/,$(source),$$(EMULATE) $$(SEE_ACCESSES))))

build/race/test/test_cuda: $(EMULATOR) $(EMULATED_COMM) $(patsubst %,build/race/%.o,llmc/model/decoder test/cuda/models $(CUDA_UNITS)) $(CPU_MODELS) $(LIBRARY)
	$(call link,-lboost_context -lgtest_main $(GTEST))

$(LADDERS:%=build/race/dev/cuda/%): %: %.o build/dev/cuda/common.o $(EMULATOR) $(WORKSHOP_LIBRARY)
	$(call link,-lboost_context $(GTEST))

# make try checks one version of a ladder in three orders of threads, with race detection, and counts it and the previous version; with nvcc also their
# PTX. Ladders for Hopper exist only as PTX.
TRY_PTX := $(if $(filter $(L),$(HOPPER_LADDERS)),y)
try: $(if $(L),build/$(if $(TRY_PTX),ptx,race)/dev/cuda/$(L))     ## a version of a kernel, checked and counted beside the one before: make try L=rope V=3
	@./$< $(or $(V),shipped) $(if $(TRY_PTX),,--emu)
	@$(PYTHON) scripts/ladder_counts.py try $(L) $(or $(V),shipped) $(if $(TRY_PTX),--ptx)
ifneq ($(and $(HAVE_NVCC),$(if $(TRY_PTX),,y)),)
	@MAKEFLAGS= $(MAKE) --no-print-directory -s build/ptx/dev/cuda/$(L)
	@$(PYTHON) scripts/ladder_counts.py try $(L) $(or $(V),shipped) --ptx
endif

# ---- GPUs -------------------------------------------------------------------------------------------------------------------------

GPU_TESTS   := $(CUDA_TESTS:%.cpp=$(GPU)/%.o)
GPU_OBJECTS := $(TRAINERS:%=$(GPU)/%.o) $(GPU_HALF) $(GPU_TESTS) $(patsubst %,$(GPU)/dev/cuda/%.o,timing $(LADDERS) $(if $(HOPPER),$(HOPPER_LADDERS)))
GPU_LOGS    := $(patsubst %.o,%.ptxas,$(TRAINERS:%=$(GPU)/%.o) $(GPU)/llmc/model/decoder.o $(HOPPER)) $(call part,$(GPU_TESTS:.o=.ptxas))  # only of shipped kernels; the workshop's first versions may be worse

# The library comes first: nvcc's host compiler compiles CPU functions for any CPU, with other tile layouts, and the linker keeps the first of two
# functions with the same name.
$(GPU)/test/test_cuda: $(LIBRARY) $(CPU_MODELS) $(GPU_TESTS) $(GPU_HALF)
	$(call link,$(CUDA_LIBS) $(NCCL_LIBS) -lgtest_main $(GTEST))

test-gpu: $(GPU)/test/test_cuda              ## the kernels' tests on this machine's GPU, of GPU_ARCHS=90, say
	./$<

ptxas: $(GPU_OBJECTS) $(BUILD)/test/test_cuda  ## compile the kernels for GPU_ARCHS, or 80 90 100: registers, none spilled
	@$(BUILD)/test/test_cuda --gtest_filter='AttentionShapes*' --gtest_brief=1
	@$(PYTHON) scripts/ptxas.py $(GPU_LOGS)

# ---- the PTX interpreter (dev/emulator/README.md) -----------------------------------------------------------------------------------

# The kernels' tests, compiled by nvcc to PTX. The interpreter replaces libcudart and cuBLASLt, and executes the PTX on the CPU. -O1 applies to the
# host's half and saves time; the PTX is the same with -O3.
PTX_INTERPRETER := $(patsubst %.cpp,$(BUILD)/%.o,$(filter-out %/runtime.cpp %/cublaslt.cpp %/report.cpp %/ladder.cpp,$(wildcard dev/emulator/ptx/*.cpp)))
PTX_RUNTIME     := $(patsubst %,$(BUILD)/dev/emulator/ptx/%.o,runtime cublaslt report)
PTX_LADDER      := $(BUILD)/dev/emulator/ptx/ladder.o
PTX_TESTS       := $(patsubst %,$(BUILD)/ptx/%.o,$(CUDA_UNITS) test/cuda/models) $(patsubst %.cpp,$(BUILD)/ptx/%.o,$(wildcard test/ptx/kernels/*.cpp)) \
                   $(patsubst %,$(BUILD)/ptx/llmc/%.o,model/decoder core/gpu_query parallel/comm_nccl ops/attention_hopper)
PTX_TEXTS       := $(patsubst %,$(BUILD)/ptx/%.ptx,llmc/model/decoder $(TRAINERS))
PTX_LADDERS     := $(patsubst %,$(BUILD)/ptx/dev/cuda/%,$(LADDERS) $(HOPPER_LADDERS))
PTX_NVCCFLAGS   := -std=c++20 -O1 -diag-suppress 1675 -Xcompiler -fopenmp $(CARRIED:%=-isystem %/include)
# Slow suites are excluded, because they launch the same kernels; so are recorded launches, because the interpreter runs each launch at once.
PTX_TESTS_RUN   := -*Slow*:CudaGraphs*
PTX_TESTS_FAST  := $(PTX_TESTS_RUN):CudaRanks*:CudaPairs*
# ptxas reports the registers of the ladders; nothing runs its machine code.
PTX_ARCH        := 90
PTX_CODE        = compute_$(PTX_ARCH)
$(PTX_LADDERS:=.o): private PTX_CODE = [compute_$(PTX_ARCH),sm_$(PTX_ARCH)]
$(patsubst %,$(BUILD)/ptx/%.o,llmc/ops/attention_hopper $(HOPPER_LADDERS:%=dev/cuda/%)): private PTX_ARCH := 90a
$(BUILD)/ptx/llmc/core/gpu_query.o: private PTX_NVCCFLAGS += -DLLMC_GPU_ARCHS='"$(PTX_ARCH)"'
$(PTX_RUNTIME): private FLAGS_OF_FILE := -I$(dir $(NVCC))../include
$(PTX_LADDER): private FLAGS_OF_FILE := $(EMULATE)

PTX_GENCODE      = -gencode 'arch=compute_$(PTX_ARCH),code=$(PTX_CODE)' --no-compress
$(foreach source,%.cpp %.cu $(BUILD)/%.cpp,$(eval $(call compile_gpu,$(BUILD)/ptx,$(source),with its PTX,$$(PTX_NVCCFLAGS) $$(PTX_GENCODE))))

$(BUILD)/ptx/%.ptx: %.cu $(BUILD)/flags
	@mkdir -p $(@D)
	@echo 'compile $< to PTX'
	@$(NVCC) $(PTX_NVCCFLAGS) -arch=sm_90 -MMD -MP -x cu -ptx $< -o $@

$(BUILD)/test/test_ptx: $(patsubst %.cpp,$(BUILD)/%.o,$(wildcard test/ptx/*.cpp)) $(PTX_INTERPRETER) $(BUILD)/llmc/core.o
	$(call link,-lgtest_main $(GTEST))

$(BUILD)/ptx/test_cuda: $(LIBRARY) $(CPU_MODELS) $(PTX_TESTS) $(PTX_RUNTIME) $(PTX_INTERPRETER) | $(PTX_TEXTS)
	$(call link,-lgtest_main $(GTEST))

# CUTLASS's products, as foreign kernels for the interpreter; the headers come from PyPI.
CUTLASS      := $(BUILD)/cutlass/cutlass_library/source
TEST_CUTLASS := $(if $(HAVE_NVCC),$(BUILD)/ptx/test_cutlass)
$(CUTLASS)/include:
	@echo 'get     CUTLASS'
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --target $(BUILD)/cutlass nvidia-cutlass==4.2.0 || \
	    { echo "make test-all needs CUTLASS's headers"; echo '  fix: connect to a network, or put the package nvidia-cutlass 4.2.0 in $(BUILD)/cutlass'; exit 1; } >&2

$(BUILD)/ptx/test/ptx/cutlass/%.o: test/ptx/cutlass/%.cu test/ptx/cutlass/gemm.cuh $(BUILD)/flags | $(CUTLASS)/include
	@mkdir -p $(@D)
	@echo 'compile $< with its PTX'
	@$(NVCC) -std=c++20 -O1 --expt-relaxed-constexpr -w -I$(CUTLASS)/include -I$(CUTLASS)/tools/util/include \
	    -gencode arch=compute_90a,code=compute_90a --no-compress -c $< -o $@

$(BUILD)/test/ptx/cutlass/test_cutlass.o: private FLAGS_OF_FILE := -I$(dir $(NVCC))../include
$(BUILD)/ptx/test_cutlass: $(LIBRARY) $(BUILD)/test/ptx/cutlass/test_cutlass.o $(patsubst %,$(BUILD)/ptx/test/ptx/cutlass/%.o,pingpong cooperative fp8) $(PTX_RUNTIME) $(PTX_INTERPRETER)
	$(call link,-lgtest_main $(GTEST))

# The workshop in the interpreter: a program checks its versions, and counts their work.
$(PTX_LADDERS): %: %.o $(BUILD)/dev/cuda/common.o $(PTX_LADDER) $(PTX_RUNTIME) $(PTX_INTERPRETER) $(WORKSHOP_LIBRARY)
	$(call link,$(GTEST))

TEST_PTX         := $(BUILD)/test/test_ptx $(if $(HAVE_NVCC),$(BUILD)/ptx/test_cuda)
TEST_PTX_LADDERS := $(if $(HAVE_NVCC),$(PTX_LADDERS))
test-ptx: $(TEST_PTX) $(TEST_PTX_LADDERS)    ## nvcc's PTX of the kernels, interpreted on the CPU: dev/emulator/README.md
	@$(BUILD)/test/test_ptx --gtest_brief=1
	@$(if $(HAVE_NVCC),OMP_WAIT_POLICY=passive $(BUILD)/ptx/test_cuda --gtest_brief=1 --gtest_filter='$(PTX_TESTS_RUN)',echo 'no nvcc: the tests of the kernels as PTX are left out')
	@for l in $(TEST_PTX_LADDERS); do ./$$l || exit 1; done
	@$(if $(TEST_PTX_LADDERS),$(PYTHON) scripts/gpu_counts.py --nvcc $(NVCC) --check $(PTX_LADDERS))

count: $(PTX_LADDERS)                        ## what kernels do, counted on the CPU: dev/cuda/gpu_counts.md, dev/cuda/ladder_counts.md
	@$(PYTHON) scripts/gpu_counts.py --nvcc $(NVCC) $(PTX_LADDERS)
	@$(PYTHON) scripts/ladder_counts.py page --nvcc $(NVCC)

# ---- mutants and fuzzers ------------------------------------------------------------------------------------------------------------

TEST_MUTANTS := $(patsubst %,build/mutants/test/%,test_llmc test_cuda test_ptx)
build-mutants:
	@$(PYTHON) scripts/mutants.py --make build/mutants/tree
	@$(MAKE) --no-print-directory MUTANTS=1 $(TEST_MUTANTS)

test-mutants: build-mutants                  ## build known bugs in and require that a test fails
	@$(PYTHON) scripts/mutants.py

# The parsers of user files for libFuzzer, which is part of clang; single-threaded, so without OpenMP.
FUZZERS    := $(if $(CLANG),$(patsubst test/%.cpp,build/%,$(wildcard test/fuzz/*.cpp)))
FUZZ_FLAGS := -std=c++20 -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined -Wno-unknown-pragmas \
              -Wno-unknown-warning-option -idirafter $(shell $(CXX) -print-file-name=include)
PARSERS    := $(patsubst %.cpp,build/fuzz/%.o,$(wildcard llmc/core/*.cpp llmc/io/*.cpp llmc/data/*.cpp) llmc/parallel/comm.cpp \
                $(addprefix llmc/model/,config.cpp presets.cpp) $(addprefix llmc/train/,checkpoint.cpp trainer_state.cpp))
$(FUZZERS): build/fuzz/%: build/fuzz/test/fuzz/%.o $(PARSERS)
	@echo 'link    $@'
	@$(CLANG) $(FUZZ_FLAGS) -fsanitize=fuzzer $^ -o $@

build/fuzz/%.o: %.cpp Makefile
	@mkdir -p $(@D)
	@echo 'compile $< for the fuzzers'
	@$(CLANG) $(FUZZ_FLAGS) -fsanitize=fuzzer-no-link -MMD -MP -c $< -o $@

# ---- all --------------------------------------------------------------------------------------------------------------------------

TEST_BUILDS  := build $(call check,races,build/race) $(call check,sanitizers,build/san)
TEST_CUDA    := $(TEST_BUILDS:%=%/test/test_cuda)
TEST_LADDERS := $(foreach build,$(TEST_BUILDS),$(patsubst %,$(build)/dev/cuda/%,$(call part,$(LADDERS))))
TEST_SAN     := $(filter build/san/%,$(TEST_CUDA) $(TEST_LADDERS))
TEST_PTXAS   := $(if $(NVCC),$(call check,ptxas,$(GPU_LOGS)))
TEST_FUZZERS := $(call check,fuzzers,$(call part,$(FUZZERS) $(wildcard test/fuzz/*.py)))
CHECK_PTX    := $(call check,ptx,$(TEST_PTX) $(TEST_CUTLASS))
PTX_CHECKED  := $(call check,ptx,$(TEST_PTX_LADDERS))
test-all: $(PROGRAMS) $(TRAINERS:%=%_emu) $(BUILD)/test/test_llmc $(PROCESSES) $(CHECK_PTX) $(PTX_CHECKED) $(filter-out $(TEST_SAN),$(TEST_CUDA) $(TEST_LADDERS)) $(TEST_PTXAS:.ptxas=.o) $(filter-out %.py,$(TEST_FUZZERS))
test-all:                                    ## slow tests, dev/cuda, PTX, races, sanitizers, mutants, fuzzers and the format, too
	@$(call check,mutants,$(MAKE) --no-print-directory build-mutants)
	@$(if $(TEST_SAN),$(MAKE) --no-print-directory SAN=1 $(TEST_SAN))
	@$(RUN_TESTS) --all --part $(PART) --checks $(CHECKS) --nvcc '$(HAVE_NVCC)' --mutants $(call check,mutants,$(TEST_MUTANTS)) --cuda $(TEST_CUDA) \
	    --ladders $(TEST_LADDERS) --ptxas $(TEST_PTXAS) --fuzzers $(TEST_FUZZERS) --ptx $(CHECK_PTX) --ptx_ladders $(PTX_CHECKED) \
	    --ptx_tests='$(if $(filter 1/1,$(PART)),$(PTX_TESTS_RUN),$(PTX_TESTS_FAST))'

# ---- other trainers, beside this one ----------------------------------------------------------------------------------------------------

$(call needs,compare,test -x .venv-compare/bin/pip || python3 -c 'import ensurepip',python3 with its module venv,make deps)
$(call needs,compare,test -z '$(LLMC_SOURCE)' || test -e '$(LLMC_SOURCE)/train_gpt2.c',train_gpt2.c in LLMC_SOURCE=$(LLMC_SOURCE),name a checkout of karpathy/llm.c or unset it)
compare: $(PROGRAMS) $(BUILD)/dev/bench/few_tokens .venv-compare/installed.sh out/smollm2/model/tokenizer.json  ## the same training steps, and generation, here and in Hugging Face transformers and TRL
	@for model in smollm2-135m qwen2.5-0.5b gpt2 gpt2-short; do \
	    .venv-compare/bin/python scripts/compare.py --model $$model --out docs/benchmarks.md || exit 1; done
	@.venv-compare/bin/python scripts/compare_trl.py out/smollm2 --out docs/benchmarks.md
	@.venv-compare/bin/python scripts/compare_generate.py --out docs/benchmarks.md
	@.venv-compare/bin/python scripts/compare_grpo.py --out docs/benchmarks.md
	@.venv-compare/bin/python scripts/compare_distill.py --out docs/benchmarks.md

out/smollm2/model/tokenizer.json: | .venv-compare/installed.sh  # the last file written by the rule
	@.venv-compare/bin/python scripts/smollm2.py out/smollm2

.venv-compare/installed.sh: scripts/install_compare.sh
	@bash $<
