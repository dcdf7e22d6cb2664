#!/usr/bin/env bash
# A real SLURM of one node on this machine, for tests: start_slurm.sh FOLDER starts it (or says that it runs), and
# start_slurm.sh --stop FOLDER ends it. Everything it writes is below FOLDER; programs find it by the variable
# SLURM_CONF=FOLDER/slurm.conf. Needs root and Debian's packages slurm-wlm and munge.
set -euo pipefail

say() { printf 'start_slurm: %s\n' "$*" >&2; }
die() {
    say "$1"
    shift
    for log in "$@"; do
        [[ -s $log ]] && { printf -- '--- the end of %s\n' "$log"; tail -n 15 "$log"; } >&2
    done
    exit 1
}

stop=0
[[ ${1:-} == --stop ]] && { stop=1; shift; }
(($# == 1)) || die "usage: start_slurm.sh [--stop] FOLDER"
folder=$(realpath -m -- "$1")
export SLURM_CONF=$folder/slurm.conf

alive() { # alive NAME: whether the daemon whose process id NAME.pid holds still runs
    local pid
    pid=$(cat "$folder/$1.pid" 2>/dev/null) && [[ -n $pid && $(cat "/proc/$pid/comm" 2>/dev/null) == "$1" ]]
}

if ((stop)); then
    for name in slurmd slurmctld munged; do
        alive "$name" || continue
        pid=$(cat "$folder/$name.pid")
        kill "$pid" 2>/dev/null || true
        # Its last writes come after its pid file is gone: FOLDER may be removed once the process itself is.
        for _ in {1..100}; do
            [[ $(ps -o stat= -p "$pid" 2>/dev/null) == [^Z]* ]] || continue 2
            sleep 0.1
        done
        kill -KILL "$pid" 2>/dev/null || true
        say "$name had to be killed"
    done
    exit 0
fi

((EUID == 0)) || die "needs root: slurmd starts jobs as their users"
for program in munged slurmctld slurmd sinfo srun; do
    command -v "$program" >/dev/null || PATH=$PATH:/usr/sbin command -v "$program" >/dev/null ||
        die "$program is not installed: apt-get install slurm-wlm munge"
done
PATH=$PATH:/usr/sbin

(umask 022 && mkdir -p "$folder"/{state,spool,munge})
for parent in "$folder" "$folder/munge"; do chown root:root "$parent" && chmod 755 "$parent"; done

free_port() { # a port of this machine that nothing listens at
    local port
    while :; do
        port=$((20000 + RANDOM % 10000))
        (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || { echo "$port"; return; }
    done
}

host=$(hostname -s)
if [[ ! -s $SLURM_CONF ]]; then
    # Two CPUs are promised whatever the machine has, so that a job of two tasks always fits. Jobs of the partition
    # `urgent` push out those of `normal`, which are queued again; `patient` is the same with a grace time. A job that
    # was queued again starts after cred_expire seconds, by default 120.
    cat >"$SLURM_CONF" <<CONF
ClusterName=holdfast-tests
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket,cred_expire=5
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=100000
KillWait=20
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=normal Nodes=$host Default=YES MaxTime=INFINITE PriorityTier=1 State=UP
PartitionName=patient Nodes=$host MaxTime=INFINITE PriorityTier=1 GraceTime=60 State=UP
PartitionName=urgent Nodes=$host MaxTime=INFINITE PriorityTier=10 PreemptMode=off State=UP
CONF
fi
key=$folder/munge/key
[[ -s $key ]] || (umask 077 && head -c 1024 /dev/urandom >"$key")

start() { # start NAME COMMAND...: in the background, in a session of its own, so that it outlives this script
    local name=$1
    shift
    alive "$name" && return
    setsid "$@" </dev/null >>"$folder/$name.out" 2>&1 || die "$name does not start" "$folder/$name.out"
    for _ in {1..50}; do
        alive "$name" && return
        sleep 0.1
    done
    die "$name ended at once" "$folder/$name.out" "$folder/$name.log"
}

# As root, and whatever the mode of the folders above: the key is this test's alone.
start munged munged --force --num-threads=2 --key-file="$key" --socket="$folder/munge/socket" \
    --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munge/seed"
start slurmctld slurmctld
start slurmd slurmd

for _ in {1..100}; do
    state=$(sinfo -h -o %T -N 2>&1 | head -n 1 || true)
    case $state in
    idle | mixed | allocated | completing) say "ready: $(sinfo -V), node $host is $state, SLURM_CONF=$SLURM_CONF"; exit 0 ;;
    down* | drain*) scontrol update "NodeName=$host" State=RESUME Reason=none 2>/dev/null || true ;;
    esac
    sleep 0.2
done
die "the node is not ready: $state" "$folder/slurmctld.log" "$folder/slurmd.log"
