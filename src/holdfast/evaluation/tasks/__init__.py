"""Evaluations by name, one small file each; the user's own come from `data/sources`."""

from holdfast.evaluation.tasks import (  # noqa: F401 (importing them registers them)
    arithmetic,
    lists,
    mnli,
    qqp,
    siqa,
    sst2,
)
from holdfast.evaluation.tasks.base import Task, find_task

__all__ = ["Task", "find_task"]
