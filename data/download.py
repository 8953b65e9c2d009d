"""Read a file with a known SHA-256, from the network or a copy."""

from tiktoken.load import check_hash, read_file

from runtime.errors import UserError, in_a_line


def read_known_file(name: str, place: str, sha256: str, hint: str) -> bytes:
    """Download a file, or read a copy. Raises UserError with the hint if that fails or the content
    differs.
    """
    try:
        content = read_file(place)
        if not check_hash(content, sha256):
            raise ValueError(f"another file, expected SHA-256 {sha256}")
        return content
    except Exception as error:  # from the disk, or tiktoken's HTTP library
        raise UserError(
            f"{name} could not be read from {place} ({in_a_line(error)}); {hint}"
        ) from None
