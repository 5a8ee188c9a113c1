// Checkpoints: a directory is complete or absent, the optimizer's state is restored bit for bit in any world or refused with a message, and only
// files of runs are removed.
#include "../llmc/train/checkpoint.h"

#include <array>
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

using Range = std::pair<size_t, size_t>;       // global offset, count
using Cuts = std::vector<std::vector<Range>>;  // [rank]

constexpr size_t block = size_t(1) << 20;  // elements of a checksum

// The optimizer state of one rank. Elements of `muons` have no v.
struct Kept {
    size_t elements;  // of the model
    std::vector<Range> ranges;
    Range muons;
    std::vector<std::array<std::vector<float>, 3>> data;  // [range]: master, m, v

    Kept(size_t elements, const std::vector<Range> &ranges, Range muons = {}, bool filled = true)
        : elements(elements), ranges(ranges), muons(muons), data(ranges.size()) {
        each([&](std::vector<float> &x, size_t, size_t r) { x.assign(ranges[r].second, 0); });
        if (filled)
            each([&](std::vector<float> &x, size_t t, size_t r) {
                for (size_t i = 0; i < x.size(); i++) x[i] = value_of(t, ranges[r].first + i);
            });
    }
    OptimizerState state() {
        OptimizerState out{{}, elements, ranges == std::vector<Range>{{0, elements}} ? 1 : SIZE_MAX, 1, &memory};
        for (size_t r = 0; r < ranges.size(); r++) {
            auto &[master, m, v] = data[r];
            out.parts.push_back({ranges[r].first, ranges[r].second, Floats<float>{master.data()}, Floats<float>{m.data()},
                                 Floats<float>{v.data()}});
            out.parts.back().has_v = !is_muons(r);
        }
        return out;
    }
    size_t wrong() {  // number of elements with other bits than value_of, or with a v that Muon's elements do not have
        size_t wrong = 0;
        each([&](std::vector<float> &x, size_t t, size_t r) {
            for (size_t i = 0; i < x.size(); i++) {
                const float want = t == 2 && is_muons(r) ? 0 : value_of(t, ranges[r].first + i);
                wrong += memcmp(&x[i], &want, sizeof(float)) != 0;
            }
        });
        return wrong;
    }

  private:
    static float value_of(size_t tensor, size_t global) {  // any bits, including those of NaN
        return std::bit_cast<float>(uint32_t(global * 2654435761u ^ tensor * 0x9e3779b9u));
    }
    bool is_muons(size_t r) const { return muons.first <= ranges[r].first && ranges[r].first < muons.second; }
    template <class F> void each(F f) {  // f(values, tensor, range)
        for (size_t r = 0; r < ranges.size(); r++)
            for (size_t t = 0; t < 3; t++) f(data[r][t], t, r);
    }
};

// Parts of random sizes, dealt to the ranks in turn, and cut at the two ends of `muons`.
Cuts uneven(size_t count, size_t world, uint32_t stream, Range muons = {}) {
    const Random random{1, Purpose::test, stream};
    Cuts out(world);
    for (size_t at = 0, i = 0; at < count; i++) {
        size_t end = std::min(count, at + 1 + random.block(i)[0] % (count / world));
        for (const size_t cut : {muons.first, muons.second})
            if (at < cut && cut < end) end = cut;
        out[(i + stream) % world].emplace_back(at, end - at);
        at = end;
    }
    return out;
}

void run(size_t ranks, const std::function<void(Comm &)> &f) {
    run_threads(int(ranks), {.check = true, .timeout = 60}, [&](Comm &comm) { return f(comm), 0; });
}

void save(const std::string &dir, const Cuts &cuts, size_t count, Range muons = {}) {
    fs::create_directories(dir);
    run(cuts.size(), [&](Comm &comm) {
        Kept kept(count, cuts[size_t(comm.rank)], muons);
        save_optimizer(comm, dir, kept.state());
        verify_optimizer(comm, dir, kept.state());
    });
}

