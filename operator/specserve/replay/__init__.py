"""The policy offline: `specserve explain` and `specserve replay`, the operator's own decisions."""
