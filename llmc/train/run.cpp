#include "run.h"

#include "../core/common.h"

void Run::say(const char *text, ...) const {
    if (!speaks()) return;
    va_list args;
    va_start(args, text);
    printf("%s\n", vformat(text, args).c_str());
    va_end(args);
    fflush(stdout);
}