void load(const std::string &dir, const Cuts &cuts, size_t count, Range muons = {}) {
    run(cuts.size(), [&](Comm &comm) {
        Kept kept(count, cuts[size_t(comm.rank)], muons, false);
        load_optimizer(comm, dir, kept.state());
        EXPECT_EQ(kept.wrong(), 0u) << "rank " << comm.rank << " of " << comm.size;
    });
}

// Flips bits of a byte of a file; a second call restores them.
void flip(const std::string &path, size_t at, int bits) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(std::streamoff(at));
    const int byte = file.get();
    file.seekp(std::streamoff(at)), file.put(char(byte ^ bits));
}

}  // namespace

// ---- the optimizer --------------------------------------------------------------------------------------------------------------------

// Each rank writes a file with its own part; a part that all ranks have is written once. Muon's elements have no v in the file and need none.
TEST_F(Checkpoint, AnyWorldReadsTheBitsOfAnyOther) {
    const size_t count = block + 1777;
    const Range none{}, muons{700, 700 + block + 77};
    for (const auto &[written, read] : {std::pair(none, none), {muons, muons}, {none, muons}}) {
        const Cuts whole = uneven(count, 1, 0, written);
        std::vector<std::pair<Cuts, size_t>> writers = {{whole, 1}, {uneven(count, 8, 0, written), 8}};
        writers.push_back({{whole[0], {}, {}}, 1});  // ranks without elements
        if (written == none) writers.push_back({Cuts(3, {{0, count}}), 1});
        for (const auto &[writer, files] : writers) {
            save(dir, writer, count, written);
            EXPECT_EQ(names().size(), 1 + files);
            for (const size_t world : {1, 8}) load(dir, uneven(count, world, 1, read), count, read);
            fs::remove_all(dir);
        }
    }
    save(dir, {{{0, 700}, {700, block + 77}, {block + 777, 1000}}}, count, muons);
    expect_error(
        [&] {
            load(dir, {{{0, count}}}, count);
        },
        {"optimizer-00000-of-00001.safetensors: has no tensor \"v\" for elements [700, 1049276) of the model\n  fix: "});
}

TEST_F(Checkpoint, AFlippedBitIsNoticedAnywhere) {
    make({"step_3", "step_5", "step_7"});
    const std::string output_dir = dir, dir = output_dir + "/step_5", fix = "\n  fix: --resume " + output_dir + "/step_3";
    const Cuts cuts = uneven(60, 2, 0);
    save(dir, cuts, 60);
    const auto expect_damage = [&](const std::string &path, size_t at, int bits, const std::string &words) {
        flip(path, at, bits);
        Kept kept(60, {{0, 60}});
        expect_error([&] { load_optimizer(self, dir, kept.state()); }, {path, words, fix});
        flip(path, at, bits);
    };
    for (const size_t rank : {0, 1}) {
        const std::string path = dir + format("/optimizer-%05zu-of-00002.safetensors", rank);
        size_t n = 0;
        for (const Range &range : cuts[rank]) n += range.second;
        const size_t bytes = fs::file_size(path), data = bytes - 3 * n * sizeof(float);
        for (size_t at = 0; at < bytes; at++)
            expect_damage(path, at, 1 << at % 8,
                          at < data ? "its header differs from the written one"
                                    : format("tensor \"%s\" is damaged",
                                             std::vector{"master", "m", "v"}[(at - data) / (n * sizeof(float))]));
    }
    expect_damage(dir + "/optimizer.json", 9, 1, "");
    load(dir, cuts, 60);
}

TEST_F(Checkpoint, AFlippedBitInACheckedFileIsNoticed) {
    const std::string path = dir + "/state.json";
    const nlohmann::json value = {
        {"step", 4}, {"mean", 0.1}, {"cursor", nullptr}, {"data", "a/\xff/b"}, {"losses", {{"seen", 1e-300}}}};
    write_checked_json(path, value);
    const nlohmann::json right = read_checked_json(path, "");
    EXPECT_EQ(right.at("losses"), value["losses"]);
    for (size_t bit = 0; bit < 8 * fs::file_size(path); bit++) {
        flip(path, bit / 8, 1 << bit % 8);
        nlohmann::json read;
        const std::string error = error_of([&] { read = read_checked_json(path, "\n  fix: this"); });
        if (error == "no error") EXPECT_EQ(read, right);  // 1E-300 is 1e-300
        else expect_contains(error, {path, "\n  fix: this"});
        flip(path, bit / 8, 1 << bit % 8);
    }
    write_json(path, value);  // without a checksum
    expect_error([&] { read_checked_json(path, ""); }, {path, "is damaged"});
    write_file(path, "[]");
    expect_error([&] { read_checked_json(path, ""); }, {path, "is damaged"});
    fs::remove(path);
    EXPECT_EQ(error_of([&] { read_checked_json(path, "\n  fix: this"); }),
              path + ": cannot open: No such file or directory\n  fix: this");
}

