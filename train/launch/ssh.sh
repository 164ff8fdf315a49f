#!/bin/bash
# train/launch/ssh.sh "10.0.0.1 10.0.0.2" --config train/config.yaml --out_dir /shared/out
# The addresses by which the machines reach each other; this folder has the same path on all of them.
# SIGTERM, Ctrl-C or the end of any node stops all of them after a save; the same command continues.
read -ra nodes <<< "$1"
shift
for rank in "${!nodes[@]}"; do
    # A terminal (-tt), so that the end of this connection reaches the ranks as SIGHUP.
    ssh -tt "${nodes[rank]}" "PATH=$(printf %q "$PATH") NPROC=$NPROC PORT=$PORT exec $(printf %q "$PWD")/train/launch/node.sh \
        ${#nodes[@]} $rank ${nodes[0]} $(printf '%q ' "$@")" < /dev/null &
done
trap 'kill $(jobs -p)' TERM INT
for _ in "${nodes[@]}"; do
    wait -n || { code=$?; kill $(jobs -p) 2> /dev/null; wait; exit $code; }
done
