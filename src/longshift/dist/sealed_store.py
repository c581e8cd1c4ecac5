"""A store whose values carry a seal that only the ranks of one run can make.

The ranks of a run meet at a TCPStore on loopback, and any process of the machine can write to that.
What ranks find there they believe: where a peer listens, why one failed. So each value is kept
behind its HMAC-SHA256 under a secret of the run, over key and value:

    set(key, value)     TCPStore: key -> HMAC(secret, key, value) | value
    get(key)            the value, where the seal is right; PeerError else

A stranger can still stop a run, by filling the store or counting its counters up, but not lead a
rank anywhere. NCCL asks the store from threads of its own, to which a store in Python would be a
danger: what it finds is not sealed.
"""

import hmac
import secrets
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from longshift.errors import PeerError

SEAL_BYTES = 32


def new_secret() -> str:
    """A secret for one run, in hexadecimal."""
    return secrets.token_hex(SEAL_BYTES)


class SealedStore(Store):
    """Another store, through which values go sealed. `get` raises PeerError for a value that was
    not sealed with this `secret`."""

    def __init__(self, store: TCPStore, secret: str):
        super().__init__()
        self._store = store
        self.secret = secret

    @property
    def plain(self) -> TCPStore:
        """The store below, without seals."""
        return self._store

    @property
    def port(self) -> int:
        return self._store.port

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(key, self._seal(key, data) + data)  # pyright: ignore[reportArgumentType]

    def get(self, key: str) -> bytes:
        record = bytes(self._store.get(key))
        seal = record[:SEAL_BYTES]
        data = record[SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(key, data)):
            raise PeerError(
                f"the store of this run holds {key!r}, which none of its ranks has written: "
                "another process writes there"
            )
        return data

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._store.wait(list(keys))
        else:
            self._store.wait(list(keys), timeout)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        return False

    def _seal(self, key: str, data: bytes) -> bytes:
        name = key.encode()
        # Without the length, a key and a value could be read as a longer key and a shorter value.
        record = len(name).to_bytes(8, "big") + name + data
        return hmac.digest(bytes.fromhex(self.secret), record, "sha256")
