"""The built-in trackers, one file each; importing this module registers them."""

from holdfast.tracking import console as console
from holdfast.tracking import jsonl as jsonl
from holdfast.tracking import tensorboard as tensorboard
from holdfast.tracking import wandb as wandb
