# Sourced by the .sbatch files: what they share. Nothing in here depends on the site.

help() { # FILE: its header, and the lines to edit
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$1" | sed '/^SBATCH/d; /^#/d'
    echo "edit in $1:"
    grep -n 'EDIT' "$1" | grep -v 'marked EDIT' | sed 's/^/  line /'
}

begin() { # SCRIPT ARGUMENTS...: sets output and arguments, which name it
    local name=$1 previous=''
    shift
    output=''
    arguments=("$@")
    for argument in "$@"; do
        [[ $previous != --output ]] || output=$argument
        [[ $argument != --output=* ]] || output=${argument#*=}
        previous=$argument
    done
    if [[ -z $output ]]; then # the same after every requeue
        output=runs/$name/slurm-$SLURM_JOB_ID
        arguments+=(--output "$output")
    fi
    mkdir -p "$output/logs"
    # srun does not take it from the job by itself
    [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
    echo "job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}, $SLURM_JOB_NUM_NODES nodes ($SLURM_JOB_NODELIST): $output"
}

train_until_complete() { # COMMAND...: run it; a run that was stopped goes on when the job is started again
    local warned='' cancelled='' started=$output/logs/started pid state code=0
    rm -f "$output/stop"
    touch "$started"
    trap 'warned=1' USR1
    trap 'cancelled=1' TERM
    "$@" &
    pid=$!
    while kill -0 "$pid" 2>/dev/null; do
        if [[ -z $warned ]]; then
            wait "$pid" || : # a trap ends it early
        else # No rank gets Slurm's warning itself: a file does reach all of them, on every node.
            touch "$output/stop" # again and again: a run that is just starting takes it for an older one, once
            sleep 1
        fi
    done
    wait "$pid" || code=$?
    rm -f "$output/stop"

    if [[ ! $output/status.json -nt $started ]]; then
        say "the run did not begin (exit $code)"
        exit $((code ? code : 1))
    fi
    state=$(sed -n 's/.*"state": *"\([a-z]*\)".*/\1/p' "$output/status.json")
    say "the run is $state (exit $code)"
    case $state in
    complete) exit 0 ;;
    failed) exit $((code ? code : 1)) ;;
    esac
    [[ -z $cancelled ]] || exit $((code ? code : 1)) # cancelled, or being requeued by somebody else
    if [[ -z $warned && $state == stopped && $code == 0 ]]; then
        say "somebody asked it to stop; it goes on with: sbatch ... --output $output --resume auto"
        exit 0
    fi
    [[ $output/last.pt -nt $started ]] || { say "it saved nothing in this time: not queued again"; exit 1; }
    ((${SLURM_RESTART_COUNT:-0} < max_restarts)) || { say "it was started again $max_restarts times: not queued again"; exit 1; }
    say "queued again"
    scontrol requeue "$SLURM_JOB_ID" && exit 0 # from here on Slurm looks at no exit code
    say "Slurm refuses to queue it again; it goes on with: sbatch ... --output $output --resume auto"
    exit 1
}

say() { printf '%(%F %T)T job %s: %s\n' -1 "$SLURM_JOB_ID" "$1"; }

free_port() { # of this node, which is the job's first; the job's number makes it another for every job
    local port=$((15000 + SLURM_JOB_ID % 15000))
    while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((15000 + (port + 1) % 15000)); done
    echo "$port"
}

first_node() { # its name, which the others must be able to reach
    local name address
    name=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    address=$(srun --overlap --nodes=1 --ntasks=1 --relative=$((SLURM_JOB_NUM_NODES - 1)) --cpus-per-task=1 getent ahostsv4 "$name" | head -n 1)
    case ${address%% *} in
    127.*)
        ((SLURM_JOB_NUM_NODES == 1)) || { echo "error: the first node is a loopback address (${address%% *}) on the others; $name; mend /etc/hosts or the name server" >&2; return 1; } ;;
    '') echo "error: the first node has no address; $name; mend /etc/hosts or the name server" >&2; return 1 ;;
    esac
    echo "$name"
}
