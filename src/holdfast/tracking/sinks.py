"""The built-in trackers, one file each; importing this module registers them."""

from holdfast.tracking import console as console
from holdfast.tracking import jsonl as jsonl
from holdfast.tracking import mlflow as mlflow
from holdfast.tracking import tensorboard as tensorboard
from holdfast.tracking import trackio as trackio
from holdfast.tracking import wandb as wandb
