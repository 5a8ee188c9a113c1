// main() of the workshop's programs: the command line, and the table of versions.
#include "common.h"

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <exception>
#include <iostream>

static std::string about_program(const Description &about) {
    std::string text = format("Versions of %s, from the obvious kernel to the shipped one:\n", about.name);
    for (size_t i = 0; i < about.ideas.size(); i++) text += format("  %zu  %s\n", i + 1, about.ideas[i]);
    if (the_interpreter) return text + "Their PTX is interpreted on the CPU: they are checked, or with --count counted.";
    return text + "On a GPU they are checked and then timed, with --emu checked by the emulator on the CPU.";
}

static std::string join(const std::vector<std::string> &words, const char *between) { return CLI::detail::join(words, between); }

static std::string shape_name(const Sizes &sizes) {
    std::vector<std::string> words;
    for (size_t size : sizes) words.push_back(std::to_string(size));
    return join(words, "x");
}

static std::string shape_letters(const Description &about) {
    std::vector<std::string> words;
    for (const Size &size : about.sizes) words.push_back(size.name);
    return join(words, "x");
}

static Sizes timed_shape(const Description &about) {
    Sizes out;
    for (const Size &size : about.sizes) out.push_back(size.timed);
    return out;
}

static Sizes counted_shape(const Description &about) {
    Sizes out;
    for (const Size &size : about.sizes) out.push_back(size.counted);
    return out;
}

struct Arguments {
    std::vector<size_t> versions;
    std::optional<Sizes> shape;
    bool emulate = false, count = false, csv = false;
    size_t sample = 0;
};

static size_t number(const std::string &text) {  // 0 if the text is not a number
    const bool digits = !text.empty() && text.size() < 13 && text.find_first_not_of("0123456789") == text.npos;
    return digits ? strtoul(text.c_str(), nullptr, 10) : 0;
}

static std::optional<Arguments> parse(int argc, char **argv, const AnyLadder &ladder) {  // nothing after --help
    const Description &about = ladder.about;
    if (about.ideas.size() != ladder.versions)
        die("%s has %zu versions and %zu ideas\n  fix: give each version an entry in `versions` and one in `.ideas` of dev/cuda/%s.cu",
            about.name, ladder.versions, about.ideas.size(), about.name);
    std::vector<std::string> meanings;
    for (const Size &size : about.sizes) meanings.push_back(format("%s %s", size.name, size.meaning));
    const std::string shapes = format("%s: %s; %s with %s", shape_letters(about).c_str(), join(meanings, ", ").c_str(),
                                      the_interpreter ? "counted" : "timed",
                                      shape_name(the_interpreter ? counted_shape(about) : timed_shape(about)).c_str());
    std::string version = "all", shape;
    Arguments out;
    CLI::App app(about_program(about), about.name);
    app.add_option("version", version, format("1 to %zu, all, or shipped: the last", about.ideas.size()))->capture_default_str();
    app.add_option("--shape", shape, shapes);
    const auto count = app.add_flag("--count", out.count,
                                    the_interpreter ? "count the work of each launch, and predict its time on GPUs"
                                                    : "count the emulator's loads, stores and warp operations (make try)");
    if (the_interpreter) {
        app.add_option("--sample", out.sample,
                       "run only this number of blocks of each launch, spread over the grid, and multiply their counts")
            ->needs(count)
            ->check(CLI::Range(1, 1000000));
    } else app.add_flag("--emu", out.emulate, "check in the emulator, no timings");
    app.add_flag("--csv", out.csv, "print a table for programs; verdicts go to stderr");
    try {
        app.parse(argc, argv);
    } catch (const CLI::CallForHelp &) {
        printf("%s", app.help().c_str());
        return {};
    } catch (const CLI::ParseError &error) {
        die("%s\n  fix: ./%s --help", error.what(), about.name);
    }

    if (version == "all")
        for (size_t v = 1; v <= about.ideas.size(); v++) out.versions.push_back(v);
    else if (version == "shipped") out.versions = {about.ideas.size()};
    else if (const size_t v = number(version); v >= 1 && v <= about.ideas.size()) out.versions = {v};
    else die("%s has no version \"%s\"\n  fix: 1 to %zu, all, or shipped", about.name, version.c_str(), about.ideas.size());
    if (!shape.empty()) {
        out.shape.emplace();
        for (const std::string &word : CLI::detail::split(shape, 'x')) out.shape->push_back(number(word));
        if (out.shape->size() != about.sizes.size() || std::count(out.shape->begin(), out.shape->end(), 0))
            die("--shape \"%s\" is not a shape\n  fix: %s, say --shape %s", shape.c_str(), shapes.c_str(),
                shape_name(about.checked.back()).c_str());
    }
    return out;
}

// ---- checks --------------------------------------------------------------------------------------------------------------------

struct Counts {
    size_t passed = 0, failed = 0;
};

