"""Benchmarks of the operator against a real API server; each prints a table and writes JSON."""
