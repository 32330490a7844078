from __future__ import annotations


def pytest_collection_modifyitems(items):
    """Long tests first, so that two workers end together."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