TEST_F(Checkpoint, MessageNamesAnEarlierCheckpoint) {
    make({"step_9", "step_10", "step_11", "other"});
    EXPECT_EQ(other_checkpoint(dir + "/step_11"), "\n  fix: --resume " + dir + "/step_10");
    EXPECT_EQ(other_checkpoint(dir + "/step_10/"), "\n  fix: --resume " + dir + "/step_9");
    for (const char *name : {"/step_9", "/other"})
        expect_contains(other_checkpoint(dir + name), {"fix: --overwrite", "there is no checkpoint before"});
}

TEST_F(Checkpoint, DamagedBlockIsNamed) {
    const size_t count = 2 * block + 5;
    save(dir, {{{0, count}}}, count);
    const std::string path = dir + "/optimizer-00000-of-00001.safetensors",
                      words = format(": tensor \"v\" is damaged: elements [%zu, %zu)", 2 * block, count);
    flip(path, fs::file_size(path) - 1, 128);
    const std::pair<Cuts, const char *> readers[] = {{{{{0, count}}}, ""},
                                                     {{{{0, 2 * block + 4}}, {{2 * block + 4, 1}}}, ""},
                                                     {{{{0, block}}, {{block, block + 5}}}, "rank 1: "}};
    for (const auto &[cuts, rank] : readers) expect_error([&] { load(dir, cuts, count); }, {rank + path + words, "fix: "});
}

