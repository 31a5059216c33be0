"""Atomic writes and locks: files and folders that are complete or absent."""
