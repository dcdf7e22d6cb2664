"""`sst2`: is a sentence of a film review positive or negative (two answers)."""

from holdfast.evaluation.tasks.base import Task
from holdfast.registry import evaluations

evaluations.register("sst2", help="choice of 2: is a sentence positive or negative")(Task("sst2"))
