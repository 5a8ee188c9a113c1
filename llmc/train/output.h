// The output directory of a run. It may also contain files of the user: only files that a run wrote are replaced or removed there.
//
// OUTPUT_DIR/run_files.json   {"written": ["config.json", ..., "step_7/", ...]}: names of files, and of directories; in a listed directory the
//                             files with names that runs use belong to runs. A name is listed before it is written. No "X.tmp" outlives a run
//                             that listed X.
// OUTPUT_DIR/latest           the newest checkpoint, for users and scripts
//
// A saved model is written into a separate directory, and its files then move to OUTPUT_DIR. config.json or adapter_config.json is removed first and
// moved last, so a directory that has it contains the whole model.
#pragma once
#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "../core/file.h"

struct Comm;
struct Run;

// Writes a temporary directory; rank 0 then renames it. All ranks call fill(dir), which may call comm and must end in an error on all ranks (agree)
// or on none. After an error nothing remains on the disk. In an existing directory of this name, the files of runs are removed and other files are
// kept.
void write_directory(Comm &comm, const std::string &path, const std::function<void(const std::string &)> &fill);

// Removes the files of runs from a directory, and the directory itself if it is then empty. It is renamed first, so a crash leaves no partial
// directory under its name.
void remove_directory(const std::string &path);

inline constexpr const char *model_name = "new_model";  // a model before it is published

class OutputDirectory {
  public:
    // Creates and locks the directory. Dies unless it is new or empty or holds a run.
    explicit OutputDirectory(const std::string &path);
    ~OutputDirectory();  // removes the list if the run has left no files
    OutputDirectory(const OutputDirectory &) = delete;

    bool holds_run() const;    // true for more than the unfinished save of a killed run
    bool holds_model() const;  // or an adapter: a run ended here
    // Dies if `path` is the output directory, or a part of its run.
    void refuse_input(const char *flag, const std::string &path) const;

    // Names of files, and of directories with a trailing slash. Both functions die if the user has a file of such a name there.
    void expect_free(const std::vector<std::string> &names) const;
    void claim(const std::vector<std::string> &names);  // adds the names to the list

    void remove(const std::string &name);     // removes the files of runs under this name, if it is listed
    void clear(const std::string &but = "");  // removes all files of runs, except `but`
    void remove_leftovers();                  // removes leftovers of killed runs
    void publish_model();                     // moves the files of new_model/ here, replacing an earlier model's
    std::vector<std::string> model_in(const std::string &directory) const;  // names of a model's files

    void set_latest(size_t step);
    void prune_checkpoints(size_t max_num);                                                  // removes the oldest
    std::vector<std::string> checkpoints_beyond(size_t step, size_t last = SIZE_MAX) const;  // of any origin
    // Removes checkpoints of later steps, which a resumed run will write again; `latest` becomes `step`.
    void remove_checkpoints_beyond(size_t step);

  private:
    std::string path_of(const std::string &name) const { return path_ + "/" + name; }
    bool has(const std::string &name) const { return names_.contains(name); }
    void read_list();
    void adopt_earlier_run();
    void write_list() const;
    void forget(const std::string &name);

    const std::string path_;
    DirectoryLock lock_;
    std::set<std::string> names_;
};

std::vector<std::pair<const char *, std::string>> inputs_of(const Run &run);  // flags and paths of the run's inputs
void check_results(const Run &run);  // dies if a result file named by a flag would replace an input, or a file that no run wrote
