# make help          lists the targets
#
# Needs g++ 12 or newer, or clang 16 or newer, and the headers of CLI11, nlohmann/json and xxHash. Optional libraries are detected by compiling and
# linking a few lines (scripts/probe.sh); the result is kept in build/probe.mk until this file, the script or the compiler changes, or `make probe`.
#   ONEDNN=0, OPENBLAS=0, MPI=0, NCCL=0    build without this library, even if it is installed
#   CXX=clang++-16                 another compiler; scripts/compilers.sh tests all installed ones
#   CPU=znver4                     code for that CPU (a name of the compiler's -march) instead of this one; for every CPU: make plain
#   GPU_ARCHS="80 90"              kernels for compute capabilities 8.0 and 9.0 instead of the GPUs of this machine
#   STRICT=0                       nvcc's warnings are not errors: for untested versions of nvcc and g++
# The builds for checks (sanitizers, races, mutants, fuzzers, PTX) are in checks.mk.

CPU      := native
CXX      := g++
PYTHON   := $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)
TRAINERS := train_gpt2 train_llama
BUILD    := build
PLACE    :=#  where the programs go
TREE     :=#  where the sources are
PROBE    := build/probe.mk

# Other compilers have other names for these flags. A cross compiler has no native CPU, and compiles for its whole architecture.
known     = $(foreach flag,$1,$(if $(shell $(CXX) -Werror $(flag) -x c++ -E /dev/null > /dev/null 2>&1 && echo yes),$(flag)))
CPU_FLAG := $(or $(call known,-march=$(CPU)),$(call known,-mcpu=$(CPU)),$(patsubst %,-march=%,$(filter-out native,$(CPU))))
CXXFLAGS := -std=c++20 -O3 $(CPU_FLAG) $(call known,-mprefer-vector-width=512) -fno-math-errno -fno-trapping-math -fopenmp -Wall -Wextra \
            $(patsubst -W%,-Wno-%,$(call known,-Wpass-failed -Wsubobject-linkage)) \
            $(call known,--param=ggc-min-heapsize=2000000)  # kB: without garbage collection g++ compiles a tenth faster

# Two variants of every C++ program, each in a separate folder:
ifeq ($(SAN),1)  # with the address and undefined-behaviour sanitizers
BUILD    := build/san
PLACE    := $(BUILD)/
CXXFLAGS += -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
else ifeq ($(MUTANTS),1)  # with switchable known bugs, and functions for the matrix unit's instructions (llmc/ops/amx.h); set by test-mutants
BUILD    := build/mutants
TREE     := build/mutants/tree/
CXXFLAGS += -O1 $(call known,-march=x86-64-v3) -include test/mutant.h -DLLMC_AMX_IN_SOFTWARE -Wno-psabi
endif

MAKEFLAGS += -j$(shell nproc 2> /dev/null || sysctl -n hw.ncpu)
.DEFAULT_GOAL := all
.PHONY: all plain probe deps demo demo-rl test bench compare format tidy help clean FORCE
.DELETE_ON_ERROR:

# ---- this machine ----------------------------------------------------------------------------------------------------------------

COMPILER := $(CXX): $(shell $(CXX) --version 2>/dev/null | head -n 1)
RUN_PROBE = COMPILER="$(COMPILER)" NVCC="$(NVCC)" CXX="$(CXX)" CXXFLAGS="$(PROBE_FLAGS)" bash scripts/probe.sh $(PROBE)
PROBE_FLAGS := $(CXXFLAGS)
ifneq ($(filter-out deps format probe help clean,$(or $(MAKECMDGOALS),all)),)
include $(PROBE)
endif
$(PROBE): Makefile scripts/probe.sh $(if $(filter-out $(COMPILER),$(PROBED_COMPILER)),FORCE)
	@$(RUN_PROBE)

probe:                                       ## look again for libraries
	@$(RUN_PROBE)

CXXFLAGS += $(CARRIED:%=-isystem %/include)
LDLIBS   += $(CARRIED:%=-L%/lib)
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

