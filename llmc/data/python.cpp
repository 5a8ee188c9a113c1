#include "python.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "../core/common.h"
#include "../core/file.h"

std::string python_program() {
    const std::string own = program_file(".venv/bin/python3");
    return std::filesystem::exists(own) ? own : "python3";
}

// The argument list of a script for exec; it refers to the texts of `words`.
struct Words {
    std::vector<std::string> words;
    std::vector<char *> argv;

    Words(const std::string &script, const std::vector<std::string> &arguments) : words{python_program(), program_file(script)} {
        words.insert(words.end(), arguments.begin(), arguments.end());
        for (std::string &word : words) argv.push_back(word.data());
        argv.push_back(nullptr);
    }
};

[[noreturn]] static void cannot_start(const std::string &python) {
    die("cannot start %s: %s\n  fix: close other programs, which hold memory, processes or open files", python.c_str(),
        strerror(errno));
}

static int wait_for(pid_t child) {
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    return status;
}

int call_python(const std::string &called, const std::string &script, const std::vector<std::string> &arguments) {
    if (!std::filesystem::exists(program_file(script)))
        die("%s, which is a part of this program, does not exist\n  fix: run the program from the source tree in which it was built, or through a link to it",
            program_file(script).c_str());
    Words command(script, arguments);
    fflush(stdout);
    signal(SIGINT, SIG_IGN);  // Ctrl-C goes to the script as well, which ends by itself
    const pid_t child = fork();
    if (child < 0) cannot_start(command.words[0]);
    if (child == 0) {
        signal(SIGINT, SIG_DFL);
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        setenv("CALLED_AS", called.c_str(), 1);
        execvp(command.argv[0], command.argv.data());
        _exit(127);
    }
    const int status = wait_for(child);
    signal(SIGINT, SIG_DFL);
    if (WIFSIGNALED(status)) return 128 + WTERMSIG(status);
    if (WEXITSTATUS(status) == 127)
        die("%s needs Python, but %s does not exist\n  fix: make deps", called.c_str(), command.argv[0]);
    return WEXITSTATUS(status);
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
    Words command(script, arguments);
    fflush(stdout);
    int errors[2];
    const int output = memfd_create("output", MFD_CLOEXEC);
    const pid_t child = output >= 0 && pipe2(errors, O_CLOEXEC) == 0 ? fork() : -1;
    if (child < 0) cannot_start(command.words[0]);
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGTERM);  // its temporary files and its own child processes end even if this process is killed
        dup2(shows ? STDERR_FILENO : output, STDOUT_FILENO);  // a program may be reading our standard output
        dup2(errors[1], STDERR_FILENO);                       // read for the error message
        execvp(command.argv[0], command.argv.data());
        _exit(127);
    }
    close(errors[1]);
    std::string message = read_all(errors[0]);
    while (!message.empty() && message.back() == '\n') message.pop_back();
    const int status = wait_for(child);
    lseek(output, 0, SEEK_SET);
    const std::string out = read_all(output);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
        if (!message.empty()) fprintf(stderr, "%s\n", message.c_str());
        return out;
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 127)
        die("%s needs Python, but %s does not exist\n  fix: make deps", purpose.c_str(), command.argv[0]);
    if (message.empty())
        die("%s ended with status %d and no message\n  fix: start it by hand to see why; no free memory is a usual reason",
            script.c_str(), status);
    throw Error(message);
}
