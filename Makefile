# make help          what there is to make
#
# Needs g++ 12 or newer, or clang 16 or newer, and the headers of CLI11, nlohmann/json and xxHash. What else helps is found by compiling
# and linking a few lines (scripts/probe.sh); the result is kept in build/probe.mk until this file, the script or the compiler changes, or
# `make probe`.
#   ONEDNN=0, OPENBLAS=0, MPI=0, NCCL=0    do without that library, though it is there
#   CXX=clang++-16                 with that compiler; scripts/compilers.sh tests all compilers that it finds
#   CPU=znver4                     for that CPU (a name of the compiler's -march) instead of this one; for all: make plain
#   GPU_ARCHS="80 90"              kernels for these compute capabilities (8.0 and 9.0) instead of those of this machine's GPUs
#   STRICT=0                       warnings of nvcc are no errors: for versions of it and of g++ that were not tried
#   AMX=software                   functions in place of the matrix unit's instructions (llmc/ops/amx.h), to test that route anywhere, in build/amx
#   SAN=1                          with the address and undefined-behaviour sanitizers, in build/san

CPU      := native
CXX      := g++
# Flags for the CPU have other names elsewhere. A cross compiler knows no native CPU, and compiles for all of its architecture.
known     = $(foreach flag,$1,$(if $(shell $(CXX) -Werror $(flag) -x c++ -E /dev/null > /dev/null 2>&1 && echo yes),$(flag)))
CPU_FLAG := $(or $(call known,-march=$(CPU)),$(call known,-mcpu=$(CPU)),$(patsubst %,-march=%,$(filter-out native,$(CPU))))
CXXFLAGS := -std=c++20 -O3 $(CPU_FLAG) $(call known,-mprefer-vector-width=512) -fno-math-errno -fno-trapping-math -fopenmp -Wall -Wextra \
            $(patsubst -W%,-Wno-%,$(call known,-Wpass-failed))
PYTHON   := $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)
BUILD    := build
TRAINERS := train_gpt2 train_llama
PLACE    :=
TREE     :=
PROBE    := build/probe.mk

ifeq ($(MUTANTS),1)  # set by test-mutants
BUILD    := build/mutants
TREE     := build/mutants/tree/
CXXFLAGS += -O1 $(call known,-march=x86-64-v3) -include test/mutant.h -DLLMC_AMX_IN_SOFTWARE -Wno-psabi
else ifeq ($(AMX),software)
BUILD    := build/amx
PLACE    := $(BUILD)/
CXXFLAGS += -DLLMC_AMX_IN_SOFTWARE -Wno-psabi
else ifeq ($(SAN),1)
BUILD    := build/san
PLACE    := $(BUILD)/
CXXFLAGS += -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
endif

PROGRAMS := $(TRAINERS:%=$(PLACE)%)

MAKEFLAGS += -j$(shell nproc 2> /dev/null || sysctl -n hw.ncpu)
.DEFAULT_GOAL := all
.PHONY: all plain deps demo demo-rl left-out test test-all build-mutants test-mutants test-gpu test-ptx ptxas count bench compare format tidy probe help clean FORCE
.DELETE_ON_ERROR:

# ---- what is on this machine ------------------------------------------------------------------------------------------------------

CLANG    := $(shell command -v clang++ 2> /dev/null)
COMPILER := $(CXX): $(shell $(CXX) --version 2>/dev/null | head -n 1)
ifneq ($(filter-out deps format probe help clean,$(or $(MAKECMDGOALS),all)),)
include $(PROBE)
endif

PROBE_FLAGS := $(CXXFLAGS)
$(PROBE): Makefile scripts/probe.sh
	@$(RUN_PROBE)
RUN_PROBE = COMPILER="$(COMPILER)" NVCC="$(NVCC)" CXX="$(CXX)" CXXFLAGS="$(PROBE_FLAGS)" bash scripts/probe.sh $(PROBE)
ifneq ($(COMPILER),$(PROBED_COMPILER))
$(PROBE): FORCE
endif

probe:                                       ## look again for libraries
	@$(RUN_PROBE)

ifneq ($(CARRIED),)
CXXFLAGS += -isystem $(CARRIED)/include
LDLIBS   += -L$(CARRIED)/lib
endif

ifeq ($(HAVE_ONEDNN)$(filter 0,$(ONEDNN)),1)
CXXFLAGS += -DLLMC_ONEDNN
LDLIBS   += -ldnnl
else ifeq ($(HAVE_OPENBLAS)$(filter 0,$(OPENBLAS)),1)
CXXFLAGS += -DLLMC_OPENBLAS
LDLIBS   += -lopenblas
endif

ifeq ($(HAVE_MPI)$(filter 0,$(MPI)),1)
CXXFLAGS += -DLLMC_MPI $(MPI_HEADERS)
LDLIBS   += $(MPI_LIBRARIES)
endif

