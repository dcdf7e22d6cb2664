"""`mnli`: does the premise entail the hypothesis, contradict it, or neither (three answers)."""

from holdfast.evaluation.tasks.base import Task
from holdfast.registry import evaluations

evaluations.register("mnli", help="choice of 3: does a premise entail a hypothesis")(Task("mnli"))
