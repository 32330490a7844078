"""Blanks the device code of a CUDA library that one model on one GPU never runs.

FlashAttention-3's library is a gigabyte: hundreds of kernels, each for several architectures. The
file is edited in place. Each container keeps its offset, since the code points at it, and exactly
one image for the wanted architecture: its own if it is wanted, else a copy of the smallest of all,
so that the driver still finds something valid to load. What is left over becomes zeros, which a
sparse tar and xz reduce to nothing.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SECTION: Final = b".nv_fatbin"
CONTAINER_MAGIC: Final = 0xBA55ED50
ALIGNMENT: Final = 8


@dataclass(frozen=True)
class Container:
    """One fat binary in the section.

    Attributes:
        start: Offset of its header in the file.
        head: Size of its header.
        size: Bytes after the header.
        image: Its first entry, whole.
        code: Where the machine code begins in `image`.
        architecture: What the first entry is for, such as 90.
    """

    start: int
    head: int
    size: int
    image: bytes
    code: int
    architecture: int


def keep(library: Path, wanted: Callable[[bytes], bool], architecture: int) -> tuple[int, int]:
    """Blank all device code but that which `wanted` takes by its ELF image.

    Returns:
        How many containers keep their code, and how many there are.

    Raises:
        ValueError: The library is not laid out as expected.
    """
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        containers = list(_containers(content))
        if not containers:
            raise ValueError(f"{library} holds no device code")
        strangers = {each.architecture for each in containers} - {architecture}
        if strangers:
            raise ValueError(f"first images of {library} are for {strangers}")
        smallest = min((each.image for each in containers), key=len)
        kept = 0
        for each in containers:
            own = wanted(each.image[each.code :])
            kept += own
            image = each.image if own else smallest
            body = each.start + each.head
            content[body : body + each.size] = image.ljust(each.size, b"\0")
            struct.pack_into("<Q", content, each.start + 8, len(image))
    return kept, len(containers)


def _containers(content: mmap.mmap) -> Iterator[Container]:
    position, length = _section(content)
    end = position + length
    while position < end:
        magic, _, head, size = struct.unpack_from("<IHHQ", content, position)
        if magic != CONTAINER_MAGIC:
            position += ALIGNMENT  # padding between two
            continue
        body = position + head
        _, _, code, payload = struct.unpack_from("<HHIQ", content, body)
        (architecture,) = struct.unpack_from("<I", content, body + 28)
        image = content[body : body + code + payload]
        yield Container(position, head, size, image, code, architecture)
        position = body + size


def _section(content: mmap.mmap) -> tuple[int, int]:
    """Return offset and size of the section with device code, from the ELF header on."""
    (table,) = struct.unpack_from("<Q", content, 0x28)
    entry, count, names_index = struct.unpack_from("<HHH", content, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQ", content, table + index * entry) for index in range(count)
    ]
    names = headers[names_index][4]
    for name, _, _, _, offset, size in headers:
        text = content[names + name : content.find(b"\0", names + name)]
        if text == SECTION:
            return offset, size
    raise ValueError("no section with device code")
