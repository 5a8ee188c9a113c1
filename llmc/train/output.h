// The directory that a run writes to, in which there may be files of the user. Only files that a run wrote are replaced or removed there.
//
// OUTPUT_DIR/run_files.json   {"written": ["config.json", ..., "step_7/", ...]}: files by their names, and directories, in which those files are of
//                             runs that have a name which runs give. A name is listed before it is written. Nothing that is called "X.tmp"
//                             outlives a run that listed X.
// OUTPUT_DIR/latest           the newest checkpoint, for people and scripts
//
// A saved model is written into a directory of its own, whose files then move to OUTPUT_DIR: config.json or adapter_config.json is the first to go and
// the last to come, so that a directory that has it has the whole model.
#pragma once
#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "../core/file.h"

struct Comm;
struct Run;

// Writes a temporary directory, to which rank 0 then gives its name. All ranks call fill(dir), which may call comm and must end in an error on
// all ranks (agree) or on none. After an error nothing remains on the disk. A directory that had the name loses what runs wrote into it; other files stay.
void write_directory(Comm &comm, const std::string &path, const std::function<void(const std::string &)> &fill);

// Removes what runs wrote into a directory; and the directory, unless there is more in it. It is renamed first, so that a crash leaves no half of it under
// its name.
void remove_directory(const std::string &path);

inline constexpr const char *model_name = "new_model";  // a model that is not yet published

class OutputDirectory {
  public:
    // Makes the directory and locks it. Dies unless it is new or empty or holds a run.
    explicit OutputDirectory(const std::string &path);
    ~OutputDirectory();  // a run that has left nothing leaves no list
    OutputDirectory(const OutputDirectory &) = delete;

    bool holds_run() const;  // more than the unfinished save of a killed run
    // Dies if `path` is the output directory, or a part of the run there.
    void refuse_input(const char *flag, const std::string &path) const;

    // Names of files, and of directories with a slash behind. Both die if the user has something of such a name there.
    void expect_free(const std::vector<std::string> &names) const;
    void claim(const std::vector<std::string> &names);  // lists them

    void remove(const std::string &name);     // what runs wrote under a name that may be listed
    void clear(const std::string &but = "");  // everything that runs wrote, `but` excepted
    void remove_leftovers();                  // of runs that were killed
    void publish_model();                     // moves the files of new_model/ here, replacing an earlier model's
    std::vector<std::string> model_in(const std::string &directory) const;  // the names of such files

    void set_latest(size_t step);
    void prune_checkpoints(size_t max_num);                                                  // removes the oldest
    std::vector<std::string> checkpoints_beyond(size_t step, size_t last = SIZE_MAX) const;  // of any origin
    // Removes checkpoints of later steps, which a resumed run writes anew; `latest` becomes `step`.
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
void check_results(const Run &run);  // dies if a file that a flag names would replace an input, or a file that no run wrote
