// Checkpoints: a directory is there whole or not at all, the optimizer's state comes back bit for bit in any world or with a message, and
// only our own files are removed.
#include "../llmc/train/checkpoint.h"

#include <atomic>
#include <bit>
#include <cstring>
#include <set>
#include <thread>

#include "../llmc/core/file.h"
#include "../llmc/core/json.h"
#include "../llmc/core/rng.h"
#include "../llmc/parallel/comm.h"
#include "../llmc/train/output.h"
#include "../llmc/train/trainer_state.h"
#include "check.h"
#include "errors.h"

static HostMemory memory;

namespace fs = std::filesystem;

namespace {

struct Checkpoint : TemporaryDirectory {
    using Names = std::set<std::string>;

    bool exists(const std::string &name) const { return fs::exists(dir + "/" + name); }
    Names names() const {
        Names out;
        for (const auto &entry : fs::directory_iterator(dir)) out.insert(entry.path().filename());
        return out;
    }
    void make(const std::vector<std::string> &directories) const {
        for (const std::string &name : directories) {
            fs::create_directories(dir + "/" + name);
            put(name + "/trainer_state.json", "x");
        }
    }
};

SelfComm self;

using Range = std::pair<size_t, size_t>;  // global, count

float value_of(size_t tensor, size_t global) {  // any bits, NaN too
    return std::bit_cast<float>(uint32_t(global * 2654435761u ^ tensor * 0x9e3779b9u));
}

// What one rank keeps, on the heap, with something else behind each part.
struct Kept {
    static constexpr float other = 12345;
    std::vector<Range> ranges;
    std::vector<float> data[3];

    explicit Kept(const std::vector<Range> &ranges) : ranges(ranges) {
        size_t n = 0;
        for (const auto &[global, count] : ranges) n += count + 1;
        for (auto &x : data) x.assign(n, other);
    }
    static Kept filled(const std::vector<Range> &ranges) {
        Kept kept(ranges);
        kept.each([](float &x, float right) { x = right; });
        return kept;
    }
    OptimizerState state(size_t count) {
        const bool everything = ranges == std::vector<Range>{{0, count}};
        OptimizerState out{{}, count, everything ? 1 : SIZE_MAX, &memory};
        size_t at = 0;
        for (const auto &[global, n] : ranges) {
            out.parts.push_back(
                {global, n, Floats<float>{&data[0][at]}, Floats<float>{&data[1][at]}, Floats<float>{&data[2][at]}});
            at += n + 1;
        }
        return out;
    }
    size_t wrong() {  // elements
        size_t wrong = 0;
        each([&](float &x, float right) { wrong += memcmp(&x, &right, sizeof(float)) != 0; });
        return wrong;
    }

  private:
    template <class F> void each(F f) {  // f(element, expected value)
        for (size_t t = 0; t < 3; t++) {
            size_t at = 0;
            for (const auto &[global, n] : ranges) {
                for (size_t i = 0; i < n; i++) f(data[t][at++], value_of(t, global + i));
                f(data[t][at++], other);
            }
        }
    }
};

// Who keeps what: [rank] = ranges. Either uneven parts in turn, or everything on every rank.
using Cuts = std::vector<std::vector<Range>>;

Cuts uneven(size_t count, size_t world, uint32_t stream) {
    const Random random{1, Purpose::test, stream};
    Cuts out(world);
    for (size_t at = 0, i = 0; at < count; i++) {
        const size_t n = std::min(count - at, 1 + random.block(i)[0] % (count / world));
        out[(i + stream) % world].emplace_back(at, n);
        at += n;
    }
    return out;
}

Cuts everywhere(size_t count, size_t world) { return Cuts(world, {{0, count}}); }

void run(size_t ranks, const std::function<void(Comm &)> &f) {
    run_threads(int(ranks), {.check = true, .timeout = 60}, [&](Comm &comm) { return f(comm), 0; });
}

using Change = std::function<void(OptimizerState &)>;

void save(
    const std::string &dir, const Cuts &cuts, size_t count, const Change &change = [](OptimizerState &) {}) {
    fs::create_directories(dir);
    run(cuts.size(), [&](Comm &comm) {
        Kept kept = Kept::filled(cuts[size_t(comm.rank)]);
        OptimizerState state = kept.state(count);
        change(state);
        save_optimizer(comm, dir, state);
        verify_optimizer(comm, dir, state);
    });
}

void load(const std::string &dir, const Cuts &cuts, size_t count) {
    run(cuts.size(), [&](Comm &comm) {
        Kept kept(cuts[size_t(comm.rank)]);
        load_optimizer(comm, dir, kept.state(count));
        EXPECT_EQ(kept.wrong(), 0u) << "rank " << comm.rank << " of " << comm.size;
    });
}

// Changes a byte of a file while it lives.
struct Damage {
    const std::string path;
    const std::streamoff at;
    int byte;

