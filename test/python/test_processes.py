"""Ranks as processes: over MPI through scripts/launch.sh, or started by hand over sockets, with strangers at the socket. And launch.sh itself, with a
stand-in for mpirun."""

import contextlib
import hmac
import os
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from runs import ROOT, stand_in

LAUNCH = ROOT / "scripts/launch.sh"
PROGRAM = ROOT / "build/test/processes/test_processes"
pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="make build/test/processes/test_processes")


def over_mpi(np, *what):
    """Exit code, standard output, standard error."""
    if not shutil.which("mpirun"):
        pytest.skip("no mpirun")
    result = subprocess.run(["bash", LAUNCH, "-np", str(np), PROGRAM, *what], cwd=ROOT, capture_output=True, text=True, timeout=300)
    if "built without MPI" in result.stderr:
        pytest.skip("built without MPI")
    return result.returncode, result.stdout, result.stderr


def free_address(host="127.0.0.1"):
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as s:
        s.bind((host, 0))
        return f"[{host}]:{s.getsockname()[1]}" if ":" in host else f"{host}:{s.getsockname()[1]}"


def start(what, rank, world, address, *timeout, secret=""):
    command = [PROGRAM, what, rank, world, address, *timeout]
    environment = os.environ | {"LLMC_RENDEZVOUS_SECRET": secret}
    return subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def ends(processes, timeout=60):
    """Exit code, standard output and standard error of each process; ends those that still run."""
    try:
        said = [p.communicate(timeout=timeout) for p in processes]
        return [(p.returncode, *texts) for p, texts in zip(processes, said)]
    finally:
        for p in processes:
            p.kill()


def all_of(results):
    """The first exit code that is not 0, and the joined outputs."""
    codes, outs, errs = zip(*results)
    return next((code for code in codes if code), 0), "".join(outs), "".join(errs)


def by_hand(np, what, address=None):
    address = address or free_address()
    return all_of(ends([start(what, rank, np, address) for rank in range(np)], 120))


def expect_done(result, what):
    code, out, err = result
    assert code == 0 and f"{what} done" in out, out + err


@pytest.fixture(scope="module", params=[over_mpi, by_hand])
def ended(request):
    """The results of runs: {(ranks, what they do): exit code, standard output, standard error}. They run at the same time, because mpirun mostly waits."""
    runs = [(2, "calls"), *((4, what) for what in ("calls", "idle", "throw", "agree", "kill", "hang"))]
    runs += [(4, "agree_late")] * (request.param == over_mpi)

    def soon(run):
        begin = time.monotonic()
        result = request.param(*run)
        assert result[0] == 0 or time.monotonic() - begin < 30
        return result

    with ThreadPoolExecutor(len(runs)) as pool:
        return dict(zip(runs, pool.map(soon, runs)))


@pytest.mark.parametrize("ranks, what", [(2, "calls"), (4, "calls"), (4, "idle")])
def test_calls_and_idle_waits(ended, ranks, what):
    expect_done(ended[ranks, what], f"{ranks} ranks: {what}")


def test_an_error_ends_all_ranks_with_one_message(ended):
    said = {"throw": "rank 3: out of luck", "agree": "no such file", "agree_late": "no such file\n", "kill": "",  # agree_late: during an exchange
            "hang": "has waited longer than --comm_timeout 2"}
    for (_, what), (code, out, err) in ended.items():
        if what in said:
            assert code != 0 and "done" not in out and (what == "kill" or err.count(said[what]) == 1), what + err
    for rank, state in enumerate(["in", "back from", "in", "in"]):
        assert f"  rank {rank}: {state} barrier test/processes/test_processes.cpp:" in ended[4, "hang"][2]


@pytest.mark.slow
def test_a_slice_of_more_than_2_gib():
    expect_done(over_mpi(2, "large"), "2 ranks: large")