# ---- compile and link -------------------------------------------------------------------------------------------------------------

LIBRARY := $(patsubst llmc/%/,$(BUILD)/llmc/%.o,$(wildcard llmc/*/))
TESTS   := $(patsubst %.cpp,$(BUILD)/%.o,$(wildcard test/*.cpp test/ops/*.cpp))
CPU_MODELS := $(BUILD)/test/models.o
PROCESSES := $(patsubst %.cpp,$(BUILD)/%,$(wildcard test/processes/*.cpp))
BENCHES := $(patsubst %.cpp,$(BUILD)/%,$(wildcard dev/bench/*.cpp))
CUDA_TESTS := $(wildcard test/cuda/*.cpp test/ops/*.cpp)
EMULATED_COMM := $(BUILD)/emulated/llmc/parallel/comm_nccl.o
EMULATOR := $(BUILD)/dev/emulator/simt.o $(BUILD)/dev/emulator/streams.o
EMULATED := $(EMULATOR) $(EMULATED_COMM) $(CUDA_TESTS:%.cpp=$(BUILD)/emulated/%.o)
EMULATED_HALF := $(BUILD)/emulated/llmc/core/gpu_query.o $(EMULATED_COMM)
FUZZERS := $(if $(CLANG),$(patsubst test/%.cpp,build/%,$(wildcard test/fuzz/*.cpp)))
LADDERS := $(patsubst dev/cuda/%.cu,%,$(filter-out dev/cuda/timing.cu,$(wildcard dev/cuda/*.cu)))

# Of the tests that take longest every fourth, from the second on, with PART=2/4; of the checks that are built in another way only some, with
# CHECKS=races. CI takes another part, and other checks, for each commit.
PART := 1/1
part  = $(foreach i,$(shell seq $(subst /, ,$(PART)) $(words $(1))),$(word $(i),$(1)))
ALL_CHECKS := races sanitizers mutants fuzzers ptxas
CHECKS     := $(ALL_CHECKS)
check       = $(if $(filter $1,$(CHECKS)),$2)

NVCC      := $(firstword $(wildcard /usr/local/cuda/bin/nvcc) $(shell command -v nvcc 2> /dev/null))
# The programs are compiled for the GPUs of this machine, and for the CPU alone where there is none; what checks kernels compiles them for three
# architectures. Of the last there is PTX, too, which the driver compiles for later GPUs.
KNOWN_ARCHS := $(patsubst compute_%,%,$(if $(NVCC),$(shell $(NVCC) --list-gpu-arch 2> /dev/null)))
ALL_ARCHS := $(filter 80 90 100,$(KNOWN_ARCHS))
ifeq ($(origin GPU_ARCHS),undefined)
GPU_ARCHS := $(sort $(filter $(KNOWN_ARCHS),$(subst .,,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null))))
endif
ARCHS     := $(or $(GPU_ARCHS),$(ALL_ARCHS))
NVCCFLAGS := -std=c++20 -O3 -diag-suppress 1675 -Xcompiler -fopenmp,-Wall,-Wextra,-Wno-unused-parameter,-Wno-unknown-pragmas \
             $(if $(filter 0,$(STRICT)),,-Werror all-warnings -Xcompiler -Werror) \
             $(foreach arch,$(ARCHS),-gencode arch=compute_$(arch),code=sm_$(arch)) -DLLMC_GPU_ARCHS='"$(ARCHS)"' \
             $(foreach arch,$(lastword $(ARCHS)),-gencode arch=compute_$(arch),code=compute_$(arch)) $(CARRIED:%=-isystem %/include)
GPU       := build/gpu$(subst $(eval) ,,$(ARCHS:%=_%))
GPU_COMM  := $(GPU)/llmc/parallel/comm_nccl.o
GPU_HALF  := $(GPU)/llmc/core/gpu_query.o $(GPU_COMM)
HAVE_NVCC := $(and $(filter build build/plain,$(BUILD)),$(filter 1,$(HAVE_CUDA)),$(NVCC))
CUDA      := $(and $(HAVE_NVCC),$(GPU_ARCHS))
CUDA_LIB  := $(firstword $(realpath $(dir $(NVCC))../lib64 $(dir $(NVCC))../lib))
CUDA_LIBS := -L$(CUDA_LIB) -Wl,-rpath,$(CUDA_LIB) -lcudart_static -lcublasLt -ldl -lrt -lpthread
ifeq ($(HAVE_NCCL)$(filter 0,$(NCCL)),1)
NVCCFLAGS += -DLLMC_NCCL
NCCL_LIBS := -lnccl
endif

# ---- what a target needs ----------------------------------------------------------------------------------------------------------

# It is looked for here, before anything is built or trained, and what is missing is named with the command that gets it.
define NEWLINE


endef
# $(call needs,TARGETS,a shell command that succeeds where it is there,its name,how to get it)
needs = $(if $(filter $1,$(MAKECMDGOALS)),$(if $(shell $2 > /dev/null 2>&1 && echo yes),,$(call refuse,$1,$3,$4)))
refuse = $(error make $(filter $1,$(MAKECMDGOALS)) needs $2$(NEWLINE)  fix: $3)
# Of packages of Python those that are missing.
lacking = $(shell $(PYTHON) -c 'import importlib.util as u, sys; print(*(p for p in sys.argv[1:] if not u.find_spec(p)))' $1 2> /dev/null || echo $1)
needs_python = $(if $(filter $1,$(MAKECMDGOALS)),$(if $(call lacking,$2),$(call refuse,$1,$(call lacking,$2) for $(PYTHON),make deps)))
PACKAGES = $(shell sed -n 's/>=.*//p' requirements.txt)

$(call needs_python,demo demo-rl,numpy tokenizers transformers jinja2 matplotlib)
$(call needs_python,test-all,$(PACKAGES))
$(call needs,build-mutants test-mutants,$(PYTHON) --version,python3,make deps)
$(call needs,format test-all,command -v clang-format,clang-format,make deps)
$(call needs,tidy,command -v clang-tidy,clang-tidy,make deps)
$(call check,fuzzers,$(call needs,test-all,test '$(CLANG)',clang++,make deps))
$(call needs,compare,test -x .venv-compare/bin/pip || python3 -c 'import ensurepip',python3 with its module venv,make deps)
$(call needs,compare,test -z '$(LLMC_SOURCE)' || test -e '$(LLMC_SOURCE)/train_gpt2.c',train_gpt2.c in LLMC_SOURCE=$(LLMC_SOURCE),name a checkout of karpathy/llm.c or unset it)
$(call needs,ptxas test-gpu count,test '$(NVCC)',nvcc,install the CUDA toolkit)
$(call needs,test-gpu,nvidia-smi --list-gpus,a GPU and NVIDIA's driver,make test runs the kernels on the CPU)
ifneq ($(HAVE_COMPILER),)  # else the libraries are looked for first, and then make reads this file again
$(call needs,test-all build-mutants test-mutants test-gpu test-ptx count,test 1 = '$(HAVE_GTEST)',GoogleTest,make deps (or install it; then make probe))
$(call needs,test-all %_emu,test 1 = '$(HAVE_BOOST_CONTEXT)',Boost.Context,make deps (or install it; then make probe))
endif

ifneq ($(filter-out $(ALL_CHECKS),$(CHECKS)),)
$(call refuse,test-all,to know which checks: CHECKS="$(CHECKS)",CHECKS="$(ALL_CHECKS)" or some of them)
endif

# ---- the rules --------------------------------------------------------------------------------------------------------------------

# A trainer is one file, compiled twice: by g++ for main and the CPU, and by nvcc for CUDA; where there is no nvcc only the first.
FOR_CPU  := $(if $(HAVE_NVCC), for the CPU alone: no GPU is here that nvcc knows; GPU_ARCHS=90 compiles for 9.0, for the CPU alone)
OF_CPU   := $(if $(CUDA),$(BUILD)/with_cuda/%.o $(GPU)/%.o $(GPU_HALF),$(BUILD)/%.o)
$(PROGRAMS): $(PLACE)%: $(OF_CPU) $(LIBRARY)
	@echo 'link    $@$(if $(CUDA),,$(FOR_CPU))'
	@rm -f $@.plain  # of older sources
	@$(CXX) $(CXXFLAGS) $^ $(LDLIBS) $(if $(CUDA),$(CUDA_LIBS) $(NCCL_LIBS)) -o $@

# The same with the emulator in place of the GPU.
$(TRAINERS:%=%_emu): %_emu: $(BUILD)/with_cuda/%.o $(BUILD)/emulated/%.o $(EMULATED_HALF) $(EMULATOR) $(LIBRARY)
	@echo 'link    $@'
	@$(CXX) $(CXXFLAGS) $^ $(LDLIBS) -lboost_context -o $@

$(BUILD)/test/test_llmc: $(TESTS) $(LIBRARY)
	@echo 'link    $@'
	@$(CXX) $(CXXFLAGS) $^ $(LDLIBS) -lgtest_main -lgtest -lpthread -o $@

$(PROCESSES): $(BUILD)/%: $(BUILD)/%.o $(CPU_MODELS) $(LIBRARY)
	@echo 'link    $@'
	@$(CXX) $(CXXFLAGS) $^ $(LDLIBS) -lgtest -lpthread -o $@

# Kernels on the CPU: dev/emulator/simt.h. In the race build only the kernels' files call the race detector, at every load and store.
EMULATE  := -DLLMC_EMULATE -include $(TREE)dev/emulator/simt.h -Wno-unknown-pragmas -g1 -fno-optimize-sibling-calls  # so that messages name lines
RACE     := $(EMULATOR) $(EMULATED_COMM) $(CUDA_TESTS:%.cpp=build/race/%.o)

$(BUILD)/test/test_cuda: $(EMULATED) $(CPU_MODELS) $(LIBRARY)
	@echo 'link    $@'
	@mkdir -p $(@D)
	@$(CXX) $(CXXFLAGS) $^ $(LDLIBS) -lboost_context -lgtest_main -lgtest -lpthread -o $@

build/race/test/test_cuda: $(RACE) $(CPU_MODELS) $(LIBRARY)
	@echo 'link    $@'
	@mkdir -p $(@D)
	@$(CXX) $(CXXFLAGS) $^ $(LDLIBS) -lboost_context -lgtest_main -lgtest -lpthread -o $@

WORKSHOP := $(EMULATOR) $(BUILD)/dev/emulator/ptx/ladder.o $(patsubst %,$(BUILD)/dev/cuda/%.o,common $(LADDERS))
$(EMULATED) $(EMULATED_HALF) $(TRAINERS:%=$(BUILD)/emulated/%.o) $(WORKSHOP): private EMULATE_FLAGS := $(EMULATE)
$(TRAINERS:%=$(BUILD)/with_cuda/%.o): private EMULATE_FLAGS := -DLLMC_CUDA

define compile_for_races
build/race/%.o: %$(1) $(BUILD)/flags
	@mkdir -p $$(@D)
	@echo 'compile $$< for races'
	@$$(CXX) $$(CXXFLAGS) $$(EMULATE) -O2 -fsanitize=thread -MMD -MP -x c++ -c $$< -o $$@
endef
$(foreach type,.cpp .cu,$(eval $(call compile_for_races,$(type))))

# For GPUs. What ptxas says of the kernels is kept beside each object.
GPU_TESTS   := $(CUDA_TESTS:%.cpp=$(GPU)/%.o)
GPU_OBJECTS := $(TRAINERS:%=$(GPU)/%.o) $(GPU_HALF) $(GPU_TESTS) $(patsubst %,$(GPU)/dev/cuda/%.o,timing $(LADDERS))
GPU_LOGS    := $(if $(NVCC),$(TRAINERS:%=$(GPU)/%.ptxas) $(call part,$(GPU_TESTS:.o=.ptxas)))  # of what ships; the workshop's first versions may be worse

define compile_for_gpu
$(GPU)/%.o: %$(1) $(GPU)/flags
	@mkdir -p $$(@D)
	@echo 'compile $$< for sm $(ARCHS)'
	@$$(NVCC) $$(NVCCFLAGS) -Xptxas -v -MMD -MP -x cu -c $$< -o $$@ 2> $$(@:.o=.ptxas) || { cat $$(@:.o=.ptxas); exit 1; }
endef
$(foreach type,.cpp .cu,$(eval $(call compile_for_gpu,$(type))))

# The library stands first: nvcc's host compiler makes functions of the CPU for any CPU, with other layouts of tiles, and of two that have one
# name the linker keeps the first.
$(GPU)/test/test_cuda: $(LIBRARY) $(CPU_MODELS) $(GPU_TESTS) $(GPU_COMM)
	@echo 'link    $@'
	@$(CXX) $(CXXFLAGS) $^ $(LDLIBS) $(CUDA_LIBS) $(NCCL_LIBS) -lgtest_main -lgtest -lpthread -o $@

# The kernels' tests as nvcc compiles them, with their PTX, which dev/emulator/ptx interprets on the CPU in place of libcudart and cuBLASLt.
# -O1 is for the host's half and saves time; the PTX is the same with -O3.
PTX_INTERPRETER := $(patsubst %.cpp,$(BUILD)/%.o,$(filter-out %/runtime.cpp %/cublaslt.cpp %/report.cpp %/ladder.cpp,$(wildcard dev/emulator/ptx/*.cpp)))
PTX_RUNTIME     := $(patsubst %,$(BUILD)/dev/emulator/ptx/%.o,runtime cublaslt report)
PTX_TESTS       := $(patsubst %.cpp,$(BUILD)/ptx/%.o,$(CUDA_TESTS) $(wildcard test/ptx/kernels/*.cpp)) $(BUILD)/ptx/llmc/parallel/comm_nccl.o
PTX_TEXTS       := $(TRAINERS:%=$(BUILD)/ptx/%.ptx)
PTX_NVCCFLAGS   := -std=c++20 -O1 -diag-suppress 1675 -Xcompiler -fopenmp $(CARRIED:%=-isystem %/include)
# The slow suites are left out for their time: they launch the same kernels. What interprets launches at once cannot record them.
NO_PTX          := no nvcc: the tests of the kernels as PTX are left out
PTX_TESTS_RUN   := -*Slow*:CudaGraphs*
PTX_TESTS_FAST  := $(PTX_TESTS_RUN):CudaRanks*:CudaPairs*
# Of the ladders ptxas says what registers the kernels take; nothing runs its machine code.
PTX_CODE        := compute_90
PTX_LADDERS     := $(LADDERS:%=$(BUILD)/ptx/dev/cuda/%)
$(PTX_LADDERS:=.o): private PTX_CODE := [compute_90,sm_90]
$(PTX_RUNTIME): private EMULATE_FLAGS := -I$(dir $(NVCC))../include

$(BUILD)/test/test_ptx: $(patsubst %.cpp,$(BUILD)/%.o,$(wildcard test/ptx/*.cpp)) $(PTX_INTERPRETER)
	@echo 'link    $@'
	@$(CXX) $(CXXFLAGS) $^ $(LDLIBS) -lgtest_main -lgtest -lpthread -o $@

$(BUILD)/ptx/test_cuda: $(LIBRARY) $(CPU_MODELS) $(PTX_TESTS) $(PTX_RUNTIME) $(PTX_INTERPRETER) | $(PTX_TEXTS)
	@echo 'link    $@'
	@$(CXX) $(CXXFLAGS) $^ $(LDLIBS) -lgtest_main -lgtest -lpthread -o $@

define compile_for_ptx
$(BUILD)/ptx/%.o: %$(1) $(BUILD)/flags
	@mkdir -p $$(@D)
	@echo 'compile $$< with its PTX'
	@$$(NVCC) $$(PTX_NVCCFLAGS) -gencode 'arch=compute_90,code=$$(PTX_CODE)' -Xptxas -v --no-compress -MMD -MP -x cu -c $$< -o $$@ \
	    2> $$(@:.o=.ptxas) || { cat $$(@:.o=.ptxas); exit 1; }
endef
$(foreach type,.cpp .cu,$(eval $(call compile_for_ptx,$(type))))

# The workshop, too: a program that checks its versions in the interpreter, and counts what they do.
$(PTX_LADDERS): $(BUILD)/ptx/dev/cuda/%: $(BUILD)/ptx/dev/cuda/%.o $(BUILD)/dev/cuda/common.o $(BUILD)/dev/emulator/ptx/ladder.o $(PTX_RUNTIME) $(PTX_INTERPRETER) $(LIBRARY)
	@echo 'link    $@'
	@$(CXX) $(CXXFLAGS) $^ $(LDLIBS) -lgtest -lpthread -o $@

$(BUILD)/ptx/%.ptx: %.cu $(BUILD)/flags
	@mkdir -p $(@D)
	@echo 'compile $< to PTX'
	@$(NVCC) $(PTX_NVCCFLAGS) -arch=sm_90 -MMD -MP -x cu -ptx $< -o $@

# The workshop (dev/cuda/common.h): a program holds its ladder for the emulator and, where there is nvcc, for a GPU.
$(LADDERS:%=$(BUILD)/dev/cuda/%): $(BUILD)/dev/cuda/%: $(BUILD)/dev/cuda/%.o $(BUILD)/dev/cuda/common.o $(EMULATOR) $(if $(CUDA),$(GPU)/dev/cuda/%.o $(GPU)/dev/cuda/timing.o) $(LIBRARY)
	@echo 'link    $@'
	@$(CXX) $(CXXFLAGS) $^ $(LDLIBS) $(if $(CUDA),-lcublas $(CUDA_LIBS)) -lboost_context -lgtest -lpthread -o $@

$(LADDERS:%=build/race/dev/cuda/%): build/race/dev/cuda/%: build/race/dev/cuda/%.o build/dev/cuda/common.o $(EMULATOR) $(LIBRARY)
	@echo 'link    $@'
	@$(CXX) $(CXXFLAGS) $^ $(LDLIBS) -lboost_context -lgtest -lpthread -o $@

$(BENCHES): $(BUILD)/%: $(BUILD)/%.o $(LIBRARY)
	@echo 'link    $@'
	@$(CXX) $(CXXFLAGS) $^ $(LDLIBS) -o $@

# The library is one unit of compilation for each folder of llmc, which includes all its .cpp files.
$(LIBRARY:.o=.cpp): $(BUILD)/llmc/%.cpp: FORCE
	@mkdir -p $(@D)
	@printf '#include "%s"\n' $(sort $(wildcard $(TREE)llmc/$*/*.cpp)) | cmp -s - $@ || printf '#include "%s"\n' $(sort $(wildcard $(TREE)llmc/$*/*.cpp)) > $@

$(LIBRARY): $(BUILD)/llmc/%.o: $(BUILD)/llmc/%.cpp $(BUILD)/flags
	@echo 'compile $(TREE)llmc/$*/*.cpp'
	@$(CXX) $(CXXFLAGS) -iquote . -MMD -MP -c $< -o $@

define compile_cpu
$(BUILD)/$(1)%.o: $(TREE)%$(2) $(BUILD)/flags
	@mkdir -p $$(@D)
	@echo 'compile $$<$(if $(1), ($(patsubst %/,%,$(1))))'
	@$$(CXX) $$(CXXFLAGS) $$(EMULATE_FLAGS) -MMD -MP -x c++ -c $$< -o $$@
endef
$(foreach type,.cpp .cu,$(foreach variant,./ with_cuda/ emulated/,$(eval $(call compile_cpu,$(variant:./=),$(type)))))

# The parsers of a user's files, for libFuzzer, which comes with clang; single-threaded, so without OpenMP.
FUZZ_FLAGS := -std=c++20 -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined -Wno-unknown-pragmas \
              -Wno-unknown-warning-option -idirafter $(shell $(CXX) -print-file-name=include)
PARSERS    := $(patsubst %.cpp,build/fuzz/%.o,$(wildcard llmc/core/*.cpp llmc/io/*.cpp llmc/data/*.cpp) llmc/parallel/comm.cpp $(addprefix llmc/model/,config.cpp presets.cpp) $(addprefix llmc/train/,checkpoint.cpp trainer_state.cpp))
$(FUZZERS): build/fuzz/%: build/fuzz/test/fuzz/%.o $(PARSERS)
	@echo 'link    $@'
	@$(CLANG) $(FUZZ_FLAGS) -fsanitize=fuzzer $^ -o $@

build/fuzz/%.o: %.cpp Makefile
	@mkdir -p $(@D)
	@echo 'compile $< for the fuzzers'
	@$(CLANG) $(FUZZ_FLAGS) -fsanitize=fuzzer-no-link -MMD -MP -c $< -o $@

# What is not there fails before what needs it is compiled.
ifneq ($(HAVE_GTEST),1)
$(TESTS) $(PROCESSES:=.o) $(CUDA_TESTS:%.cpp=$(BUILD)/emulated/%.o) $(CUDA_TESTS:%.cpp=$(GPU)/%.o) $(PTX_TESTS): missing-GoogleTest
endif
ifneq ($(HAVE_BOOST_CONTEXT),1)
$(WORKSHOP) $(EMULATED) $(RACE): missing-Boost.Context
endif
missing-%:
	@echo '$* is needed, and was not found'; echo '  fix: make deps (or install it; then make probe)'; exit 1

# They change when the compiler or a flag does, and everything is compiled again.
$(BUILD)/flags: private FLAGS = $(COMPILER) $(CXXFLAGS)
$(GPU)/flags: private FLAGS = $(NVCC) $(NVCCFLAGS)
$(BUILD)/flags $(GPU)/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(FLAGS)' | cmp -s - $@ || { echo 'flags   $@'; echo '$(FLAGS)' > $@; }

ifeq ($(SAN),1)
$(TRAINERS): %: $(BUILD)/%
.PHONY: $(TRAINERS)
endif

-include $(PTX_LADDERS:=.d) $(LIBRARY:.o=.d) $(TESTS:.o=.d) $(PROCESSES:=.d) $(EMULATED:.o=.d) $(RACE:.o=.d) $(GPU_OBJECTS:.o=.d) $(WORKSHOP:.o=.d) $(LADDERS:%=build/race/dev/cuda/%.d) $(BENCHES:=.d) $(PTX_TESTS:.o=.d) $(PTX_TEXTS:.ptx=.d) $(PTX_INTERPRETER:.o=.d) $(PTX_RUNTIME:.o=.d) $(PARSERS:.o=.d) $(FUZZERS:build/fuzz/%=build/fuzz/test/fuzz/%.d)
-include $(foreach dir,$(BUILD) $(BUILD)/with_cuda $(BUILD)/emulated,$(TRAINERS:%=$(dir)/%.d)) $(EMULATED_HALF:.o=.d)

all: $(PROGRAMS)

plain: all                                   ## also NAME.plain for every CPU with AVX2, which NAME runs on a CPU that lacks something
	@$(MAKE) --no-print-directory CPU=x86-64-v3 BUILD=build/plain PLACE=build/plain/ all
	@for t in $(TRAINERS); do cp build/plain/$$t $$t.plain || exit 1; done

# ---- what to make -----------------------------------------------------------------------------------------------------------------

deps:                                        ## install what is missing (Debian packages, .venv); fill build/deps
	@bash scripts/install_deps.sh
	@rm -f build/probe.mk

demo: train_llama                             ## the bundled demo: SFT, a reward model, DPO; a table, and curves
	@$(PYTHON) scripts/demo.py
	@$(PYTHON) scripts/plot.py out/demo/log.jsonl --out out/demo/loss.png

demo-rl: train_llama                          ## GRPO from the demo's SFT model: what its answers earn; a table, and curves
	@$(PYTHON) scripts/demo.py --rl
	@$(PYTHON) scripts/plot.py out/demo/grpo/log.jsonl --out out/demo/grpo/reward.png

ifeq ($(HAVE_GTEST),1)
TEST_LLMC      := $(BUILD)/test/test_llmc
TEST_PROCESSES := $(PROCESSES)
TEST_PTX       := $(BUILD)/test/test_ptx $(if $(HAVE_NVCC),$(BUILD)/ptx/test_cuda)
TEST_PTX_LADDERS := $(if $(HAVE_NVCC),$(PTX_LADDERS))
endif
ifeq ($(HAVE_GTEST)$(HAVE_BOOST_CONTEXT),11)
TEST_CUDA     := $(BUILD)/test/test_cuda
TEST_BUILDS   := build $(call check,races,build/race) $(call check,sanitizers,build/san)
TEST_CUDA_ALL := $(TEST_BUILDS:%=%/test/test_cuda)
TEST_LADDERS  := $(foreach build,$(TEST_BUILDS),$(patsubst %,$(build)/dev/cuda/%,$(call part,$(LADDERS))))
endif
TEST_MUTANTS  := $(patsubst %,build/mutants/test/%,test_llmc $(notdir $(TEST_CUDA)))
TEST_PTXAS    := $(call check,ptxas,$(GPU_LOGS))
TEST_FUZZERS  := $(call check,fuzzers,$(call part,$(FUZZERS) $(wildcard test/fuzz/*.py)))

ifneq ($(filter test test-all,$(MAKECMDGOALS)),)
LACKING     := $(call lacking,$(PACKAGES))
TEST_PYTHON := $(if $(LACKING),,test/python)
$(if $(HAVE_COMPILER),$(if $(TEST_LLMC)$(TEST_PYTHON),,$(call refuse,test,GoogleTest or Python's packages,make deps)))
endif
MISSING  = $(if $(TEST_LLMC),,C++ tests (no GoogleTest: make deps);) \
           $(if $(TEST_CUDA),,CUDA kernels on the CPU (no $(if $(TEST_LLMC),Boost.Context,GoogleTest): make deps);) \
           $(if $(LACKING),Python tests ($(PYTHON) has no $(LACKING): make deps);) \
           $(if $(filter 1,$(HAVE_MPI)),,ranks over MPI (no MPI: make deps);) \
           $(if $(HAVE_NVCC),,kernels as nvcc compiles them (no nvcc: the CUDA toolkit);) \
           $(if $(filter test-all,$(MAKECMDGOALS)),$(foreach check,$(filter-out $(CHECKS),$(ALL_CHECKS)),$(check) (not in CHECKS);))
LEFT_OUT = $(patsubst .,,$(subst ;.,,$(strip $(MISSING)).))
RUN_TESTS = $(PYTHON) scripts/run_tests.py --build $(BUILD) --left_out "$(LEFT_OUT)" --cpp $(TEST_LLMC) --python $(TEST_PYTHON)

left-out:
	@$(if $(LEFT_OUT),echo 'left out: $(LEFT_OUT)')

test: left-out $(PROGRAMS) $(TEST_LLMC) $(TEST_CUDA) $(TEST_PTX) $(TEST_PROCESSES)  ## all tests but the slow ones; the last line counts them
	@$(RUN_TESTS) --cuda $(TEST_CUDA) --ptx $(TEST_PTX) --ptx_tests='$(PTX_TESTS_FAST)'

test-all: left-out $(PROGRAMS) $(if $(TEST_CUDA),$(TRAINERS:%=%_emu)) $(TEST_LLMC) $(TEST_PROCESSES) $(TEST_PTX) $(TEST_PTX_LADDERS) $(filter-out build/san/%,$(TEST_CUDA_ALL) $(TEST_LADDERS)) $(TEST_PTXAS:.ptxas=.o) $(TEST_FUZZERS)
test-all:                                    ## slow tests, dev/cuda, mutants, sanitizers, fuzzers and the format, too
	@$(call check,mutants,$(MAKE) --no-print-directory build-mutants)
	@$(if $(filter build/san/%,$(TEST_CUDA_ALL)),$(MAKE) --no-print-directory SAN=1 $(filter build/san/%,$(TEST_CUDA_ALL) $(TEST_LADDERS)))
	@$(RUN_TESTS) --all --part $(PART) --mutants $(call check,mutants,$(TEST_MUTANTS)) --cuda $(TEST_CUDA_ALL) --ladders $(TEST_LADDERS) --ptxas $(TEST_PTXAS) --fuzzers $(TEST_FUZZERS) --ptx $(TEST_PTX) --ptx_ladders $(TEST_PTX_LADDERS) --nvcc '$(NVCC)' --ptx_tests='$(if $(filter 1/1,$(PART)),$(PTX_TESTS_RUN),$(PTX_TESTS_FAST))'

build-mutants:
	@$(PYTHON) scripts/mutants.py --make build/mutants/tree
	@$(MAKE) --no-print-directory MUTANTS=1 $(TEST_MUTANTS)

test-mutants: build-mutants                   ## build known bugs in and require that a test fails
	@$(PYTHON) scripts/mutants.py

test-gpu: $(GPU)/test/test_cuda               ## the kernels' tests on this machine's GPU, of GPU_ARCHS=90, say
	./$<

count: $(PTX_LADDERS)                         ## what the shipped kernels do, counted on the CPU: docs/gpu_counts.md
	@$(PYTHON) scripts/gpu_counts.py --nvcc $(NVCC) $(PTX_LADDERS)

test-ptx: $(TEST_PTX) $(TEST_PTX_LADDERS)                       ## nvcc's PTX of the kernels, interpreted on the CPU: dev/cuda/README.md
	@$(BUILD)/test/test_ptx --gtest_brief=1
	@$(if $(HAVE_NVCC),OMP_WAIT_POLICY=passive $(BUILD)/ptx/test_cuda --gtest_brief=1 --gtest_filter='$(PTX_TESTS_RUN)',echo '$(NO_PTX)')
	@for l in $(TEST_PTX_LADDERS); do ./$$l || exit 1; done
	@$(if $(TEST_PTX_LADDERS),$(PYTHON) scripts/gpu_counts.py --nvcc $(NVCC) --check $(PTX_LADDERS))

ptxas: $(GPU_OBJECTS) $(TEST_CUDA)           ## compile the kernels for GPU_ARCHS, or 80 90 100: registers, none spilled
	@$(if $(TEST_CUDA),$(TEST_CUDA) --gtest_filter='AttentionShapes*' --gtest_brief=1)
	@$(PYTHON) scripts/ptxas.py $(GPU_LOGS)

bench: $(BENCHES)                            ## speed of the ops on this CPU
	@for b in $(BENCHES); do GLIBC_TUNABLES=glibc.malloc.hugetlb=1 ./$$b || exit 1; done  # huge pages, as the program asks for

compare: $(PROGRAMS) $(BUILD)/dev/bench/few_tokens .venv-compare/installed.sh out/smollm2/model/tokenizer.json  ## the same training steps, and generation, here and in Hugging Face transformers and TRL
	@for model in smollm2-135m qwen2.5-0.5b gpt2 gpt2-short; do \
	    .venv-compare/bin/python scripts/compare.py --model $$model --out docs/benchmarks.md || exit 1; done
	@.venv-compare/bin/python scripts/compare_trl.py out/smollm2 --out docs/benchmarks.md
	@.venv-compare/bin/python scripts/compare_generate.py --out docs/benchmarks.md
	@.venv-compare/bin/python scripts/compare_grpo.py --out docs/benchmarks.md

out/smollm2/model/tokenizer.json: | .venv-compare/installed.sh  # the last file that it writes
	@.venv-compare/bin/python scripts/smollm2.py out/smollm2

.venv-compare/installed.sh: scripts/install_compare.sh
	@bash $<

SOURCES := $(wildcard *.cu llmc/*/*.h llmc/*/*.cpp llmc/*/*.cuh llmc/*/*.cu test/*.h test/*.cpp test/ops/* test/cuda/* test/processes/* test/fuzz/*.h test/fuzz/*.cpp dev/*/*.h dev/*/*.cpp dev/*/*.cu dev/emulator/ptx/* test/ptx/*.cpp test/ptx/kernels/*)
format:                                      ## check the layout of the C++ files; FIX=1 mends it
	@clang-format $(if $(FIX),-i,--dry-run -Werror --ferror-limit=1) $(SOURCES) || { echo 'fix: make format FIX=1'; exit 1; }

tidy:                                        ## clang-tidy
	@clang-tidy --quiet $(wildcard *.cu llmc/*/*.cpp) -- -x c++ -std=c++20 -Wno-unknown-pragmas -idirafter $(shell $(CXX) -print-file-name=include)

help:                                        ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' Makefile | sort | awk -F '\t' '{ printf "  make %-14s %s\n", $$1, $$2 }'
	@echo '  make               the programs, train_gpt2 and train_llama; make train_llama: that one'

clean:                                       ## remove what was built, but for build/deps
	rm -rf $(foreach t,$(TRAINERS),$(t) $(t)_emu $(t).plain) $(filter-out build/deps,$(wildcard build/*))
