"""Request bodies: read, unpacked and bounded in bytes, however well they were compressed."""

import zlib

from starlette.requests import Request

from lachesis.schemas.errors import DataError

__all__ = ["BrokenGzipError", "read_body", "unzipped"]


class BrokenGzipError(DataError):
    """Raised when a body that claims to be gzip is not."""


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body as the client had it before it was compressed.

    Raises `DataError` when it has more than `limit` bytes, packed or not, and `BrokenGzipError`.
    """
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > limit:
            raise _too_large(limit)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "gzip" and data:
        found = unzipped(bytes(data), limit)
        request.state.plain_bytes = len(found)
        return found
    if encoding not in {"gzip", "identity"}:
        raise DataError(f"content-encoding {encoding[:40]!r} is not known here; send gzip or none")
    return bytes(data)


def unzipped(data: bytes, limit: int) -> bytes:
    """Return what gzip `data` holds. Raises `BrokenGzipError`, and `DataError` when that is more than `limit` bytes."""
    inflate = zlib.decompressobj(wbits=31)
    try:
        found = inflate.decompress(data, limit + 1)
    except zlib.error as error:
        raise BrokenGzipError(f"Invalid gzip payload: {error}") from error
    if len(found) > limit:
        raise _too_large(limit)
    if not inflate.eof or inflate.unused_data:
        raise BrokenGzipError("Invalid gzip payload: it ends too early, or too late")
    return found


def _too_large(limit: int) -> DataError:
    return DataError(
        f"the body has more than {limit} bytes unpacked, the setting gateway.body_bytes; send smaller groups"
    )
