"""The scripts of a job folder. They are copied verbatim and never import lcplan."""
