#!/bin/bash
# test/two_hosts.sh [PROGRAM]
# Trains three steps of the demo on two hosts that share every sequence, and compares the losses with one rank's. The hosts are network namespaces of
# this machine with separate host names and a cable (veth) between them; they share only the disk, so MPI starts the second rank over the cable and
# exchanges the ring's messages over TCP. Exit code 77: skipped, because namespaces are not allowed or Open MPI is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
program=${1:-./train_llama}

skip() { printf 'skipped: %s\n' "$1"; exit 77; }
fail() { printf 'FAILED: %s\n' "$1" >&2; exit 1; }

[[ $(mpirun --version 2> /dev/null) == *"Open MPI"* ]] || skip "no Open MPI"
[[ $(ldd "$program") == *libmpi* ]] || skip "$program was built without MPI"
for tool in ip unshare; do command -v $tool > /dev/null || skip "no command $tool (packages iproute2, util-linux)"; done
hosts=(llmc-a-$$ llmc-b-$$) addresses=(10.231.0.1 10.231.0.2)
ip netns add "${hosts[0]}" 2> /dev/null || skip "network namespaces are not allowed here (they need root)"

work=$(mktemp -d)
trap 'for host in "${hosts[@]}"; do ip netns del "$host" 2> /dev/null; done; rm -rf "$work"' EXIT
ip netns add "${hosts[1]}"
unshare --uts true 2> /dev/null || skip "separate host names are not allowed here"
ip link add cable netns "${hosts[0]}" type veth peer name cable netns "${hosts[1]}" 2> /dev/null || skip "veth pairs are not allowed here"
for i in 0 1; do
    ip -n "${hosts[i]}" addr add "${addresses[i]}/24" dev cable
    ip -n "${hosts[i]}" link set lo up
    ip -n "${hosts[i]}" link set cable up
    printf '%s slots=1\n' "${addresses[i]}" >> "$work/hosts"
done

cat > "$work/on" << 'END'
#!/bin/bash
# on HOST COMMAND...
exec ip netns exec "$1" unshare --uts bash -c 'hostname "$0" && exec "$@"' "$@"
END
cat > "$work/rsh" << END
#!/bin/bash
# A replacement for ssh. mpirun calls it with an address and the command line of its daemon.
exec "$work/on" ${hosts[1]} bash -c "\${*:2}"
END
chmod +x "$work/on" "$work/rsh"

export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
demo=("$program" demo --device cpu --max_steps 3)
"${demo[@]}" --output_dir "$work/one" > /dev/null
root=()
[ "$(id -u)" != 0 ] || root=(--allow-run-as-root)
"$work/on" "${hosts[0]}" mpirun "${root[@]}" -np 2 --hostfile "$work/hosts" --bind-to none -x OMP_NUM_THREADS -x OMP_WAIT_POLICY \
    --mca plm_rsh_agent "$work/rsh" --mca oob_tcp_if_include cable --mca pml ob1 --mca btl tcp,self --mca btl_tcp_if_include cable \
    "${demo[@]}" --ring_attn_size 2 --output_dir "$work/two" --comm_timeout 60 > "$work/said"

note="ranks 0 to 1 share their sequences between the hosts ${hosts[0]} and ${hosts[1]}: keys and values cross the network"
grep -q "$note" "$work/said" || fail "the run on two hosts did not print: $note"
sent=$(grep -oP '"sent_\w+":\K\d+' "$work/two/log.jsonl" | awk '{ sum += $1 } END { print sum }')
crossed=0
for host in "${hosts[@]}"; do crossed=$((crossed + $(ip netns exec "$host" cat /sys/class/net/cable/statistics/tx_bytes))); done
printf 'the steps sent %d bytes by the log; %d crossed the cable in all\n' "$sent" "$crossed"
((sent > 0 && crossed >= sent)) || fail "the messages did not cross the cable"
python3 scripts/compare_runs.py "$work/one" "$work/two" --loss 1e-5