    Damage(const std::string &path, size_t at, int bits) : path(path), at(std::streamoff(at)) {
        std::ifstream file(path, std::ios::binary);
        file.seekg(this->at);
        byte = file.get();
        put(byte ^ bits);
    }
    ~Damage() { put(byte); }
    Damage(const Damage &) = delete;

  private:
    void put(int value) const {
        std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
        file.seekp(at), file.put(char(value));
    }
};

}  // namespace

// ---- the optimizer --------------------------------------------------------------------------------------------------------------------

// Each rank writes its file, and what all have is written once.
TEST_F(Checkpoint, EveryWorldReadsWhatAnyWroteBitForBit) {
    const size_t count = (size_t(1) << 20) + 77;  // more than a block of a checksum
    const std::pair<Cuts, size_t> writers[] = {{everywhere(count, 3), 1},
                                               {uneven(count, 1, 0), 1},
                                               {{{{0, count - 5}}, {}, {{count - 5, 5}}}, 2},  // a rank may have nothing
                                               {uneven(count, 8, 0), 8}};
    for (const auto &[writer, files] : writers) {
        save(dir, writer, count);
        EXPECT_EQ(names().size(), 1 + files);
        load(dir, writer, count);
        for (const size_t world : {1, 3, 8}) load(dir, uneven(count, world, 1), count);
        load(dir, everywhere(count, 2), count);
        fs::remove_all(dir);
    }
}

// Muon's elements are written without v, and read without it, by any ranks.
TEST_F(Checkpoint, ElementsMayHaveNoV) {
    const size_t block = size_t(1) << 20, count = block + 3000, begin = 700,
                 end = begin + block + 77;  // Muon's: more than a block
    const Change muon = [&](OptimizerState &state) {
        for (OptimizerPart &part : state.parts) part.has_v = part.global + part.count <= begin || part.global >= end;
    };
    const auto bytes_in = [](const std::string &path) {
        double bytes = 0;
        for (const auto &file : fs::directory_iterator(path))
            if (file.path().extension() == ".safetensors") bytes += double(file.file_size());
        return bytes;
    };
    const Range before{0, begin}, behind{end, count - end};
    const auto of_muon = [&](size_t from, size_t to) { return Range{begin + from, (to ? begin + to : end) - begin - from}; };
    const Cuts one = {{before, of_muon(0, 0), behind}}, two = {{before, of_muon(0, 900)}, {of_muon(900, 0), behind}},
               three = {{{0, 300}, behind}, {{300, begin - 300}, of_muon(0, block + 5)}, {of_muon(block + 5, 0)}};
    const std::string by_one = dir + "/one", by_three = dir + "/three", all = dir + "/all";
    save(by_one, one, count, muon), save(by_three, three, count, muon), save(all, one, count);
    EXPECT_NEAR(bytes_in(all) - bytes_in(by_one), 4 * double(end - begin), 64);
    for (const std::string &from : {by_one, by_three, all})
        for (const Cuts &cuts : {one, two, three})
            run(cuts.size(), [&](Comm &comm) {
                Kept kept(cuts[size_t(comm.rank)]);
                OptimizerState to = kept.state(count);
                muon(to);
                load_optimizer(comm, from, to);
                size_t without_v = 0;
                for (const OptimizerPart &part : to.parts) without_v += part.has_v ? 0 : part.count;
                EXPECT_EQ(kept.wrong(), without_v);
            });
    Kept kept(one[0]);
    expect_error([&] { load_optimizer(self, by_one, kept.state(count)); },
                 {"optimizer-00000-of-00001.safetensors: has no tensor \"v\" of elements [700, 1049276) of the model\n  fix: "});
}

