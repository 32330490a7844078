"""Kubernetes clusters for tests and the demo.

`light` is a control plane on loopback without root, `node` adds one real node inside namespaces of
its own, `existing` is the user's. All of them are a `tests.cluster.handle.Cluster`.
"""
