"""The tasks that models are fine-tuned and measured on: what they are, and rows that have been checked."""

from saobp.data.tasks.catalogue import ALL, GLUE, TASKS, TaskSpec, choose_tasks, get_task
from saobp.data.tasks.load import Split, Task, load_split, load_task

__all__ = [
    "ALL",
    "GLUE",
    "TASKS",
    "Split",
    "Task",
    "TaskSpec",
    "choose_tasks",
    "get_task",
    "load_split",
    "load_task",
]
