#!/bin/bash
# launch.sh -np RANKS [options of mpirun] PROGRAM ARGUMENTS...
# Starts a program on several ranks with mpirun of Open MPI, MPICH or Intel MPI, with the options that most machines need, and prints the command:
#   more ranks than cores, and root, are allowed; ranks are not bound to cores; OMP_NUM_THREADS is cores / ranks unless it is set;
#   OMP_WAIT_POLICY is passive, unless it is set, if there are more threads than cores: a waiting thread must not block another one;
#   PMIX_MCA_gds is hash, unless it is set: PMIx's default store in shared memory has a lock that a killed rank may hold forever,
#   and mpirun would wait for this lock after all ranks have ended.
# SIGTERM and SIGUSR1 to this script reach every rank as SIGUSR1; then train_llama saves a checkpoint and stops, without a time limit. So it does if
# this script is killed.
# (A SIGTERM to mpirun itself ends the ranks: Open MPI waits, sends them SIGTERM, waits again, and sends SIGKILL. Both waits, 1 second
# by default, become 5 seconds; longer waits would delay the end of a run after the death of a rank.)
set -euo pipefail

ranks=""
arguments=("$@")
for ((i = 0; i + 1 < $#; i++)); do
    case ${arguments[i]} in
        -np | -n) ranks=${arguments[i + 1]} && break ;;
        -*) ;;
        *) [[ $i -gt 0 && ${arguments[i - 1]} == -* ]] || break ;;  # the program
    esac
done
if ! [[ $ranks =~ ^[1-9][0-9]*$ ]]; then
    printf 'launch.sh: how many ranks?\n  fix: scripts/launch.sh -np 8 ./train_llama ...\n' >&2
    exit 1
fi
if ! version=$(mpirun --version 2> /dev/null); then
    printf 'launch.sh: there is no mpirun here\n  fix: make deps, or the packages libopenmpi-dev and openmpi-bin; then make\n' >&2
    exit 1
fi

cores=$(env -u OMP_NUM_THREADS nproc 2> /dev/null || sysctl -n hw.ncpu)  # nproc would print OMP_NUM_THREADS
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}
((OMP_NUM_THREADS * ranks <= cores)) || export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
options=(--bind-to none)
if [[ $version == *"Open MPI"* ]]; then  # MPICH passes the environment on, allows root and counts no cores
    export PMIX_MCA_gds=${PMIX_MCA_gds:-hash}
    options=(--oversubscribe --bind-to none -x OMP_NUM_THREADS ${OMP_WAIT_POLICY:+-x OMP_WAIT_POLICY} --mca odls_base_sigkill_timeout 5)
    [ "$(id -u)" != 0 ] || options+=(--allow-run-as-root)
fi

printf 'OMP_NUM_THREADS=%s%s' "$OMP_NUM_THREADS" "${OMP_WAIT_POLICY:+ OMP_WAIT_POLICY=$OMP_WAIT_POLICY}" >&2
printf ' %q' mpirun "${options[@]}" "$@" >&2
printf '\n' >&2
mpirun "${options[@]}" "$@" <&0 &
mpirun=$!
stop_ranks() {  # Intel's mpirun is a shell script, whose child forwards signals
    kill -USR1 "$(pgrep -P "$mpirun" mpiexec || echo "$mpirun")"
}
trap stop_ranks TERM USR1
trap : INT  # the terminal also sends SIGINT to mpirun
exec 9> >(trap '' INT TERM USR1; cat > /dev/null; stop_ranks 2> /dev/null)  # reads until this script ends in any way
code=0
while wait $mpirun && code=0 || code=$?; kill -0 $mpirun 2> /dev/null; do :; done
exit $code
