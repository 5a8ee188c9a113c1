#include "signals.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <initializer_list>

static constexpr double repeats_within = 1;  // seconds in which shells and launchers send a signal again

// The program's only globals, because a signal handler has nowhere else to read and write.
static std::atomic<int> received = 0;
static std::atomic<double> received_at = 0;
static std::atomic<const char *> main_rank_stops = nullptr;  // null: signals are not caught on the main rank
static thread_local bool is_main = false, finishes = false;
static_assert(std::atomic<double>::is_always_lock_free && std::atomic<const char *>::is_always_lock_free);

static double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

static const char *name_of_signal(int number) {
    return number == SIGINT ? "SIGINT" : number == SIGTERM ? "SIGTERM" : number == SIGUSR1 ? "SIGUSR1" : "SIGHUP";
}

extern "C" void remember_signal(int number) {
    if (received) {
        if (now() - received_at < repeats_within) return;
        signal(number, SIG_DFL);
        raise(number);
        return;
    }
    received_at = now(), received = number;
    const char *const when = main_rank_stops;
    if (!when) return;
    char line[256] = "";
    for (const char *text : {name_of_signal(number), ": the run stops ", when, "; a second signal ends it at once\n"})
        strncat(line, text, sizeof(line) - strlen(line) - 1);
    if (write(STDERR_FILENO, line, strlen(line)) < 0) return;  // nobody reads it
}

static void handle(void (*handler)(int)) {
    struct sigaction action = {};
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;
    for (int number : {SIGINT, SIGTERM, SIGUSR1}) sigaction(number, &action, nullptr);
    if (struct sigaction before; sigaction(SIGHUP, nullptr, &before) == 0 && before.sa_handler != SIG_IGN)  // as nohup sets it
        sigaction(SIGHUP, &action, nullptr);
}

CaughtSignals::CaughtSignals(bool is_main_rank) {
    is_main = is_main_rank;
    if (is_main) main_rank_stops = "within this step";
    handle(remember_signal);
}
CaughtSignals::~CaughtSignals() {
    handle(SIG_DFL);
    if (is_main) main_rank_stops = nullptr;
    is_main = false;
}

Activity::Activity(const char *when, Kind kind) : outer_(main_rank_stops), outer_finishes_(finishes) {
    if (is_main) main_rank_stops = when;
    finishes = finishes || kind == is_finished;
}
Activity::~Activity() {
    if (is_main) main_rank_stops = outer_;
    finishes = outer_finishes_;
}

bool asked_to_stop() { return received && !finishes; }

void stop_if_asked() {
    if (asked_to_stop()) throw Stopped(received);
}

void expect_interrupts() { signal(SIGINT, SIG_DFL); }
