"""From a plan to a job folder, and from a job folder to a running job.

``job`` holds the records and writes the folder; ``accelerate_yaml`` turns a plan into accelerate's YAML, with what
is special to ``single``, ``ddp``, ``fsdp2`` and ``deepspeed`` in a module each; ``launch`` starts it. ``templates``
are the job's own scripts, copied as they are.
"""
