#!/usr/bin/env bash
# Ends the cluster that up.sh started in DIR: its first process, and with that the kernel ends all others.
#
#   bash tests/slurm/down.sh DIR
set -euo pipefail
dir=$(cd "$1" && pwd -P)
group=/sys/fs/cgroup/freezer/slurm-$(cksum <<<"$dir" | cut -d ' ' -f 1)
read -r pid started <"$dir/run/pid" || exit 0
if [[ $(cut -d ' ' -f 22 "/proc/$pid/stat" 2>/dev/null) == "$started" ]]; then kill -KILL "$pid"; fi
for ((i = 0; i < 100; i++)); do # the cgroups are empty when the last process has left
    [[ -d $group ]] && find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || break
    sleep 0.05
done
[[ ! -d $group ]] || find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || :
rm -f "$dir/run/pid" "$dir/run/ready"
