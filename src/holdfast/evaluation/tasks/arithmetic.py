"""`arithmetic`: sums and differences below a hundred (four answers)."""

from holdfast.evaluation.tasks.base import Task
from holdfast.registry import evaluations

evaluations.register("arithmetic", help="choice of 4: sums and differences, generated")(Task("arithmetic"))