// Returns the largest error / allowed of a version over types and shapes. If a check fails, prints the first failure and returns nothing.
static std::optional<double> check(const AnyLadder &ladder, size_t version, const std::vector<Sizes> &shapes, Counts &counts) {
    double worst = 0;
    Counts here;
    for (size_t dtype = 0; dtype < ladder.dtypes.size(); dtype++)
        for (const Sizes &sizes : shapes) try {
                const auto error = ladder.check(dtype, version, sizes);
                if (!error) continue;  // the version does not run for this type or these sizes
                worst = std::max(worst, *error);
                here.passed++;
            } catch (const std::exception &error) {
                if (here.failed++ == 0)
                    fprintf(stderr, "FAILED: %s %zu at %s, %s\n", ladder.about.name, version, shape_name(sizes).c_str(),
                            error.what());
            }
    if (here.passed + here.failed == 0) {
        here.failed++;
        fprintf(stderr, "FAILED: %s %zu does not run at any of these shapes\n", ladder.about.name, version);
    }
    counts.passed += here.passed;
    counts.failed += here.failed;
    return here.failed ? std::nullopt : std::optional(worst);
}

static Counts check_all(const AnyLadder &ladder, const Arguments &args, const char *where) {
    Counts counts;
    const std::vector<Sizes> shapes = args.shape ? std::vector<Sizes>{*args.shape} : ladder.about.checked;
    std::vector<std::string> names;
    for (const Sizes &sizes : shapes) names.push_back(shape_name(sizes));
    if (args.shape) ladder.timed(*args.shape);  // dies here, once for all versions, if the op refuses the shape
    if (args.csv) printf("op,version,error_of_allowed\n");
    else
        printf("%s in the %s, %s = %s, %s\nversion  error / allowed\n", ladder.about.name, where,
               shape_letters(ladder.about).c_str(), join(names, " ").c_str(),
               join({ladder.dtypes.begin(), ladder.dtypes.end()}, " ").c_str());
    for (size_t version : args.versions) {
        const auto worst = check(ladder, version, shapes, counts);
        const std::string error = worst ? format("%.2g", *worst) : "failed";
        if (args.csv) printf("%s,%zu,%s\n", ladder.about.name, version, error.c_str());
        else printf("%7zu  %15s  %s\n", version, error.c_str(), ladder.about.ideas[version - 1]);
        fflush(stdout);
    }
    return counts;
}

// ---- the interpreter -----------------------------------------------------------------------------------------------------------

// All versions at all shapes together must run every workshop kernel of the program. The program may also contain shipped kernels for other
// shapes; build/ptx/test_cuda runs all of those.
static Counts check_ptx(const AnyLadder &ladder, const Arguments &args) {
    Counts counts = check_all(ladder, args, "PTX interpreter");
    const std::vector<std::string> missing = the_interpreter->not_run();
    FILE *const out = args.csv ? stderr : stdout;
    fprintf(out, "%zu of %zu kernels have run\n", the_interpreter->kernels() - missing.size(), the_interpreter->kernels());
    if (args.versions.size() < ladder.about.ideas.size() || args.shape) return counts;
    for (const std::string &kernel : missing) {
        if (kernel.find("8workshop") == kernel.npos) continue;
        fprintf(stderr, "FAILED: no version of %s runs %s\n", ladder.about.name, kernel.c_str());
        counts.failed++;
    }
    return counts;
}

// Prints the counts of the emulator for each version, with a row for each kernel.
static void count_accesses(const AnyLadder &ladder, const Arguments &args) {
    const Sizes shape = args.shape.value_or(counted_shape(ladder.about));
    const auto op = ladder.timed(shape);
    if (args.csv)
        printf(
            "what,kernel,launches,blocks,threads,shared,loads,stores,shared loads,shared stores,operations,active,requests,sectors,"
            "wavefronts,conflicts,barriers\n");
    else
        printf("%s in the emulator, %s, %s = %s; of all launches, in warp instructions\n", ladder.about.name,
               ladder.dtypes.back(), shape_letters(ladder.about).c_str(), shape_name(shape).c_str());
    for (size_t version : args.versions) {
        if (!op->runs(version)) continue;
        for (const KernelCounts &k : ladder.count(*op, version)) {
            std::vector<std::string> operations;
            for (const auto &[name, executed] : k.operations)
                operations.push_back(format("%s %llu", name.c_str(), static_cast<unsigned long long>(executed.warps)));
            const KernelCounts::Executed all = k.all();
            const double active = all.warps ? double(all.lanes) / double(all.warps) : 0;
            const auto n = [](uint64_t x) { return static_cast<unsigned long long>(x); };
            printf(args.csv ? "%s %zu,\"%s\",%llu,%llu,%llu,%llu,%llu,%llu,%llu,%llu,\"%s\",%.1f,%llu,%llu,%llu,%llu,%llu\n"
                            : "%s %zu, %s: %llu launches of %llu blocks of %llu threads, %llu bytes of shared memory\n"
                              "    loads %llu, stores %llu; of shared memory %llu, %llu; %s; active lanes %.1f\n"
                              "    requests %llu, sectors %llu; wavefronts %llu, conflicts %llu; barriers %llu\n",
                   ladder.about.name, version, k.name.c_str(), n(k.launches), n(k.blocks), n(k.threads), n(k.shared),
                   n(k.loads.warps), n(k.stores.warps), n(k.shared_loads.warps), n(k.shared_stores.warps),
                   join(operations, ", ").c_str(), active, n(k.loads.warps + k.stores.warps), n(k.sectors), n(k.wavefronts),
                   n(k.conflicts()), n(k.barriers));
        }
    }
}