// A file holds floats, whether the parameters are floats or bf16 with lower halves.
TEST_F(Checkpoint, ParametersMayBeInHalves) {
    const size_t count = (size_t(1) << 20) + 77;  // more than a block
    const auto values = random_values<float>(count, 1);
    Kept moments = Kept::filled({{0, count}});
    const auto state = [&](AnyFloats params) {
        OptimizerState out = moments.state(count);
        out.parts[0].master = params;
        return out;
    };
    HostFloats<bf16> halves(values);
    save_optimizer(self, dir, state(halves.where()));
    verify_optimizer(self, dir, state(halves.where()));
    HostFloats<bf16> as_halves(std::vector<float>(count, 0));
    HostFloats<float> as_floats(std::vector<float>(count, 0));
    load_optimizer(self, dir, state(as_halves.where()));
    load_optimizer(self, dir, state(as_floats.where()));
    EXPECT_EQ(as_halves.lower, halves.lower);
    EXPECT_EQ(as_halves.values(), values);
    EXPECT_EQ(as_floats.values(), values);
}

TEST_F(Checkpoint, AFlippedBitIsNoticedWhereverItIs) {
    make({"step_3", "step_5", "step_7"});
    const std::string output_dir = dir, dir = output_dir + "/step_5", fix = "\n  fix: --resume " + output_dir + "/step_3";
    const Cuts cuts = uneven(60, 2, 0);
    save(dir, cuts, 60);
    const auto expect_damage = [&](const std::vector<std::string> &words) {
        Kept kept({{0, 60}});
        expect_error([&] { load_optimizer(self, dir, kept.state(60)); }, words);
    };
    for (const size_t rank : {0, 1}) {
        const std::string path = dir + format("/optimizer-%05zu-of-00002.safetensors", rank);
        size_t n = 0;
        for (const Range &range : cuts[rank]) n += range.second;
        const size_t bytes = fs::file_size(path), data = bytes - 3 * n * sizeof(float);
        for (size_t at = 0; at < bytes; at++) {
            const Damage damage(path, at, 1 << at % 8);
            const size_t tensor = (at - data) / (n * sizeof(float));
            expect_damage({path, fix,
                           at < data ? "its header differs from the written one"
                                     : format("tensor \"%s\" is damaged", std::vector{"master", "m", "v"}[tensor])});
        }
    }
    const std::string manifest = dir + "/optimizer.json";  // a checked file: the next test
    {
        const Damage damage(manifest, 9, 1);
        expect_damage({manifest, fix});
    }
    load(dir, cuts, 60);
}

TEST_F(Checkpoint, AFlippedBitInACheckedFileIsNoticed) {
    const std::string path = dir + "/state.json";
    const nlohmann::json value = {
        {"step", 4}, {"mean", 0.1}, {"cursor", nullptr}, {"data", "a/\xff/b"}, {"losses", {{"seen", 1e-300}}}};
    write_checked_json(path, value);
    const nlohmann::json right = read_checked_json(path, "");
    EXPECT_EQ(right.at("losses"), value["losses"]);
    for (size_t at = 0; at < fs::file_size(path); at++)
        for (int bit = 0; bit < 8; bit++) {
            const Damage damage(path, at, 1 << bit);
            nlohmann::json read;
            const std::string error = error_of([&] { read = read_checked_json(path, "\n  fix: this"); });
            if (error == "no error") EXPECT_EQ(read, right);  // 1E-300 is 1e-300
            else expect_contains(error, {path, "\n  fix: this"});
        }
    write_json(path, value);
    expect_error([&] { read_checked_json(path, ""); }, {path, "is damaged"});
    write_file(path, "[]");
    expect_error([&] { read_checked_json(path, ""); }, {path, "is damaged"});
    fs::remove(path);
    EXPECT_EQ(error_of([&] { read_checked_json(path, "\n  fix: this"); }),
              path + ": cannot open: No such file or directory\n  fix: this");
}

TEST_F(Checkpoint, TheOneBeforeADamagedOneIsNamed) {
    make({"step_9", "step_10", "step_11", "other"});
    EXPECT_EQ(other_checkpoint(dir + "/step_11"), "\n  fix: --resume " + dir + "/step_10");
    EXPECT_EQ(other_checkpoint(dir + "/step_10/"), "\n  fix: --resume " + dir + "/step_9");
    for (const char *name : {"/step_9", "/other"})
        expect_contains(other_checkpoint(dir + name), {"fix: --overwrite", "there is no checkpoint before"});
}

