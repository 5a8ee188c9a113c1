#include "reporter.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "../core/common.h"
#include "../core/file.h"
#include "../data/python.h"

Reporter::Reporter(const std::string &where, const std::string &log, const std::string &to) {
    const std::string python = python_program(), program = program_file("scripts/report.py"), flag = "--" + where;
    process_ = fork();
    if (process_ < 0)
        die("cannot start %s: %s\n  fix: close other programs, which hold memory, processes or open files", python.c_str(),
            strerror(errno));
    if (process_ > 0) return;
    prctl(PR_SET_PDEATHSIG, SIGTERM);  // ends it cleanly even if the run is killed
    setpgid(0, 0);                     // Ctrl-C only goes to the run, which may save first
    dup2(STDERR_FILENO, STDOUT_FILENO);
    execlp(python.c_str(), python.c_str(), program.c_str(), log.c_str(), flag.c_str(), to.c_str(), "--follow", nullptr);
    _exit(127);
}

Reporter::~Reporter() {
    if (process_ < 0) return;
    kill(process_, SIGTERM);
    finish();
}

bool Reporter::finish() {
    int status = 0;
    while (waitpid(process_, &status, 0) < 0 && errno == EINTR) {}
    process_ = -1;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}