TEST_F(Checkpoint, VerifyComparesWithTheMemory) {
    Kept kept(60, {{10, 50}, {0, 10}});
    save_optimizer(self, dir, kept.state());
    kept.data[0][1][1] = 0.5f;
    expect_error([&] { verify_optimizer(self, dir, kept.state()); },
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
    fs::remove(dir + "/optimizer.json");
    expect_error([&] { load(dir, cuts, 1000); }, {"optimizer.json", "No such file"});
}

TEST_F(Checkpoint, WrongManifestsAreRefused) {
    save(dir, {{{0, 60}}, {{60, 40}}}, 100);
    const std::string path = dir + "/optimizer.json";
    const nlohmann::json right = read_checked_json(path, "");
    const struct {
        const char *field, *value, *words;  // null as the value: the field is removed
    } cases[] = {
        {"/version", nullptr, "version is missing"},
        {"/version", "2", "version is 2, but this program reads 1"},
        {"/elements", "\"100\"", "elements is \"100\", but must be an integer"},
        {"/elements", "99", "holds the state of 99 elements, but the model has 100"},
        {"/files", "{}", "files is missing or not a list"},
        {"/files/0", "3", "files[0] must be an object"},
        {"/files/0", nullptr, "elements [0, 60) are in no file"},
        {"/files/1/name", "3", "files[1].name is 3, but must be a string"},
        {"/files/1/name", "\"../x\"", "files[1].name is not a file name in the same directory"},
        {"/files/1/name", "\"optimizer-00000-of-00002.safetensors\"", "bytes, but"},
        {"/files/1/bytes", "-1", "files[1].bytes is -1, but must be an integer"},
        {"/files/1/header", "\"0\"", "header differs from the written one"},
        {"/files/1/parts", "null", "files[1].parts is missing or not a list"},
        {"/files/1/parts/0", "[]", "files[1].parts[0] must be an object"},
        {"/files/1/parts/0/count", "39", "elements [99, 100) are in no file"},
        {"/files/1/parts/0/count", "9223372036854775807", "files[1].parts[0].count reaches beyond the 100 elements"},
        {"/files/1/parts/0/global", "101", "files[1].parts[0].global is beyond the 100 elements"},
        {"/files/1/parts/0/global", "59", "elements [59, 60) are in two files"},
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
}

TEST_F(Checkpoint, FullDiskOfOneRankIsAnErrorOnAll) {
    const Cuts cuts = uneven(1000, 3, 0);
    for (const auto &[rank, file] :
         {std::pair("rank 1: ", "optimizer-00001-of-00003.safetensors"), {"rank 0: ", "optimizer.json"}}) {
        std::vector<std::string> errors(3);
        run(3, [&](Comm &comm) {
            Kept kept(1000, cuts[size_t(comm.rank)]);
            const auto fill = [&](const std::string &to) {
                if (comm.rank == 0) fs::create_symlink("/dev/full", to + "/" + file);
                comm.barrier();
                save_optimizer(comm, to, kept.state());
            };
            errors[size_t(comm.rank)] = error_of([&] { write_directory(comm, dir + "/step_1", fill); });
            EXPECT_TRUE(names().empty());  // before any rank continues
        });
        expect_contains(errors[0], {rank, file, "No space left on device", "fix: "});
        EXPECT_EQ(errors, std::vector(3, errors[0]));
    }
}

// ---- directories ----------------------------------------------------------------------------------------------------------------------

TEST_F(Checkpoint, DirectoryAppearsComplete) {
    make({"step_2", "step_2.tmp"});  // of an earlier run and of its crash
    run(3, [&](Comm &comm) {
        write_directory(comm, dir + "/step_2", [&](const std::string &to) {
            EXPECT_FALSE(fs::exists(to + "/trainer_state.json"));
            EXPECT_TRUE(exists("step_2/trainer_state.json"));  // still the old one
            write_file(to + format("/new_%d", comm.rank), "y");
        });
        for (int r = 0; r < 3; r++) EXPECT_TRUE(exists(format("step_2/new_%d", r)));
    });
    EXPECT_EQ(names(), Names({"step_2"}));
    EXPECT_FALSE(exists("step_2/trainer_state.json"));
}

TEST_F(Checkpoint, NothingRemainsAfterAnError) {
    make({"step_1"});
    for (const bool others_know : {true, false})  // or notice only that the rank has ended
        EXPECT_EQ(error_of([&] {
                      run(3, [&](Comm &comm) {
                          write_directory(comm, dir + "/step_1", [&](const std::string &to) {
                              const auto fail = [&] {
                                  if (comm.rank == 2) write_file(to + "/config.json", "y"), die("the disk is full");
                              };
                              others_know ? agree(comm, fail) : fail();
                          });
                      });
                  }),
                  "rank 2: the disk is full");
    EXPECT_EQ(names(), Names({"step_1"}));
    EXPECT_TRUE(exists("step_1/trainer_state.json"));
    expect_error([&] { write_directory(self, "/dev/null/step_1", [](const std::string &) {}); }, {"/dev/null/step_1"});
}

// Another thread looks, as a run does that is started after a crash: it never sees a directory of that name that lacks a file.
TEST_F(Checkpoint, DirectoryIsRenamedBeforeItsFilesAreRemoved) {
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
    for (int i = 0; i < 2; i++) remove_directory(path);  // the second time it is absent
    done = true;
    other.join();
    EXPECT_FALSE(torn);
    EXPECT_TRUE(names().empty());
}

TEST_F(Checkpoint, LatestCheckpointHasTheMostSteps) {
    EXPECT_EQ(latest_checkpoint(dir + "/absent"), "");
    make({"step_11.tmp", "step_trial", "step_012"});
    fs::create_directory(dir + "/step_12");
    EXPECT_EQ(latest_checkpoint(dir), "");
    make({"step_9", "step_10"});
    EXPECT_EQ(latest_checkpoint(dir), dir + "/step_10");  // also if a crash came before `latest` was written
}

// ---- the output directory ---------------------------------------------------------------------------------------------------------------

TEST_F(Checkpoint, DirectoryOfTheUserIsRefused) {
    for (const char *name : {"notes.txt", "model-00001-of-00002.safetensors", ".git", "run_files.txt"}) {
        put(name, "mine");
        expect_error([&] { OutputDirectory output(dir + "/"); },
                     {"holds files that no run wrote: " + std::string(name), "fix: "});
        EXPECT_EQ(names(), Names({name}));
        fs::remove(dir + "/" + name);
    }
    for (const char *name : {".DS_Store", ".nfs0001"}) put(name, "");  // written by operating systems
    fs::create_directory(dir + "/lost+found");
    EXPECT_FALSE(OutputDirectory(dir).holds_run());
    for (const char *name : {"../x", "/etc/x", "..", "./", "a/b/", ""}) {
        write_json(dir + "/run_files.json", {{"written", {name}}});
        expect_error([&] { OutputDirectory output(dir); }, {"run_files.json", "which is not a file name in that directory"});
    }
}

TEST_F(Checkpoint, OnlyListedFilesAreRemoved) {
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

// An earlier version of the program kept no list.
TEST_F(Checkpoint, RunOfAnEarlierVersionIsRecognised) {
    put("log.jsonl", "{\"task\": \"sft\", \"options\": {}}\n{\"step\": 1}\n");
    make({"step_1", "step_2.tmp", "step_3_notes"});
    put("model-00001-of-00002.safetensors", "mine");
    OutputDirectory output(dir);
    EXPECT_TRUE(output.holds_run());
    output.clear();
    EXPECT_EQ(names(), Names({"step_3_notes", "model-00001-of-00002.safetensors", "run_files.json"}));
}

TEST_F(Checkpoint, PublishedModelReplacesTheEarlierOne) {
    OutputDirectory output(dir);
    output.claim({"config.json", "model-00001-of-00001.safetensors", "log.jsonl", "new_model/"});
    make({"new_model/critic"});
    for (const char *name : {"config.json", "model-00001-of-00001.safetensors", "log.jsonl", "notes.txt"}) put(name, "old");
    for (const char *name : {"config.json", "model.safetensors"}) put(std::string("new_model/") + name, "new!");
    output.publish_model();
    EXPECT_EQ(names(), Names({"config.json", "model.safetensors", "critic", "log.jsonl", "notes.txt", "run_files.json"}));
    EXPECT_EQ(fs::file_size(dir + "/config.json"), 4u);
}

TEST_F(Checkpoint, PruningKeepsTheNewestAndFilesOfTheUser) {
    OutputDirectory output(dir);
    output.claim({"step_2/", "step_10/", "step_9/", "step_100/"});
    make({"step_2", "step_10", "step_9", "step_100", "step_1", "step_5_notes", "step_", "step_-3", "step_007", "other"});
    for (int i = 0; i < 2; i++) {  // the second time nothing is left to remove
        output.prune_checkpoints(2);
        EXPECT_EQ(names(), Names({"step_10", "step_100", "step_1", "step_5_notes", "step_", "step_-3", "step_007", "other",
                                  "run_files.json"}));
    }
}

TEST_F(Checkpoint, CheckpointsBeyondAResumedStepAreRemoved) {
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

TEST_F(Checkpoint, ImpossibleNumbersInTheTrainerStateAreRefused) {
    TrainerState state{};
    state.step = 3, state.cursor = 12, state.steps = 8;
    state.options = nlohmann::ordered_json::object();
    write_trainer_state(dir, state);
    const auto read = [&] { return read_trainer_state(dir, state, [](const std::string &) {}); };
    EXPECT_EQ(read().step, 3u);
    const std::string path = dir + "/trainer_state.json";
    const auto right = read_checked_json(path, "");
    const auto expect_refused = [&](const char *field, const char *value, const std::string &words) {
        nlohmann::json wrong = right;
        wrong[field] = nlohmann::json::parse(value);
        write_checked_json(path, wrong);
        expect_error([&] { read(); }, {path, words, "fix: "});
    };
    for (const char *field : {"step", "cursor", "steps", "samples", "skipped", "skips_in_a_row", "restarts", "seconds"})
        for (const char *value : {"9223372036854775808", "-1", "null", "\"3\"", "1e300"}) expect_refused(field, value, field);
    expect_refused("step", "9", "\"step\" is 9 of 8 steps");
}