TEST_F(Checkpoint, ADamagedBlockIsNamed) {
    const size_t block = size_t(1) << 20, count = 2 * block + 5;
    save(dir, {{{0, count}}}, count);
    const std::string path = dir + "/optimizer-00000-of-00001.safetensors";
    const Damage damage(path, fs::file_size(path) - 1, 128);
    const std::string words = format(": tensor \"v\" is damaged: elements [%zu, %zu)", 2 * block, count);
    const auto refused = [&](const Cuts &cuts, const std::string &rank) {
        expect_error([&] { load(dir, cuts, count); }, {rank + path + words, "fix: "});
    };
    refused({{{0, count}}}, "");
    refused({{{0, 2 * block + 4}}, {{2 * block + 4, 1}}}, "");
    refused({{{0, block}}, {{block, block + 5}}}, "rank 1: ");
}

TEST_F(Checkpoint, VerifyComparesWithTheMemory) {
    Kept kept = Kept::filled({{10, 50}, {0, 10}});
    save_optimizer(self, dir, kept.state(60));
    verify_optimizer(self, dir, kept.state(60));
    kept.data[1][1] = 0.5f;
    expect_error([&] { verify_optimizer(self, dir, kept.state(60)); },
                 {"optimizer-00000-of-00001.safetensors", "reads back differently", "tensor \"m\"", "element 10", "fix: "});
}

TEST_F(Checkpoint, MissingAndTruncatedFiles) {
    const Cuts cuts = uneven(1000, 3, 0);
    save(dir, cuts, 1000);
    const std::string path = dir + "/optimizer-00001-of-00003.safetensors";
    fs::resize_file(path, fs::file_size(path) - 1);
    expect_error([&] { load(dir, cuts, 1000); }, {"rank 1: " + path, "bytes, but", "fix: "});
    fs::remove(path);
    const std::string error = error_of([&] { load(dir, cuts, 1000); });
    expect_contains(error, {"rank 1: " + path, "No such file", "optimizer.json names it", "fix: "});
    EXPECT_EQ(error.find("rank 0"), std::string::npos);
    expect_error([&] { load(dir, uneven(1000, 1, 1), 1000); }, {path, "No such file"});
    fs::remove(dir + "/optimizer.json");
    expect_error([&] { load(dir, cuts, 1000); }, {"optimizer.json", "No such file"});
}

TEST_F(Checkpoint, WrongManifests) {
    save(dir, {{{0, 60}}, {{60, 40}}}, 100);
    const std::string path = dir + "/optimizer.json";
    const nlohmann::json right = read_checked_json(path, "");
    const struct {
        const char *field, *value, *words;  // no value: the field is removed
    } cases[] = {
        {"/version", nullptr, "version is missing"},
        {"/version", "2", "version is 2, but this program reads 1"},
        {"/elements", "\"100\"", "elements is \"100\", but must be an integer"},
        {"/elements", "99", "holds the state of 99 elements, but the model has 100"},
        {"/files", nullptr, "files is missing or not a list"},
        {"/files", "{}", "files is missing or not a list"},
        {"/files", "[]", "elements [0, 100) are in no file"},
        {"/files/0", "3", "files[0] must be an object"},
        {"/files/0", nullptr, "elements [0, 60) are in no file"},
        {"/files/1", nullptr, "elements [60, 100) are in no file"},
        {"/files/1/name", "3", "files[1].name is 3, but must be a string"},
        {"/files/1/name", "\"../x\"", "files[1].name is not the name of a file beside it"},
        {"/files/1/name", "\"x\"", "No such file"},
        {"/files/1/name", "\"optimizer-00000-of-00002.safetensors\"", "bytes, but"},
        {"/files/1/bytes", "-1", "files[1].bytes is -1, but must be an integer"},
        {"/files/1/header", "\"0\"", "header differs from the written one"},
        {"/files/1/parts", "null", "files[1].parts is missing or not a list"},
        {"/files/1/parts/0", "[]", "files[1].parts[0] must be an object"},
        {"/files/1/parts/0/count", "39", "elements [99, 100) are in no file"},
        {"/files/1/parts/0/count", "41", "files[1].parts[0].count reaches beyond the 100 elements"},
        {"/files/1/parts/0/count", "18446744073709551615", "count reaches beyond"},
        {"/files/1/parts/0/global", "101", "files[1].parts[0].global is beyond the 100 elements"},
        {"/files/1/parts/0/global", "59", "elements [59, 60) are in two files"},
        {"/files/1/parts/0/global", "10", "elements [10, 50) are in two files"},
        {"/files/0/parts/0/count", "59", "elements [59, 60) are in no file"},
        {"/files/1/parts/0/m", "[]", "files[1].parts[0].m has 0 checksums instead of 1"},
        {"/files/1/parts/0/m", "[7]", "files[1].parts[0].m is not a list of checksums"},
        {"/files/1/parts/0/m", "[\"7\"]", "tensor \"m\" is damaged"},
    };
    for (const auto &c : cases) {
        nlohmann::json wrong = right;
        if (c.value) wrong[nlohmann::json::json_pointer(c.field)] = nlohmann::json::parse(c.value);
        else wrong = wrong.patch({{{"op", "remove"}, {"path", c.field}}});
        write_checked_json(path, wrong);
        expect_error([&] { load(dir, uneven(100, 3, 1), 100); }, {dir, c.words});
    }
    write_checked_json(path, right);
    expect_error([&] { load(dir, {{{0, 101}}}, 101); }, {path, "100 elements, but the model has 101", "fix: "});
    load(dir, uneven(100, 3, 1), 100);
}

