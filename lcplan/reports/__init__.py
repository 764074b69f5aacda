"""Reporters: they render records and never compute."""
