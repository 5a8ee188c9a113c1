// Runs the project's data tools, which are written in Python.
#pragma once
#include <string>
#include <vector>

std::string python_program();  // the project's own Python if `make deps` made one, else whatever python3 is

// Runs a script of the project, such as "data/prepare.py", with arguments, and returns its standard output; with `shows` the
// output is for people, and is written to our standard error at once. If it fails, dies with its standard error; where there is no Python, dies
// with a message that names `purpose`, which needs it.
std::string run_python(const std::string &purpose, const std::string &script, const std::vector<std::string> &arguments,
                       bool shows = false);