def test_without_mpirun_mpi_is_not_started():
    result = subprocess.run([PROGRAM], capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr == "not started by mpirun\n"


# ---- started by hand --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "::1"])
def test_names_and_ipv6(host):
    try:
        port = free_address("::1").rsplit(":", 1)[1]
    except OSError:
        pytest.skip("no IPv6 here")
    expect_done(by_hand(3, "agreement", f"[{host}]:{port}" if ":" in host else f"{host}:{port}"), "3 ranks: agreement")


@pytest.mark.parametrize("what, rank, times", [("kill", 3, 1), ("kill_first", 0, 3)])
def test_a_killed_rank_is_named(what, rank, times):
    """Rank 0 names it; if rank 0 itself was killed, all others do."""
    begin = time.monotonic()
    address = free_address()
    results = ends([start(what, r, 4, address) for r in range(4)])
    assert time.monotonic() - begin < 30
    assert sorted(code for code, _, _ in results) == [-signal.SIGKILL, 1, 1, 1]
    _, _, err = all_of(results)
    assert err.startswith(f"rank {rank} is gone") and err.count(" is gone") == err.count("fix: ") == times, err


def test_a_stopped_process_does_not_stop_the_others():
    address = free_address()
    processes = [start("stop", rank, 3, address) for rank in range(3)]
    try:
        (first, _, err), (third, _, other) = ends([processes[0], processes[2]])
    finally:
        processes[1].kill()
        processes[1].communicate()
    assert (first, third, other) == (1, 1, "")
    assert "  rank 0: in barrier" in err and "  rank 1: back from barrier" in err and "  rank 2: in barrier" in err, err


def one(rank, world, address, *timeout, secret=""):
    """The message of a rank that cannot connect."""
    begin = time.monotonic()
    ((code, out, err),) = ends([start("agreement", rank, world, address, *timeout, secret=secret)])
    assert code == 1 and out == "" and time.monotonic() - begin < 30
    assert err.count("\n  fix: ") == 1, err
    return err


NO_ADDRESSES = ["", "node1", "node1:", ":29500", "node1:0", "node1:65536", "node1:http", "node1:-1", "node1:99999999999", "::1:29500", "[::1]"]


@pytest.mark.parametrize("rank, world, address, said", [
    *[(1, 2, address, f'--rendezvous "{address}" is not HOST:PORT') for address in NO_ADDRESSES],
    (2, 2, None, "--rank 2/2: there is no such process"), (-1, 2, None, "--rank -1/2: "), (2**32, 2, None, "--rank 4294967296/2: "),
    (0, 0, None, "--rank 0/0"), (0, 2**32 + 2, None, "--rank 0/4294967298"),
    (1, 2, "no.such.host.invalid:29500", 'there is no host "no.such.host.invalid"'),
    (0, 2, "192.0.2.1:29500", "cannot listen at 192.0.2.1:29500: Cannot assign requested address")])
def test_wrong_ranks_and_addresses(rank, world, address, said):
    assert said in one(rank, world, free_address() if address is None else address, secret="0123456789abcdef")


def test_missing_ranks_are_named():
    address = free_address()
    (code, _, err), (code_2, _, err_2) = ends([start("agreement", rank, 4, address, 2) for rank in [0, 2]])
    assert code == 1 and f"some of the 4 ranks have not connected to {address} within 2 s: 1, 3\n  fix: " in err
    assert code_2 == 1 and f"rank 0 at {address} ended before all ranks had connected\n  fix: " in err_2


@contextlib.contextmanager
def listener(answer):
    """Another program that answers at the address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


# ---- strangers --------------------------------------------------------------------------------------------------------------------------

SECRET, OTHER = "0123456789abcdef", "0123456789abcdee"
HELLO, APPLICATION, FRAME = 8 + 4 + 32, 4 + 4 + 32 + 32, 32 + 128  # bytes


def connected(address):
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            host, port = address.rsplit(":", 1)
            return socket.create_connection((host, int(port)))
        time.sleep(0.05)


def hello(connection):
    said = connection.recv(HELLO, socket.MSG_WAITALL)
    assert said.startswith(b"llmcrank")
    return said


def is_closed(connection):
    """True after the end of the stream."""
    connection.settimeout(20)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            pass
    return True


def application(secret, said, rank, world):
    nonce = os.urandom(32)
    proof = hmac.digest(secret.encode(), b"rank %d of %d" % (rank, world) + said[-32:] + nonce, "sha256")
    return struct.pack("=ii", rank, world) + nonce + proof


STRANGERS = {
    "half an application": lambda said: application(SECRET, said, 1, 2)[:-1],
    "HTTP": lambda said: b"GET / HTTP/1.0\r\n\r\n" * 10,
    "ones": lambda said: b"\xff" * 100_000,
    "no secret": lambda said: application("", said, 1, 2),
    "another secret": lambda said: application(OTHER, said, 1, 2),
    "a proof of another rank": lambda said: struct.pack("=ii", 1, 2) + application(SECRET, said, 0, 2)[8:],
    "a proof for another hello": lambda said: application(SECRET, os.urandom(HELLO), 1, 2),
    "rank -1": lambda said: application(SECRET, said, -1, 2),
    "a larger world": lambda said: application(SECRET, said, 1, 2**31 - 1),
}


def test_strangers_are_closed_and_do_not_disturb():
    """Neither hundreds of connections nor a slow one delay the ranks."""
    address = free_address()
    first = start("agreement", 0, 2, address, secret=SECRET)
    for name, says in STRANGERS.items():
        with connected(address) as stranger:
            stranger.sendall(says(hello(stranger)))
            if name in ("rank -1", "a larger world"):
                assert len(stranger.recv(40, socket.MSG_WAITALL)) == 40  # a connection with the secret gets an answer
            assert is_closed(stranger), name
    with contextlib.ExitStack() as stack:
        slow = stack.enter_context(connected(address))
        crowd = [stack.enter_context(connected(address)) for _ in range(600)]
        for number, stranger in enumerate(crowd):
            with contextlib.suppress(OSError):
                stranger.sendall(b"x" * (number % APPLICATION))
        expect_done(all_of(ends([first, start("agreement", 1, 2, address, secret=SECRET)])), "2 ranks: agreement")
        assert is_closed(slow) and is_closed(crowd[0]) and is_closed(crowd[-1])


@pytest.mark.parametrize("frame", [b"\xff" * FRAME, *(struct.pack("=Iiiii4xQ", 0, 0, 0, 2, count, size) + bytes(128)
                                                      for count, size in ((1, 2**34), (2**30, 4)))])
def test_a_frame_that_no_rank_sends_ends_the_run(frame):
    """Lengths are checked even from a process that knows the secret."""
    address = free_address()
    first = start("agreement", 0, 2, address, secret=SECRET)
    with connected(address) as false:
        false.sendall(application(SECRET, hello(false), 1, 2))
        assert false.recv(41, socket.MSG_WAITALL)[-1:] == b"!"  # the answer, and the sign to start
        false.sendall(frame)
        ((code, out, err),) = ends([first])
    assert (code, out) == (1, "") and err.startswith("rank 1 has sent an unknown message\n  fix: "), err


def test_the_socket_is_closed_after_the_start():
    address = free_address()
    ranks = [start("kill_first" if rank else "hang", rank, 2, address, secret=SECRET) for rank in (0, 1)]
    time.sleep(1)
    try:
        host, port = address.rsplit(":", 1)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)))
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_ranks_with_other_secrets_are_refused():
    address = free_address()
    first = start("agreement", 0, 2, address, 4, secret=SECRET)
    for secret in ["", OTHER]:
        assert f"rank 0 at {address} does not know this rank's secret\n  fix: set the same LLMC_RENDEZVOUS_SECRET" in one(1, 2, address, secret=secret)
    ((code, _, err),) = ends([first])
    assert code == 1 and "(2 connections had another secret)" in err


@pytest.mark.parametrize("secret, said", [("", "no secret keeps them out"), ("short", "so short that it can be guessed")])
def test_a_public_address_needs_a_long_secret(secret, said):
    for rank in (0, 1):
        err = one(rank, 2, "192.0.2.1:29500", secret=secret)
        assert said in err and "fix: set the same LLMC_RENDEZVOUS_SECRET" in err


def false_rank_0(proof):
    """Answers with a valid greeting and a wrong proof of the secret."""
    def serve(connection):
        connection.sendall(b"llmcrank" + struct.pack("=I", 2) + os.urandom(32))
        connection.recv(APPLICATION, socket.MSG_WAITALL)
        connection.sendall(proof)

    return serve


@pytest.mark.parametrize("answer, said", [
    (lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"), "another program answers at {}, not rank 0"),
    (lambda connection: None, "another program answers at {}, not rank 0"), (lambda connection: time.sleep(4), "another program answers at {}, not rank 0"),
    *((false_rank_0(proof), "rank 0 at {} does not know this rank's secret") for proof in (b"\0" * 40, b"x" * 39))])
def test_a_program_that_is_not_rank_0(answer, said):
    with listener(answer) as address:
        assert said.format(address) in one(1, 2, address, 3, secret=SECRET)


def test_wrong_ranks_are_refused_and_the_run_continues():
    address = free_address()
    right = [start("agreement", rank, 3, address) for rank in [0, 1]]
    time.sleep(0.5)
    assert f"another process is already rank 1 at {address}" in one(1, 3, address)
    assert f"this process has --rank 1/2, but rank 0 at {address} has 0/3" in one(1, 2, address)
    assert f"cannot listen at {address}: Address already in use" in one(0, 3, address)
    expect_done(all_of(ends([*right, start("agreement", 2, 3, address)])), "3 ranks: agreement")


def test_a_rank_may_be_restarted_before_all_are_connected():
    """The order of the starts does not matter."""
    address = free_address()
    second, first = start("agreement", 1, 3, address), start("agreement", 0, 3, address)
    time.sleep(0.5)
    second.kill()
    second.communicate()
    expect_done(all_of(ends([first, *(start("agreement", rank, 3, address) for rank in [2, 1])])), "3 ranks: agreement")


@pytest.mark.slow
def test_two_hosts():
    result = subprocess.run(["bash", ROOT / "test/two_hosts.sh"], capture_output=True, text=True, timeout=300)
    if result.returncode == 77:
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, result.stdout + result.stderr


# ---- launch.sh ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def open_mpi(tmp_path):
    """An environment whose mpirun prints its version, or prints its arguments and runs the program once."""
    stand_in(tmp_path / "mpirun", """
if [ "$1" = --version ]; then echo 'mpirun (Open MPI) 4.1.4'; exit; fi
echo "mpirun $*; $OMP_NUM_THREADS threads, ${OMP_WAIT_POLICY-as usual}, store ${PMIX_MCA_gds-as usual}"
while [ "$1" != bash ]; do shift; done
exec "$@"
""")
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "PMIX_MCA_gds")}
    return environment | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def launch(arguments, environment):
    return subprocess.run(["bash", LAUNCH, *arguments], env=environment, capture_output=True, text=True, timeout=60)


def test_launch_adds_options_of_open_mpi_and_prints_the_command(open_mpi):
    result = launch(["-np", "1000", "bash", "-c", "exit 7", "a b"], open_mpi)
    assert result.returncode == 7
    command = result.stderr.strip()
    for option in ["--oversubscribe", "--bind-to none", "-x OMP_NUM_THREADS -x OMP_WAIT_POLICY", "odls_base_sigkill_timeout 5", "-np 1000", "a\\ b"]:
        assert option in command
    assert ("--allow-run-as-root" in command) == (os.getuid() == 0)
    assert command.startswith("OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive mpirun ") and "; 1 threads, passive, store hash\n" in result.stdout
    one, cores = ["-np", "1", "bash", "-c", "true"], len(os.sched_getaffinity(0))
    more = {"OMP_NUM_THREADS": str(cores + 1)}
    for changes, printed in (({}, f"; {cores} threads, as usual, store hash\n"), ({"PMIX_MCA_gds": "ds21"}, "store ds21\n"),
                             (more, f"; {cores + 1} threads, passive"), (more | {"OMP_WAIT_POLICY": "active"}, f"; {cores + 1} threads, active")):
        assert printed in launch(one, open_mpi | changes).stdout


INTELS_MPIRUN = """
if [ "$1" = --version ]; then echo 'Intel(R) MPI Library for Linux* OS, Version 2021.19'; exit; fi
mpiexec.hydra "$@"
exit $?
"""
INTELS_MPIEXEC = """
while [ "$1" != bash ]; do shift; done
"$@" &
trap "kill -USR1 $!" USR1
wait $! || wait $!
"""


@pytest.mark.parametrize("number, mpi", [(signal.SIGTERM, ""), (signal.SIGUSR1, ""), (signal.SIGKILL, ""), (signal.SIGTERM, "Intel's"), (signal.SIGKILL, "Intel's")])
def test_launch_forwards_signals_and_waits_for_the_end(open_mpi, number, mpi, tmp_path):
    """Intel's mpirun is a shell script, which does not forward signals. If launch.sh is killed, the ranks also end."""
    if mpi:
        stand_in(tmp_path / "mpirun", INTELS_MPIRUN)
        stand_in(tmp_path / "mpiexec.hydra", INTELS_MPIEXEC)
    program = 'trap "echo saving; sleep 0.5; echo saved; exit 138" USR1; echo ready; while :; do sleep 0.05; done'
    process = subprocess.Popen(["bash", LAUNCH, "-np", "2", "bash", "-c", program], env=open_mpi, stdout=subprocess.PIPE, text=True)
    while "ready" != process.stdout.readline().strip():
        assert process.poll() is None
    process.send_signal(number)
    assert process.communicate(timeout=30)[0] == "saving\nsaved\n"
    assert process.returncode == (-number if number == signal.SIGKILL else 138)