NVCC        := $(firstword $(wildcard /usr/local/cuda/bin/nvcc) $(shell command -v nvcc 2> /dev/null))
HAVE_NVCC   := $(and $(filter build build/plain,$(BUILD)),$(filter 1,$(HAVE_CUDA)),$(NVCC))
KNOWN_ARCHS := $(patsubst compute_%,%,$(if $(NVCC),$(shell $(NVCC) --list-gpu-arch 2> /dev/null)))
ifeq ($(origin GPU_ARCHS),undefined)
GPU_ARCHS   := $(sort $(filter $(KNOWN_ARCHS),$(subst .,,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null))))
endif
CUDA        := $(and $(HAVE_NVCC),$(GPU_ARCHS))
ARCHS       := $(or $(GPU_ARCHS),$(filter 80 90 100,$(KNOWN_ARCHS)))
NVCCFLAGS   := -std=c++20 -O3 -diag-suppress 1675 -Xcompiler -fopenmp,-Wall,-Wextra,-Wno-unused-parameter,-Wno-unknown-pragmas \
               $(if $(filter 0,$(STRICT)),,-Werror all-warnings -Xcompiler -Werror) \
               -DLLMC_GPU_ARCHS='"$(ARCHS)"' $(CARRIED:%=-isystem %/include)
GENCODE      = $(foreach arch,$(ARCHS),-gencode arch=compute_$(arch),code=sm_$(arch)) \
               $(foreach arch,$(lastword $(ARCHS)),-gencode arch=compute_$(arch),code=compute_$(arch))
GPU         := build/gpu$(subst $(eval) ,,$(ARCHS:%=_%))
CUDA_LIB    := $(firstword $(realpath $(dir $(NVCC))../lib64 $(dir $(NVCC))../lib))
CUDA_LIBS   := -L$(CUDA_LIB) -Wl,-rpath,$(CUDA_LIB) -lcudart_static -lcublasLt -ldl -lrt -lpthread
ifeq ($(HAVE_NCCL)$(filter 0,$(NCCL)),1)
NVCCFLAGS   += -DLLMC_NCCL $(NCCL_HEADERS)
NCCL_LIBS   := $(NCCL_LIBRARIES)
endif

# $(call needs,TARGETS,shell command that succeeds if the dependency is installed,its name,how to install it): stops make before it builds anything
define NEWLINE


endef
needs = $(if $(filter $1,$(MAKECMDGOALS)),$(if $(shell $2 > /dev/null 2>&1 && echo yes),,$(error make $(filter $1,$(MAKECMDGOALS)) needs $3$(NEWLINE)  fix: $4)))
ifneq ($(HAVE_COMPILER),)  # otherwise the probe runs first, and then make reads this file again
$(call needs,test test-% build-mutants count %/test_llmc %/test_cuda %/test_ptx,test 1 = '$(HAVE_GTEST)',GoogleTest,make deps (or install it; then make probe))
$(call needs,try test test-all test-mutants %_emu %/test_cuda $(BUILD)/dev/cuda/%,test 1 = '$(HAVE_BOOST_CONTEXT)',Boost.Context,make deps (or install it; then make probe))
endif
$(call needs,format test-all,command -v clang-format,clang-format,make deps)
$(call needs,tidy,command -v clang-tidy,clang-tidy,make deps)

# ---- compile and link -------------------------------------------------------------------------------------------------------------

