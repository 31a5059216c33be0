"""Estimates with standard errors, in memory linear in length."""