static void count_all(const AnyLadder &ladder, const Arguments &args) {
    const Sizes shape = args.shape.value_or(counted_shape(ladder.about));
    const auto op = ladder.timed(shape);
    if (!args.csv)
        printf("%s, %s, %s = %s\n", ladder.about.name, ladder.dtypes.back(), shape_letters(ladder.about).c_str(),
               shape_name(shape).c_str());
    for (size_t version : args.versions)
        if (op->runs(version))
            the_interpreter->count(
                format("%s %zu", ladder.about.name, version), [&] { op->run(version); }, args.sample, args.csv);
}

// ---- timings -------------------------------------------------------------------------------------------------------------------

static Counts check_and_time(const AnyLadder &ladder, const Arguments &args) {
    Counts counts;
    const Sizes shape = args.shape.value_or(timed_shape(ladder.about));
    const char *name = ladder.about.name, *dtype = ladder.dtypes.back();
    const auto op = ladder.timed(shape);
    const bool products = op->work().flops > 0;
    const double work = products ? op->work().flops : op->work().bytes, unit = products ? 1e12 : 1e9;
    const double peak = products ? the_gpu->multiplied_per_second() : the_gpu->copied_per_second();
    if (args.csv) printf("op,version,dtype,shape,gpu,error_of_allowed,us,best_us,%s,share\n", products ? "tflop_s" : "gb_s");
    else
        printf("%s on %s, %s, %s = %s; %s %.4g %s\nversion  error / allowed         us    best us  %7s  share\n", name,
               the_gpu->name().c_str(), dtype, shape_letters(ladder.about).c_str(), shape_name(shape).c_str(),
               products ? "a large product reaches" : "a copy reaches", peak / unit, products ? "TFLOP/s" : "GB/s",
               products ? "TFLOP/s" : "GB/s");
    for (size_t version : args.versions) {
        const auto worst = check(ladder, version, ladder.about.checked, counts);
        if (!worst || !op->runs(version)) {
            if (!args.csv) printf("%7zu  %15s  %s\n", version, worst ? "not here" : "failed", ladder.about.ideas[version - 1]);
            continue;
        }
        const Gpu::Seconds seconds = the_gpu->time([&] { op->run(version); });
        const double rate = work / seconds.median;
        const double us = seconds.median * 1e6, best_us = seconds.best * 1e6;
        if (args.csv)
            printf("%s,%zu,%s,%s,%s,%.2g,%.2f,%.2f,%.4g,%.3f\n", name, version, dtype, shape_name(shape).c_str(),
                   the_gpu->name().c_str(), *worst, us, best_us, rate / unit, rate / peak);
        else
            printf("%7zu  %15.2g  %9.2f  %9.2f  %7.4g  %5.2f  %s\n", version, *worst, us, best_us, rate / unit, rate / peak,
                   ladder.about.ideas[version - 1]);
        fflush(stdout);
    }
    return counts;
}

int main(int argc, char **argv) try {
    const auto args = parse(argc, argv, emulated_ladder ? *emulated_ladder : *gpu_ladder);
    if (!args) return 0;
    if (!emulated_ladder && !the_interpreter && (args->emulate || args->count))
        die("the emulator has not the instructions of %s\n  fix: make try L=%s runs them in the PTX interpreter",
            gpu_ladder->about.name, gpu_ladder->about.name);
    if (args->count) return the_interpreter ? count_all(*gpu_ladder, *args) : count_accesses(*emulated_ladder, *args), 0;
    if (the_interpreter) {
        const Counts counts = check_ptx(*gpu_ladder, *args);
        fprintf(args->csv ? stderr : stdout, "%zu passed, %zu failed\n", counts.passed, counts.failed);
        return counts.failed > 0;
    }
    if (!args->emulate && !the_gpu) die("this program was built without nvcc\n  fix: --emu runs the kernels on the CPU");
    if (!args->emulate && the_gpu->name().empty()) die("there is no CUDA device\n  fix: --emu runs the kernels on the CPU");
    const Counts counts = args->emulate ? check_all(*emulated_ladder, *args, "emulator") : check_and_time(*gpu_ladder, *args);
    fprintf(args->csv ? stderr : stdout, "%zu passed, %zu failed\n", counts.passed, counts.failed);
    return counts.failed > 0;
} catch (const std::exception &error) {
    fprintf(stderr, "%s\n", error.what());
    return 1;
}
