#!/usr/bin/env bash
# A real Slurm on one machine, for the tests: a controller and two nodes, each in Linux namespaces of its own, so each
# has a host name, an address, ports, pids, /dev/shm and a local disk (DIR/local). Everything else of the file
# system is shared, as a cluster shares its home. Needs root; installs Debian's packages where they are missing.
#
#   bash tests/slurm/up.sh DIR          # DIR: short (unix sockets lie in it), without blanks
#   PATH=DIR/bin:$PATH sbatch ...       # sbatch, srun, squeue, scontrol, scancel
#   bash tests/slurm/down.sh DIR
#
# All of it descends from one process, the first of its pid namespace: with that one everything ends.
set -euo pipefail
umask 022
net=198.51.100 # the addresses within: .1 the controller, .11 and .12 the nodes; no route leads out
freezer=/sys/fs/cgroup/freezer

controller() { # the first process of the whole cluster
    start_host ctl
    ip link add br0 type bridge
    ip addr add $net.1/24 dev br0
    ip link set br0 up
    munged --force --socket="$dir/run/munge.sock" --key-file="$dir/etc/munge.key" --pid-file="$dir/run/munged.pid" \
        --log-file="$dir/log/munged.log" --seed-file="$dir/run/munged.seed"
    slurmctld -c
    for number in 1 2; do
        unshare --net --uts --ipc --mount --pid --fork --kill-child --mount-proc bash "$self" --node "$number" "$dir" \
            >>"$dir/log/node$number.out" 2>&1 &
        while ! pid=$(cat "/proc/$!/task/$!/children" 2>/dev/null) || [[ -z $pid ]]; do sleep 0.02; done
        ip link add v$number type veth peer name eth0 netns "${pid% }"
        ip link set v$number master br0 up
    done
    touch "$dir/run/ready"
    while :; do sleep 3600 & wait $! || :; done # reaps what is left to it
}

node() { # the first process of node $1
    local name=node$1
    if [[ -d $freezer/$group/$name && -z ${3:-} ]]; then # its own cgroup: Slurm then finds every process of a job
        echo 0 >"$freezer/$group/$name/cgroup.procs"
        exec unshare --cgroup --mount bash "$self" --node "$1" "$dir" in_group
    fi
    if [[ -n ${3:-} ]]; then
        umount "$freezer"
        mount -t cgroup -o freezer cgroup "$freezer"
    fi
    start_host "$name"
    mount -t tmpfs -o mode=1777 tmpfs "$dir/local"
    while ! ip addr add $net.$((10 + $1))/24 dev eth0 2>/dev/null; do sleep 0.02; done
    ip link set eth0 up
    slurmd -c
    while :; do sleep 3600 & wait $! || :; done
}

start_host() { # name, private mounts, loopback
    hostname "$1"
    mount --make-rprivate /
    mkdir -p /etc/slurm
    mount --bind "$dir/etc" /etc/slurm
    mount --bind "$dir/etc/hosts" /etc/hosts
    mount -t tmpfs -o mode=1777 tmpfs /dev/shm
    ip link set lo up
}

