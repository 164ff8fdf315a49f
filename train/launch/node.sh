#!/bin/bash
# Starts this node's ranks; every other file of this folder calls it:
#   node.sh NUMBER_OF_NODES RANK_OF_THIS_NODE ADDRESS_OF_NODE_0 --config train/config.yaml ...
# NPROC: ranks per node (default: one per GPU). PORT: a free port of node 0.
cd "$(dirname "$0")/../.." || exit
nodes=$1 rank=$2 head=$3
shift 3
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}  # seconds, for the last save
exec torchrun --nnodes="$nodes" --node_rank="$rank" --nproc_per_node="${NPROC:-gpu}" \
    --master_addr="$head" --master_port="${PORT:-29500}" --max_restarts=3 run_train.py "$@"