# A unit of compilation is a generated file that includes several files: the .cpp files of a folder of llmc, or the tests of a folder with the same
# first letters. The compiler reads shared headers once per unit: with a unit for each test, make test would compile for 115 s of CPU more (a Xeon).
# The slowest units of the library start first, so that no core is left waiting at the end.
FOLDERS    := $(patsubst %,llmc/%,train app model data $(filter-out train app model data,$(patsubst llmc/%/,%,$(wildcard llmc/*/))))
LIBRARY    := $(patsubst %,$(BUILD)/%.o,llmc/model/decoder rehearsals/llmc/model/decoder $(FOLDERS) commit)
OPS_UNITS  := $(addprefix test/ops/,a-c d-g h-n o-z)
CUDA_UNITS := $(addprefix test/cuda/,a-k l-q r-z) $(OPS_UNITS)
TEST_UNITS := $(OPS_UNITS) $(addprefix test/,a-d e-h i-o p-r s-y z)
UNITS      := $(FOLDERS) $(sort $(TEST_UNITS) $(CUDA_UNITS))
files_of    = $(TREE)$(if $(filter test/%,$1),$(dir $1)test_[$(notdir $1)]*.cpp,$1/*.cpp)
$(UNITS:%=$(BUILD)/%.cpp): $(BUILD)/%.cpp: FORCE
	@mkdir -p $(@D)
	@printf '#include "%s"\n' $(sort $(wildcard $(call files_of,$*))) > $@.new; cmp -s $@.new $@ || cp $@.new $@; rm $@.new

# For --version. A tree without its own .git, as in a package, has no commit.
$(BUILD)/commit.cpp: FORCE
	@mkdir -p $(@D)
	@printf 'extern const char *const commit = "%s";\n' "$$(git --git-dir=.git describe --always --dirty 2> /dev/null)" > $@.new
	@cmp -s $@.new $@ || cp $@.new $@; rm $@.new

# These folders compute little, and compile in less time with -Og.
$(foreach folder,app data model train,$(BUILD)/llmc/$(folder).o): private FLAGS_OF_FILE := -Og
# The check of the CPU (llmc/core/cpu.cpp) is code for any CPU, into which the inline functions of a fortified libc, Ubuntu's default, do not fit.
$(BUILD)/llmc/core.o: private FLAGS_OF_FILE := -U_FORTIFY_SOURCE

# Every other file is a unit. g++ compiles a file with kernels for the CPU or, with -DLLMC_CUDA, as the CPU's half of a program for GPUs; and for
# the emulator (dev/emulator/simt.h), which runs the kernels on the CPU. $(call compile_cpu,FOLDER/,SOURCE,FLAGS)
EMULATE := $(if $(filter -O1,$(CXXFLAGS)),,-O2) -DLLMC_EMULATE -include $(TREE)dev/emulator/simt.h -Wno-unknown-pragmas
EMULATE += -g1 -fno-optimize-sibling-calls  # so that messages name lines
define compile_cpu
$(BUILD)/$(1)%.o: $(2) $(BUILD)/flags
	@mkdir -p $$(@D)
	@echo 'compile $$(if $$(filter $$*,$$(UNITS)),$$(call files_of,$$*),$$<)$(if $(1), ($(patsubst %/,%,$(1))))'
	@$$(CXX) $$(CXXFLAGS) $(3) $$(FLAGS_OF_FILE) -iquote . -MMD -MP -x c++ -c $$< -o $$@
endef
$(foreach source,$(TREE)%.cpp $(TREE)%.cu $(BUILD)/%.cpp,$(eval $(call compile_cpu,,$(source))) \
    $(eval $(call compile_cpu,rehearsals/,$(source),-DLLMC_REHEARSALS -Og)) \
    $(eval $(call compile_cpu,with_cuda/,$(source),-DLLMC_CUDA)) \
    $(eval $(call compile_cpu,emulated/,$(source),$$(EMULATE))))

# For GPUs: $(call compile_gpu,FOLDER,SOURCE,NOTE,FLAGS). The report of ptxas on the kernels is stored next to each object.
define compile_gpu
$(1)/%.o: $(2) $(if $(filter $(GPU),$(1)),$(GPU),$(BUILD))/flags
	@mkdir -p $$(@D)
	@echo 'compile $$(if $$(filter $$*,$$(UNITS)),$$(call files_of,$$*),$$<) $(3)'
	@$$(NVCC) $(4) -I. -Xptxas -v -MMD -MP -x cu -c $$< -o $$@ 2> $$(@:.o=.ptxas) || { cat $$(@:.o=.ptxas); exit 1; }
endef
$(foreach source,%.cpp %.cu,$(eval $(call compile_gpu,$(GPU),$(source),for sm $$(ARCHS),$$(NVCCFLAGS) $$(GENCODE))))
# The units for sm_90a: attention kernels and ladders of the workshop with instructions that the emulator does not have.
HOPPER_LADDERS := $(patsubst dev/cuda/%.cu,%,$(wildcard dev/cuda/*hopper*.cu))
$(patsubst %,$(GPU)/%.o,llmc/ops/attention_hopper $(HOPPER_LADDERS:%=dev/cuda/%)): private ARCHS := 90a

# These files change with the compiler and the flags; then everything is compiled again.
$(BUILD)/flags: private FLAGS = $(COMPILER) $(CXXFLAGS)
$(GPU)/flags: private FLAGS = $(NVCC) $(NVCCFLAGS) $(GENCODE)
$(BUILD)/flags $(GPU)/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(FLAGS)' | cmp -s - $@ || { echo 'flags   $@'; echo '$(FLAGS)' > $@; }

# $(call link,LIBRARIES,NOTE)
link  = @echo 'link    $@$(2)'; $(CXX) $(CXXFLAGS) $^ $(LDLIBS) $(1) -o $@
GTEST := -lgtest -lpthread

# A trainer and decoder.cu are compiled up to three times: for the CPU, for rehearsals of the memory plan (llmc/core/rehearsal.h), by nvcc for CUDA.
PROGRAMS := $(TRAINERS:%=$(PLACE)%)
FOR_CPU  := $(if $(HAVE_NVCC), for the CPU alone: no GPU is here that nvcc knows; GPU_ARCHS=90 compiles for 9.0, for the CPU alone)
HOPPER   := $(if $(filter 90,$(ARCHS)),$(GPU)/llmc/ops/attention_hopper.o)
GPU_HALF := $(patsubst %,$(GPU)/llmc/%.o,model/decoder core/gpu_query parallel/comm_nccl) $(HOPPER)
$(PROGRAMS): $(PLACE)%: $(firstword $(LIBRARY)) $(if $(CUDA),$(BUILD)/with_cuda/%.o $(GPU)/%.o $(GPU_HALF),$(BUILD)/%.o) $(BUILD)/rehearsals/%.o $(LIBRARY)
	@rm -f $@.plain  # from older sources
	$(call link,$(if $(CUDA),$(CUDA_LIBS) $(NCCL_LIBS)),$(if $(CUDA),,$(FOR_CPU)))

# The same with the emulator instead of the GPU.
EMULATOR      := $(patsubst %,$(BUILD)/dev/emulator/%.o,simt races messages streams nccl counts)
EMULATED_COMM := $(BUILD)/emulated/llmc/parallel/comm_nccl.o
EMULATED_HALF := $(patsubst %,$(BUILD)/emulated/llmc/%.o,model/decoder core/gpu_query) $(EMULATED_COMM)
$(EMULATOR): private FLAGS_OF_FILE := $(EMULATE)
$(TRAINERS:%=%_emu): %_emu: $(BUILD)/with_cuda/%.o $(BUILD)/rehearsals/%.o $(BUILD)/emulated/%.o $(EMULATED_HALF) $(EMULATOR) $(LIBRARY)
	$(call link,-lboost_context)

# Tests of the CPU's half, of the kernels in the emulator, and of ranks as processes.
TESTS      := $(TEST_UNITS:%=$(BUILD)/%.o)
CPU_MODELS := $(BUILD)/test/models.o $(TRAINERS:%=$(BUILD)/rehearsals/%.o)
CUDA_TESTS := $(wildcard test/cuda/*.cpp test/ops/*.cpp)
EMULATED   := $(EMULATOR) $(EMULATED_COMM) $(patsubst %,$(BUILD)/emulated/%.o,llmc/model/decoder test/cuda/models $(CUDA_UNITS))
PROCESSES  := $(patsubst %.cpp,$(BUILD)/%,$(wildcard test/processes/*.cpp))
# Tests without kernels of their own compile in less time with -Og; test_zero updates parameters itself, with the library's bits. The models, the
# library and the tests of ops come first, because the linker keeps the first of two functions with the same name.
$(filter-out $(BUILD)/test/ops/% %/test/z.o,$(TESTS)) $(PROCESSES:=.o): private FLAGS_OF_FILE := -Og
# The largest units for the emulator: -O1 compiles them in two thirds of the time, and their tests take 3 % longer.
$(patsubst %,$(BUILD)/emulated/%.o,llmc/model/decoder test/cuda/models): private FLAGS_OF_FILE := -O1
$(BUILD)/test/test_llmc: $(CPU_MODELS) $(LIBRARY) $(TESTS)
	$(call link,-lgtest_main $(GTEST))

$(BUILD)/test/test_cuda: $(EMULATED) $(CPU_MODELS) $(LIBRARY)
	$(call link,-lboost_context -lgtest_main $(GTEST))

$(PROCESSES): $(BUILD)/%: $(BUILD)/%.o $(CPU_MODELS) $(LIBRARY)
	$(call link,$(GTEST))

# The workshop (dev/cuda/common.h): a program contains its ladder for the emulator and, with nvcc and a GPU, for the GPU.
# It needs no other folders of the library.
WORKSHOP_LIBRARY := $(patsubst %,$(BUILD)/llmc/%.o,core ops parallel)
LADDERS  := $(filter-out $(HOPPER_LADDERS),$(patsubst dev/cuda/%.cu,%,$(filter-out dev/cuda/timing.cu,$(wildcard dev/cuda/*.cu))))
WORKSHOP := $(BUILD)/dev/cuda/common.o $(LADDERS:%=$(BUILD)/dev/cuda/%.o)
$(WORKSHOP): private FLAGS_OF_FILE := $(EMULATE)
$(LADDERS:%=$(BUILD)/dev/cuda/%): $(BUILD)/%: $(BUILD)/%.o $(BUILD)/dev/cuda/common.o $(EMULATOR) $(if $(CUDA),$(GPU)/dev/cuda/timing.o $(HOPPER)) $(WORKSHOP_LIBRARY) $(if $(CUDA),$(GPU)/%.o)
	$(call link,$(if $(CUDA),-lcublas $(CUDA_LIBS)) -lboost_context $(GTEST))
$(call needs,$(HOPPER_LADDERS:%=$(BUILD)/dev/cuda/%),test '$(and $(CUDA),$(filter 90,$(ARCHS)))',GPU_ARCHS=90 and a Hopper GPU,make try L=hopper_copy V=2 runs a version in the PTX interpreter)
ifneq ($(and $(CUDA),$(filter 90,$(ARCHS))),)
$(HOPPER_LADDERS:%=$(BUILD)/dev/cuda/%): $(BUILD)/dev/cuda/%: $(GPU)/dev/cuda/%.o $(BUILD)/dev/cuda/common.o $(GPU)/dev/cuda/timing.o $(WORKSHOP_LIBRARY)
	$(call link,-lcublas $(CUDA_LIBS) $(GTEST))
endif

BENCHES := $(patsubst %.cpp,$(BUILD)/%,$(wildcard dev/bench/*.cpp))
$(BENCHES): %: %.o $(LIBRARY)
	$(call link)

ifeq ($(SAN),1)
$(TRAINERS): %: $(BUILD)/%
.PHONY: $(TRAINERS)
endif

# ---- targets ----------------------------------------------------------------------------------------------------------------------

all: $(PROGRAMS)

plain: all                                   ## also NAME.plain for every CPU with AVX2, which NAME runs on a CPU that lacks something
	@$(MAKE) --no-print-directory CPU=x86-64-v3 BUILD=build/plain PLACE=build/plain/ all
	@for t in $(TRAINERS); do cp build/plain/$$t $$t.plain || exit 1; done

deps:                                        ## install missing packages (Debian packages, .venv); fill build/deps
	@bash scripts/install_deps.sh
	@rm -f build/probe.mk

demo: train_llama                            ## the bundled demo: SFT, a reward model, DPO; a table, and curves
	@$(PYTHON) scripts/demo.py
	@./train_llama plot out/demo/log.jsonl --out out/demo/loss.png

demo-rl: train_llama                         ## GRPO from the demo's SFT model: what its answers earn; a table, and curves
	@$(PYTHON) scripts/demo.py --rl
	@./train_llama plot out/demo/grpo/log.jsonl --out out/demo/grpo/reward.png

RUN_TESTS = $(PYTHON) scripts/run_tests.py --build $(BUILD) --cpp $(BUILD)/test/test_llmc --python test/python $(if $(filter 1,$(HAVE_MPI)),,--no_mpi)
test: $(PROGRAMS) $(BUILD)/test/test_llmc $(BUILD)/test/test_cuda $(PROCESSES)  ## all tests but the slow ones; the last line counts them
	@$(RUN_TESTS) --cuda $(BUILD)/test/test_cuda

bench: $(BENCHES)                            ## speed of the ops on this CPU
	@for b in $(BENCHES); do GLIBC_TUNABLES=glibc.malloc.hugetlb=1 ./$$b || exit 1; done  # huge pages, as in the program

SOURCES := $(wildcard *.cu llmc/*/*.h llmc/*/*.cpp llmc/*/*.cuh llmc/*/*.cu test/*.h test/*.cpp test/ops/* test/cuda/* test/processes/* test/fuzz/*.h test/fuzz/*.cpp dev/*/*.h dev/*/*.cpp dev/*/*.cu dev/emulator/ptx/* test/ptx/*.h test/ptx/*.cpp test/ptx/kernels/* test/ptx/cutlass/*)
format:                                      ## check the layout of the C++ files; FIX=1 mends it
	@clang-format $(if $(FIX),-i,--dry-run -Werror --ferror-limit=1) $(SOURCES) || { echo 'fix: make format FIX=1'; exit 1; }

tidy:                                        ## clang-tidy
	@clang-tidy --quiet $(wildcard *.cu llmc/*/*.cpp) -- -x c++ -std=c++20 -Wno-unknown-pragmas -idirafter $(shell $(CXX) -print-file-name=include)

help:                                        ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' Makefile checks.mk | sort | awk -F '\t' '{ printf "  make %-14s %s\n", $$1, $$2 }'
	@echo '  make               the programs, train_gpt2 and train_llama; make train_llama: that one'

clean:                                       ## remove all built files except build/deps
	rm -rf $(foreach t,$(TRAINERS),$(t) $(t)_emu $(t).plain) $(filter-out build/deps,$(wildcard build/*))

include checks.mk
-include $(wildcard $(addprefix $(BUILD)/,*.d */*.d */*/*.d */*/*/*.d */*/*/*/*.d))