configure() {
    local proctrack=linuxproc number
    mkdir -p "$dir"/{bin,etc,run,log,state,spool,local}
    if [[ -d $freezer ]] && mkdir -p "$freezer/$group"/node{1,2} 2>/dev/null; then proctrack=cgroup; fi
    head -c 128 /dev/urandom >"$dir/etc/munge.key"
    chmod 600 "$dir/etc/munge.key"
    printf '127.0.0.1 localhost\n%s.1 ctl\n%s.11 node1\n%s.12 node2\n' $net $net $net >"$dir/etc/hosts"
    echo 'CgroupPlugin=cgroup/v1' >"$dir/etc/cgroup.conf"
    : >"$dir/etc/plugstack.conf"
    # A GPU that nobody opens: any device file will do.
    echo 'NodeName=node[1-2] Name=gpu File=/dev/zero' >"$dir/etc/gres.conf"
    echo 'NodeName=node[1-2] Name=gpu File=/dev/full' >>"$dir/etc/gres.conf"
    cat >"$dir/etc/slurm.conf" <<EOT
ClusterName=test
SlurmctldHost=ctl($net.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/run/munge.sock
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/$proctrack
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd-%n.pid
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
# What a node has is what this file says, whatever the machine has.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=100000,bf_interval=2
JobRequeue=1
KillWait=15
MinJobAge=86400
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=20
EnforcePartLimits=ALL
NodeName=node[1-2] NodeAddr=$net.[11-12] CPUs=16 Boards=1 SocketsPerBoard=1 CoresPerSocket=16 ThreadsPerCore=1 RealMemory=262144 Gres=gpu:2
PartitionName=batch Nodes=ALL Default=YES MaxTime=UNLIMITED DefaultTime=10
EOT
    cat >"$dir/bin/.client" <<'EOT'
#!/usr/bin/env bash
# A Slurm command, named as this file is called, run within the controller's namespaces.
here=$(cd "$(dirname "$0")" && pwd)
read -r pid _ <"$here/../run/pid"
export PATH=${PATH//"$here:"/} # a job inherits it, and must find the real commands
exec nsenter -t "$pid" -n -u -m -i -p -- env -C "$PWD" "/usr/bin/${0##*/}" "$@"
EOT
    chmod 755 "$dir/bin/.client"
    for number in sbatch srun squeue sinfo scontrol scancel; do ln -sf .client "$dir/bin/$number"; done
}

install_packages() {
    local missing=() name
    for name in munge slurmctld slurmd slurm-client iproute2 util-linux; do
        dpkg -s "$name" 2>/dev/null | grep -q '^Status: .* installed' || missing+=("$name")
    done
    ((${#missing[@]})) || return 0
    echo "installing ${missing[*]}" >&2
    # Debian's packages start their daemons unless this file forbids it.
    [[ -e /usr/sbin/policy-rc.d ]] || { printf '#!/bin/sh\nexit 101\n' | install -m 755 /dev/stdin /usr/sbin/policy-rc.d; trap 'rm -f /usr/sbin/policy-rc.d' EXIT; }
    { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"; } \
        >"$dir/log/apt.log" 2>&1 || { tail -n 5 "$dir/log/apt.log" >&2; exit 3; } # 3: for want of packages
}

self=$(readlink -f "${BASH_SOURCE[0]}")
if [[ $1 == --controller ]]; then dir=$2; else if [[ $1 == --node ]]; then dir=$3; else dir=$1; fi; fi
mkdir -p "$dir"/log
dir=$(cd "$dir" && pwd -P)
group=slurm-$(cksum <<<"$dir" | cut -d ' ' -f 1)
case $1 in
--controller) controller ;;
--node) node "$2" "$dir" "${4:-}" ;;
*)
    [[ $EUID == 0 ]] || { echo "needs root: namespaces and Slurm's daemons" >&2; exit 1; }
    install_packages
    configure
    setsid unshare --net --uts --ipc --mount --pid --fork --kill-child --mount-proc bash "$self" --controller "$dir" \
        </dev/null >"$dir/log/controller.out" 2>&1 &
    for ((i = 0; i < 600; i++)); do
        pid=$(cat "/proc/$!/task/$!/children" 2>/dev/null) || { cat "$dir"/log/*.out >&2; exit 1; }
        [[ -z $pid ]] || echo "$pid $(cut -d ' ' -f 22 "/proc/${pid% }/stat")" >"$dir/run/pid"
        if [[ -e $dir/run/ready && $("$dir/bin/sinfo" -h -N -o %t 2>/dev/null | grep -c idle) == 2 ]]; then exit 0; fi
        sleep 0.1
    done
    cat "$dir"/log/*.out "$dir"/log/slurm*.log >&2
    exit 1
    ;;
esac
