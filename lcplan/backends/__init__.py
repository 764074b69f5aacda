"""From a plan to a job folder, and from a job folder to a running job.

``job`` holds the records and writes the folder; ``single`` and ``fsdp2`` turn a plan into accelerate's YAML;
``launch`` starts it. ``templates`` are the job's own scripts, copied as they are.
"""
