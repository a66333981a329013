"""A task: data, a model and what is measured, by name; a user's own is the same record.

    task = tessera.tasks.load("taobao-like", users=2_000, items=20_000)
    task = tessera.tasks.from_frame(frame, user="customer", item="sku")
    task = tessera.Task(name="mine", data=data, module=MyModule, tables=tessera.Tables({...}))

task.py      the record, and the settings that are recommended with it
kinds.py     the models over clicks, classes, words and ratings, and their options
known.py     what `load` knows by name
"""

from tessera.tasks.kinds import click_task, image_task, rating_task, text_task, word_task
from tessera.tasks.known import TASKS, Known, from_frame, from_text, known, load, own_names
from tessera.tasks.task import CentralSettings, Recommended, Task

__all__ = [
    "TASKS",
    "CentralSettings",
    "Known",
    "Recommended",
    "Task",
    "click_task",
    "from_frame",
    "from_text",
    "image_task",
    "known",
    "load",
    "own_names",
    "rating_task",
    "text_task",
    "word_task",
]
