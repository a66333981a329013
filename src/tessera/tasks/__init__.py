"""A task: data, a model and what is measured, by name; a user's own is the same record.

    task = tessera.tasks.load("taobao-like", users=2_000, items=20_000)
    task = tessera.tasks.from_frame(frame, user="customer", item="sku")
    task = tessera.Task(name="mine", data=data, module=MyModule, tables=tessera.Tables({...}))

task.py      the record, and the settings that are recommended with it
clicks.py    click-through models over any click data
classes.py   networks without tables, for the class of a question or an image
words.py     the next word, by a softmax over the table of words
ratings.py   matrix factorisation over ratings, with or without private masks
options.py   what their options mean
known.py     what `load` knows by name
"""

from tessera.tasks.classes import image_task, text_task
from tessera.tasks.clicks import click_task
from tessera.tasks.known import TASKS, Known, from_frame, from_text, known, load, own_names
from tessera.tasks.ratings import rating_task
from tessera.tasks.task import CentralSettings, Recommended, Task
from tessera.tasks.words import word_task

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