TEST_F(Checkpoint, OneRanksDiskIsFull) {
    for (const char *file : {"optimizer-00001-of-00003.safetensors", "optimizer.json"}) {
        std::vector<std::string> errors(3);
        const Cuts cuts = uneven(1000, 3, 0);
        run(3, [&](Comm &comm) {
            Kept kept = Kept::filled(cuts[size_t(comm.rank)]);
            const auto fill = [&](const std::string &to) {
                if (comm.rank == 0) fs::create_symlink("/dev/full", to + "/" + file);
                comm.barrier();
                save_optimizer(comm, to, kept.state(1000));
            };
            errors[size_t(comm.rank)] = error_of([&] { write_directory(comm, dir + "/step_1", fill); });
            EXPECT_TRUE(names().empty());  // before any rank goes on
        });
        const char *rank = file[9] == '-' ? "rank 1: " : "rank 0: ";
        expect_contains(errors[0], {rank, file, "No space left on device", "fix: "});
        EXPECT_EQ(errors[1], errors[0]);
        EXPECT_EQ(errors[2], errors[0]);
    }
}

// ---- directories ----------------------------------------------------------------------------------------------------------------------

TEST_F(Checkpoint, ADirectoryAppearsWhole) {
    make({"step_2", "step_2.tmp"});  // of an earlier run and of its crash
    run(3, [&](Comm &comm) {
        write_directory(comm, dir + "/step_2", [&](const std::string &to) {
            EXPECT_NE(to, dir + "/step_2");
            EXPECT_FALSE(fs::exists(to + "/trainer_state.json"));
            EXPECT_TRUE(exists("step_2/trainer_state.json"));  // still the old one
            write_file(to + format("/new_%d", comm.rank), "y");
        });
        for (int r = 0; r < 3; r++) EXPECT_TRUE(fs::exists(dir + format("/step_2/new_%d", r)));
    });
    EXPECT_EQ(names(), Names({"step_2"}));
    EXPECT_FALSE(exists("step_2/trainer_state.json"));
}

TEST_F(Checkpoint, NothingRemainsAfterAnError) {
    make({"step_1"});
    const auto half = [&](const std::string &to) { write_file(to + "/config.json", "y"), die("the disk is full"); };
    EXPECT_EQ(error_of([&] { write_directory(self, dir + "/step_1", half); }), "the disk is full");
    const std::string agreed = error_of([&] {
        run(3, [&](Comm &comm) {
            write_directory(comm, dir + "/step_1",
                            [&](const std::string &to) { agree(comm, [&] { comm.rank == 2 ? half(to) : void(); }); });
        });
    });
    EXPECT_EQ(agreed, "rank 2: the disk is full");
    const std::string alone = error_of([&] {  // of which the others hear only because the rank has ended
        run(3, [&](Comm &comm) {
            write_directory(comm, dir + "/step_1", [&](const std::string &to) { comm.rank == 2 ? half(to) : void(); });
        });
    });
    EXPECT_EQ(alone, "rank 2: the disk is full");
    EXPECT_EQ(names(), Names({"step_1"}));
    EXPECT_TRUE(exists("step_1/trainer_state.json"));  // untouched
    expect_error([&] { write_directory(self, "/dev/null/step_1", [](const std::string &) {}); }, {"/dev/null/step_1"});
}

