// Runs the project's data tools, which are written in Python.
#pragma once
#include <string>
#include <vector>

std::string python_program();  // the project's own Python if `make deps` has installed one, else python3

// Runs a script of the project, such as "data/prepare.py", with arguments, and returns its standard output; with `shows` the output is for the user,
// and appears on our standard error at once. If the script fails, dies with its standard error. Without Python, dies with a message that names
// `purpose`, which needs Python.
std::string run_python(const std::string &purpose, const std::string &script, const std::vector<std::string> &arguments,
                       bool shows = false);

// Runs a script with this program's standard streams, for output of its own, and returns its exit code. `called` is the name that the script uses for
// itself, such as "./train_llama plot".
int call_python(const std::string &called, const std::string &script, const std::vector<std::string> &arguments);
