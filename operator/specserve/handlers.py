"""The part of kopf: watch SpecServes and hand each event on. Decorators and settings only.

Event handlers, because they need no finalizer and write nothing: a SpecServe and its CRD can be
deleted with no operator there.
"""

import dataclasses
import logging
import os
from typing import Any

import kopf

from specserve import names
from specserve.reconcile import Reconciler

registry = kopf.OperatorRegistry()


def settings() -> kopf.OperatorSettings:
    """Return kopf's settings; each value that differs from its default was measured."""
    chosen = kopf.OperatorSettings()
    chosen.posting.enabled = False
    chosen.posting.reporting_component = names.MANAGER
    chosen.networking.request_timeout = 30
    chosen.networking.connect_timeout = 5
    # Back within seconds of an API server's return, not within its own growing pauses.
    chosen.networking.error_backoffs = [1, 1, 2, 3] + [3] * 200
    # Keeps a worker per object alive for this long: the default holds 500 MB at 11,000 objects.
    chosen.queueing.idle_timeout = 0.2
    chosen.queueing.exit_timeout = 0.5
    chosen.watching.chunk_size = 500
    # Scanning takes rights on kinds and namespaces of the whole cluster; `specserve.scope` looks
    # with none whether there is anything to watch, before kopf starts and while it runs.
    chosen.scanning.disabled = True
    chosen.networking.enforce_retry_after = True
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    return chosen


@kopf.on.login(registry=registry)
def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
    """Log in as everything else in this process does."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    if host and not os.environ.get("KUBECONFIG"):
        found = kopf.login_with_service_account(**kwargs)
        if found is None:
            return None
        # By address, not by name: without the cluster's DNS there is none, and control would be.
        name = f"[{host}]" if ":" in host else host
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        return dataclasses.replace(found, server=f"https://{name}:{port}")
    return kopf.login_with_kubeconfig(**kwargs)


@kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry)
def specserve(event: kopf.RawEvent, memo: kopf.Memo, **_: Any) -> None:
    """Hand on what happened to a SpecServe."""
    reconciler: Reconciler = memo.reconciler
    reconciler.take_resource(dict(event["object"]), deleted=event["type"] == "DELETED")


@kopf.on.cleanup(registry=registry)
async def cleanup(memo: kopf.Memo, **_: Any) -> None:
    """End our own loops before kopf waits for every task of the process."""
    await memo.stop()