// While another thread looks, as a run would that is started after a crash: never a directory of that name that lacks a file.
TEST_F(Checkpoint, ADirectoryLosesItsNameBeforeItsFiles) {
    make({"step_1", "step_1.tmp"});
    const std::string path = dir + "/step_1";
    std::vector<std::string> files;
    for (int i = 0; i < 3000; i++)
        std::ofstream(files.emplace_back(path + format("/optimizer-%d-of-3000.safetensors", i))) << "x";
    std::atomic<bool> looking = false, torn = false, done = false;
    std::thread other([&] {
        for (size_t i = 0; !done; i = (i + 1) % files.size(), looking = true)
            if (!fs::exists(files[i]) && fs::exists(path)) torn = true;
    });
    while (!looking) std::this_thread::yield();
    remove_directory(path);
    done = true;
    other.join();
    EXPECT_FALSE(torn);
    EXPECT_TRUE(names().empty());
    remove_directory(path);  // which is no longer there
}

// ---- the checkpoints of a run ---------------------------------------------------------------------------------------------------------

TEST_F(Checkpoint, TheLatestIsTheOneWithTheMostSteps) {
    EXPECT_EQ(latest_checkpoint(dir), "");
    EXPECT_EQ(latest_checkpoint(dir + "/absent"), "");
    make({"step_11.tmp", "step_trial", "step_012"});
    fs::create_directory(dir + "/step_12");
    EXPECT_EQ(latest_checkpoint(dir), "");
    make({"step_9", "step_10"});
    EXPECT_EQ(latest_checkpoint(dir), dir + "/step_10");  // though a crash came before `latest` was written
}

// ---- the output directory ---------------------------------------------------------------------------------------------------------------

TEST_F(Checkpoint, ADirectoryOfTheUsersIsRefused) {
    for (const char *name : {"notes.txt", "model-00001-of-00002.safetensors", ".git", "run_files.txt"}) {
        put(name, "mine");
        expect_error([&] { OutputDirectory output(dir + "/"); },
                     {"holds files that no run wrote: " + std::string(name), "fix: "});
        EXPECT_EQ(names(), Names({name}));
        fs::remove(dir + "/" + name);
    }
    for (const char *name : {".DS_Store", ".nfs0001"}) put(name, "");  // systems put them into directories
    fs::create_directory(dir + "/lost+found");
    EXPECT_FALSE(OutputDirectory(dir).holds_run());
}

TEST_F(Checkpoint, OnlyWhatIsListedGoes) {
    OutputDirectory output(dir);
    output.claim({"config.json", "step_3/", "best/"});
    make({"step_3", "step_3.tmp", "best", "step_4", "step_3/mine"});
    for (const char *name : {"config.json", "model.safetensors", "step_3/notes.txt", "step_3/config.json", "step_3.tmp/plot.png"})
        put(name, "x");
    EXPECT_TRUE(output.holds_run());
    output.remove_leftovers();
    EXPECT_TRUE(exists("step_3/plot.png"));
    output.clear();
    EXPECT_FALSE(output.holds_run());
    EXPECT_EQ(names(), Names({"model.safetensors", "step_3", "step_4", "run_files.json"}));
    for (const char *name :
         {"step_3/notes.txt", "step_3/plot.png", "step_3/mine/trainer_state.json", "step_4/trainer_state.json"})
        EXPECT_TRUE(exists(name)) << name;
    EXPECT_FALSE(exists("step_3/config.json"));
    write_directory(self, dir + "/step_3", [](const std::string &to) { write_file(to + "/config.json", "y"); });
    EXPECT_TRUE(exists("step_3/notes.txt") && exists("step_3/config.json"));
    for (const char *name : {"model.safetensors", "step_4/"})
        expect_error([&] { output.claim({name}); }, {"no run wrote it", "fix: move it away"});
}

TEST_F(Checkpoint, TwoRunsDoNotShareADirectory) {
    OutputDirectory output(dir);
    fs::create_directory_symlink(dir, dir + "_link");
    expect_error([&] { OutputDirectory other(dir + "_link/."); }, {"another run is writing there"});
    fs::remove(dir + "_link");
}

