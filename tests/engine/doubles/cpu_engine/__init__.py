"""A plugin of SGLang, for tests alone: lets the EAGLE worker run on a CPU without AMX.

SGLang's backend for EAGLE on a CPU is written for AMX, and gives way to another one without it;
its kernels are those of `sgl_kernel`, which here is plain torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

BACKEND = "sglang.srt.layers.attention.intel_amx_backend.IntelAMXAttnBackend"


def register() -> None:
    """Claim AMX where SGLang chooses the backend, and mend the backend."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _claim_amx()
    for name in ("forward_extend", "forward_decode"):
        HookRegistry.register(f"{BACKEND}.{name}", _with_lengths, HookType.AROUND)


def _claim_amx() -> None:
    try:
        from sglang.srt.runtime_context import override_platform
    except ImportError:  # 0.5.16
        from sglang.srt.arg_groups import overrides

        overrides.cpu_has_amx_support = lambda: True
    else:
        override_platform(has_amx=True).install()


def _with_lengths(
    original: Callable[..., Any],
    backend: Any,
    query: Any,
    key: Any,
    value: Any,
    layer: Any,
    batch: Any,
    *rest: Any,
    **named: Any,
) -> Any:
    """Give the kernels the lengths that the backend prepared.

    0.5.16 prepares lengths that count the drafts, and then hands on the batch's, which do not.
    """
    lengths = batch.seq_lens
    if backend.draft_decode_metadata is not None:
        batch.seq_lens = backend.draft_decode_metadata[1]
    elif backend.extend_metadata is not None:
        batch.seq_lens = backend.extend_metadata[0]
    try:
        return original(backend, query, key, value, layer, batch, *rest, **named)
    finally:
        batch.seq_lens = lengths
