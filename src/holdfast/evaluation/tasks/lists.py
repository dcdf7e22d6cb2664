"""`lists`: small operations on lists of digits (four answers)."""

from holdfast.evaluation.tasks.base import Task
from holdfast.registry import evaluations

evaluations.register("lists", help="choice of 4: operations on short lists, generated")(Task("lists"))
