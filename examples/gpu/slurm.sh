#!/bin/sh
# A SLURM cluster: the check on one node, then the run on two nodes of eight GPUs, one task a GPU.
# Run it on a login node, from a folder that all nodes see, with PARTITION set.
set -eu
pip install 'holdfast[cuda13,slurm]'
srun --partition "$PARTITION" --nodes 1 --ntasks 1 --gpus-per-node 8 --time 10 holdfast selftest
holdfast submit "$(dirname "$0")/first.yaml" --name first --partition "$PARTITION" \
    --nodes 2 --gpus-per-node 8 --time 2:00:00
holdfast queue status
