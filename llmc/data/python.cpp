#include "python.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "../core/common.h"
#include "../core/file.h"

std::string python_program() {
    const std::string own = program_file(".venv/bin/python3");
    return std::filesystem::exists(own) ? own : "python3";
}

static std::string read_all(int fd) {
    std::string text;
    char buffer[4096];
    for (ssize_t n; (n = read(fd, buffer, sizeof(buffer))) != 0;)
        if (n > 0) text.append(buffer, size_t(n));
        else if (errno != EINTR) break;
    close(fd);
    return text;
}

std::string run_python(const std::string &purpose, const std::string &script, const std::vector<std::string> &arguments,
                       bool shows) {
    std::vector<std::string> command = {python_program(), program_file(script)};
    command.insert(command.end(), arguments.begin(), arguments.end());
    std::vector<char *> argv;
    for (std::string &a : command) argv.push_back(a.data());
    argv.push_back(nullptr);
    fflush(stdout);
    int errors[2];
    const int output = memfd_create("output", MFD_CLOEXEC);
    const pid_t child = output >= 0 && pipe2(errors, O_CLOEXEC) == 0 ? fork() : -1;
    if (child < 0)
        die("cannot start %s: %s\n  fix: close other programs, which hold memory, processes or open files", command[0].c_str(),
            strerror(errno));
    if (child == 0) {
        dup2(shows ? STDERR_FILENO : output, STDOUT_FILENO);  // a program may be reading our standard output
        dup2(errors[1], STDERR_FILENO);                       // read for the error message
        execvp(argv[0], argv.data());
        _exit(127);
    }
    close(errors[1]);
    std::string message = read_all(errors[0]);
    while (!message.empty() && message.back() == '\n') message.pop_back();
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    lseek(output, 0, SEEK_SET);
    const std::string out = read_all(output);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
        if (!message.empty()) fprintf(stderr, "%s\n", message.c_str());
        return out;
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 127)
        die("%s needs Python, but %s does not exist\n  fix: make deps", purpose.c_str(), command[0].c_str());
    if (message.empty())
        die("%s ended with status %d and no message\n  fix: start it by hand to see why; no free memory is a usual reason",
            script.c_str(), status);
    die("%s", message.c_str());
}
