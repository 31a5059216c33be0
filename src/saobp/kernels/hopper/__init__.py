"""Kernels in Gluon for Hopper GPUs."""
