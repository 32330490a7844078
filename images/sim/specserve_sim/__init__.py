"""Simulated SGLang engine: measured round times, the real admin path, no model."""
