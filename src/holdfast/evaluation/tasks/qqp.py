"""`qqp`: do two questions ask the same (two answers)."""

from holdfast.evaluation.tasks.base import Task
from holdfast.registry import evaluations

evaluations.register("qqp", help="choice of 2: do two questions ask the same")(Task("qqp"))
