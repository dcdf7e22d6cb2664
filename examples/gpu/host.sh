#!/bin/sh
# One host with NVIDIA GPUs, one process for all of them. The driver must be there; CUDA itself comes with the packages.
set -eu
pip install 'holdfast[cuda13]'
holdfast selftest
holdfast run "$(dirname "$0")/first.yaml" --name first
