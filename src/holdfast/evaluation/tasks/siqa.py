"""`siqa`: what people do, want and feel in everyday situations (three answers)."""

from holdfast.evaluation.tasks.base import Task
from holdfast.registry import evaluations

evaluations.register("siqa", help="choice of 3: everyday social situations")(Task("siqa"))
