"""A file whose content is known by its SHA-256, from the network or a copy."""

import hashlib
import urllib.request
from http.client import HTTPException
from pathlib import Path

from runtime.errors import UserError, in_a_line


def read_known_file(
    name: str, url: str, sha256: str, hint: str, source: Path | None = None
) -> bytes:
    """Download a file, or read a copy of it, and check its content.

    Raises UserError, with the hint on what to do instead, if it cannot be had or is another file.
    """
    try:
        content = source.read_bytes() if source else urllib.request.urlopen(url, timeout=20).read()
    # ValueError: a proxy or redirection that is not an address
    except (OSError, HTTPException, ValueError) as error:
        raise UserError(
            f"{name} could not be {'read' if source else 'downloaded'} from {source or url} "
            f"({in_a_line(error)}); {hint}"
        ) from None
    if (digest := hashlib.sha256(content).hexdigest()) != sha256:
        raise UserError(f"{source or url}: not {name}: SHA-256 {digest}, expected {sha256}; {hint}")
    return content
