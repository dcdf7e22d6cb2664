#!/bin/sh
# A slice of TPU machines: the check on each host alone, then the run on all of them.
# SLICE names the slice, HOSTS how many hosts it has, ADDRESS is the first host's; /shared is mounted on all of them and
# has this folder's first.yaml.
set -eu
on_all() { gcloud compute tpus tpu-vm ssh "$SLICE" --worker=all --command "$1"; }
on_all "pip install 'holdfast[tpu]'"
# A host by itself: its own four chips, as 2 x 2 (a v5e host of eight: 2,4,1).
on_all "TPU_PROCESS_BOUNDS=1,1,1 TPU_CHIPS_PER_PROCESS_BOUNDS=${CHIPS:-2,2,1} TPU_VISIBLE_DEVICES=${DEVICES:-0,1,2,3} \
    holdfast selftest"
on_all "number=\$(curl -s -H 'Metadata-Flavor: Google' \
        http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number)
    HOLDFAST_CACHE=/shared/cache holdfast run /shared/first.yaml --out /shared/runs --name first \
        --coordinator $ADDRESS:8482 --processes $HOSTS --process-id \$number"
