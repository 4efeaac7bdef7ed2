"""How the key of what a job stores comes to its workers: over the control connection, hidden under the job's secret.

The connection proves the secret and does not encrypt.  So the key is added to bits that only the secret gives
(HMAC-SHA256 in counter mode, under a nonce of its own), and what comes of it is authenticated.  It is in no closure, no
setting, no command line and no log.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import msgspec

from cutwater.data.decoding import prepare
from cutwater.errors import WireError
from cutwater.runtime.transport.secret import Secret
from cutwater.storage.store.seal import PLAIN, Seal

_NONCE_BYTES = 16
_MAC_BYTES = 32


class _Keys(msgspec.Struct, frozen=True, array_like=True):
    keys: list[bytes]
    accept_unsealed: bool


prepare(_Keys)


def hidden(seal: Seal, secret: Secret) -> bytes:
    """The keys of a seal for those who know the secret; nothing where there is none.

    >>> from cutwater.runtime.transport.secret import new_secret
    >>> seal, secret = Seal([b"0123456789abcdef"]), new_secret()
    >>> b"0123456789" in hidden(seal, secret), shown(hidden(seal, secret), secret).key_ids == seal.key_ids
    (False, True)
    """
    if not seal.keyed:
        return b""
    plain = msgspec.msgpack.encode(_Keys(*seal.reveal()))
    nonce = secrets.token_bytes(_NONCE_BYTES)
    covered = nonce + _mixed(plain, nonce, secret)
    return _mac(covered, secret) + covered


def shown(data: bytes, secret: Secret) -> Seal:
    """The seal of which ``hidden`` made this.

    Raises:
        WireError: it was changed on its way.
    """
    if not data:
        return PLAIN
    mac, covered = data[:_MAC_BYTES], data[_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(covered, secret)):
        raise WireError("the key of the job's snapshots was changed on its way to this worker")
    nonce = covered[:_NONCE_BYTES]
    found = msgspec.msgpack.decode(_mixed(covered[_NONCE_BYTES:], nonce, secret), type=_Keys)
    return Seal(found.keys, accept_unsealed=found.accept_unsealed)


def _mixed(data: bytes, nonce: bytes, secret: Secret) -> bytes:
    key, stream = _derived(b"cutwater key transport: stream", secret), b""
    while len(stream) < len(data):
        stream += hmac.new(key, nonce + len(stream).to_bytes(8, "big"), hashlib.sha256).digest()
    return bytes(a ^ b for a, b in zip(data, stream, strict=False))


def _mac(data: bytes, secret: Secret) -> bytes:
    return hmac.new(_derived(b"cutwater key transport: mac", secret), data, hashlib.sha256).digest()


def _derived(label: bytes, secret: Secret) -> bytes:
    return hmac.new(secret.reveal(), label, hashlib.sha256).digest()
