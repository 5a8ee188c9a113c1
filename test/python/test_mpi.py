"""Ranks that are processes, through scripts/launch.sh; and what launch.sh itself does, with a stand-in for mpirun."""

import os
import pathlib
import shutil
import signal
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "scripts/launch.sh"
PROGRAM = ROOT / "build/test/mpi/test_comm_mpi"
needs_mpi = pytest.mark.skipif(
    not PROGRAM.exists() or not shutil.which("mpirun"), reason="no MPI, or make build/test/mpi/test_comm_mpi"
)


def ranks(np, what, timeout=120):
    """Exit code, standard output, the program's lines of standard error, seconds."""
    start = time.monotonic()
    result = subprocess.run(["bash", LAUNCH, "-np", str(np), PROGRAM, what], cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    return result.returncode, result.stdout, result.stderr, time.monotonic() - start


@needs_mpi
@pytest.mark.parametrize("np", [1, 2, 4])
def test_every_call(np):
    code, out, err, _ = ranks(np, "calls")
    assert code == 0, out + err
    assert f"{np} ranks: calls done" in out


@needs_mpi
def test_waiting_is_idle():
    code, out, err, _ = ranks(4, "idle")
    assert code == 0, out + err
    assert "4 ranks: idle done" in out
    print(out)


@needs_mpi
@pytest.mark.parametrize("what, said", [("throw", "rank 3: out of luck"), ("agree", "no such file"), ("kill", "")])
def test_an_error_ends_all_ranks_and_is_said_once(what, said):
    code, out, err, seconds = ranks(4, what)
    assert code != 0 and seconds < 30
    assert "done" not in out
    if said:
        assert err.count(said) == 1, err


@needs_mpi
def test_a_hung_run_ends_with_every_ranks_last_call():
    code, out, err, seconds = ranks(4, "hang")
    assert code != 0 and seconds < 30
    assert err.count("has waited longer than --comm_timeout 2") == 1, err
    for rank, state in enumerate(["in", "back from", "in", "in"]):
        assert f"  rank {rank}: {state} barrier test/mpi/test_comm_mpi.cpp:" in err


@needs_mpi
def test_without_mpirun_mpi_is_left_alone():
    result = subprocess.run([PROGRAM], capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr == "not started by mpirun\n"


# ---- launch.sh ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def stand_in(tmp_path):
    """An mpirun that tells its version, or prints its arguments and runs the program once."""

    def make(version):
        script = tmp_path / "mpirun"
        script.write_text(f"""#!/bin/bash
if [ "$1" = --version ]; then echo '{version}'; exit; fi
echo "mpirun $*; $OMP_NUM_THREADS threads, ${{OMP_WAIT_POLICY-as usual}}"
while [ "$1" != bash ]; do shift; done
exec "$@"
""")
        script.chmod(0o755)
        environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")}
        return environment | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    return make


def launch(arguments, environment):
    return subprocess.run(["bash", LAUNCH, *arguments], env=environment, capture_output=True, text=True, timeout=60)


def test_launch_adds_what_open_mpi_needs_and_prints_the_command(stand_in):
    environment = stand_in("mpirun (Open MPI) 4.1.4")
    result = launch(["-np", "1000", "bash", "-c", "exit 7", "a b"], environment)
    assert result.returncode == 7
    command = result.stderr.strip()
    for option in ["--oversubscribe", "--bind-to none", "-x OMP_NUM_THREADS -x OMP_WAIT_POLICY", "odls_base_sigkill_timeout 5", "-np 1000", "a\\ b"]:
        assert option in command
    assert ("--allow-run-as-root" in command) == (os.getuid() == 0)
    assert command.startswith("OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive mpirun ") and "; 1 threads, passive" in result.stdout
    one, cores = ["-np", "1", "bash", "-c", "true"], len(os.sched_getaffinity(0))
    assert f"; {cores} threads, as usual" in launch(one, environment).stdout
    assert "OMP_WAIT_POLICY" not in launch(one, environment).stderr
    more = environment | {"OMP_NUM_THREADS": str(cores + 1)}
    assert f"; {cores + 1} threads, passive" in launch(one, more).stdout
    assert f"; {cores + 1} threads, active" in launch(one, more | {"OMP_WAIT_POLICY": "active"}).stdout


def test_launch_with_mpich(stand_in):
    result = launch(["-np", "2", "bash", "-c", "true"], stand_in("HYDRA build details: Version: 4.0.2"))
    assert result.returncode == 0
    assert "mpirun --bind-to none -np 2 bash -c true;" in result.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_launch_passes_signals_on_and_waits_for_the_end(stand_in, number):
    program = 'trap "echo saving; sleep 0.5; echo saved; exit 138" USR1; echo ready; while :; do sleep 0.05; done'
    environment = stand_in("mpirun (Open MPI) 4.1.4")
    process = subprocess.Popen(["bash", LAUNCH, "-np", "2", "bash", "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
    while "ready" != process.stdout.readline().strip():
        assert process.poll() is None
    process.send_signal(number)
    assert process.communicate(timeout=30)[0] == "saving\nsaved\n"
    assert process.returncode == 138


@pytest.mark.parametrize("arguments", [[], ["bash", "-n", "3"], ["-np", "none", "bash"]])
def test_launch_asks_for_the_number_of_ranks(stand_in, arguments):
    result = launch(arguments, stand_in("mpirun (Open MPI) 4.1.4"))
    assert result.returncode == 1 and "fix: scripts/launch.sh -np 8 ./train_llama" in result.stderr
