// Runs the project's data tools, which are written in Python.
#pragma once
#include <string>
#include <vector>

std::string python_program();  // the project's own Python if `make deps` made one, else whatever python3 is

// Runs a script of the project, such as "data/prepare.py", with arguments, and returns what it wrote to its standard output; with `shows` that
// is for people, and goes to our standard error at once. Dies with what it wrote to its standard error if it fails, and where there is no Python
// with a message that names `purpose`, which needs it.
std::string run_python(const std::string &purpose, const std::string &script, const std::vector<std::string> &arguments,
                       bool shows = false);