TEST_F(Checkpoint, AListThatLeadsElsewhereIsRefused) {
    for (const char *name : {"../x", "/etc/x", "..", "./", "a/b/", ""}) {
        write_json(dir + "/run_files.json", {{"written", {name}}});
        expect_error([&] { OutputDirectory output(dir); }, {"run_files.json", "which is no name in that directory"});
    }
}

// As a run of an earlier version left it, which kept no list.
TEST_F(Checkpoint, AnEarlierRunIsKnown) {
    put("log.jsonl", "{\"task\": \"sft\", \"options\": {}}\n{\"step\": 1}\n");
    make({"step_1", "step_2.tmp", "step_3_notes"});
    put("model-00001-of-00002.safetensors", "mine");
    OutputDirectory output(dir);
    EXPECT_TRUE(output.holds_run());
    output.clear();
    EXPECT_EQ(names(), Names({"step_3_notes", "model-00001-of-00002.safetensors", "run_files.json"}));
}

TEST_F(Checkpoint, APublishedModelReplacesTheOneBefore) {
    OutputDirectory output(dir);
    output.claim({"config.json", "model-00001-of-00001.safetensors", "log.jsonl", "new_model/"});
    make({"new_model/critic"});
    for (const char *name : {"config.json", "model-00001-of-00001.safetensors", "log.jsonl", "notes.txt"}) put(name, "old");
    for (const char *name : {"config.json", "model.safetensors"}) put(std::string("new_model/") + name, "new");
    output.publish_model();
    EXPECT_EQ(names(), Names({"config.json", "model.safetensors", "critic", "log.jsonl", "notes.txt", "run_files.json"}));
    EXPECT_EQ(fs::file_size(dir + "/config.json"), 3u);
    EXPECT_FALSE(exists("new_model"));
}

TEST_F(Checkpoint, PruningKeepsTheNewestAndWhatIsNotOurs) {
    OutputDirectory output(dir);
    output.claim({"step_2/", "step_10/", "step_9/", "step_100/"});
    make({"step_2", "step_10", "step_9", "step_100", "step_1", "step_5_notes", "step_", "step_-3", "step_007", "other"});
    output.prune_checkpoints(2);
    const auto left = names();
    EXPECT_EQ(left, Names({"step_10", "step_100", "step_1", "step_5_notes", "step_", "step_-3", "step_007", "other",
                           "run_files.json"}));
    output.prune_checkpoints(2);
    EXPECT_EQ(names(), left);
}

TEST_F(Checkpoint, WhatLiesBeyondAResumedStepGoes) {
    OutputDirectory output(dir);
    output.claim({"step_2/", "step_4/", "step_6/", "latest"});
    make({"step_2", "step_4", "step_6", "step_9", "other"});
    output.set_latest(6);
    EXPECT_EQ(output.checkpoints_beyond(4, 8), std::vector<std::string>({"step_6/"}));
    expect_error([&] { output.expect_free(output.checkpoints_beyond(4)); }, {"step_9 is there, and no run wrote it"});
    output.remove_checkpoints_beyond(4);
    EXPECT_EQ(names(), Names({"step_2", "step_4", "step_9", "other", "latest", "run_files.json"}));
    output.remove_checkpoints_beyond(0);
    EXPECT_EQ(names(), Names({"step_9", "other", "run_files.json"}));
}

TEST_F(Checkpoint, NumbersThatNoRunReachesAreRefused) {
    TrainerState state{};
    state.step = 3, state.cursor = 12, state.steps = 8;
    state.options = nlohmann::ordered_json::object();
    write_trainer_state(dir, state);
    const auto read = [&] { return read_trainer_state(dir, state, [](const std::string &) {}); };
    EXPECT_EQ(read().step, 3u);
    const std::string path = dir + "/trainer_state.json";
    const auto right = read_checked_json(path, "");
    for (const char *field : {"step", "cursor", "steps", "samples", "skipped", "skips_in_a_row", "restarts", "seconds"})
        for (const char *value : {"9223372036854775808", "18446744073709551615", "-1", "null", "\"3\"", "1e300"}) {
            nlohmann::json wrong = right;
            wrong[field] = nlohmann::json::parse(value);
            write_checked_json(path, wrong);
            expect_error([&] { read(); }, {path, field, "fix: "});
        }
    nlohmann::json beyond = right;
    beyond["step"] = 9;
    write_checked_json(path, beyond);
    expect_error([&] { read(); }, {path, "\"step\" is 9 of 8 steps", "fix: "});
}
