"""CURVE keys: encryption of every connection, and admission of those who have the client's key only.

keys/server.key           public key of the buffer, for every peer
keys/server.key_secret    its secret, for the buffer's process only
keys/client.key_secret    the secret of everyone who may connect
keys/admitted/client.key  public keys of those who may connect
"""

from __future__ import annotations

from pathlib import Path

import zmq
import zmq.asyncio
import zmq.auth

from buffers.errors import KeysError

SERVER, CLIENT, ADMITTED = "server", "client", "admitted"
LOOPBACK = ("tcp://127.", "tcp://localhost", "tcp://[::1]", "ipc://", "inproc://")


def make(folder: Path) -> None:
    """Makes all keys in a new folder that only its owner can read."""
    try:
        folder.mkdir(parents=True, mode=0o700)
    except FileExistsError:
        raise KeysError(f"{folder} exists; keys are never overwritten. Choose another folder, or remove it") from None
    (folder / ADMITTED).mkdir(mode=0o700)
    for name in (SERVER, CLIENT):
        zmq.auth.create_certificates(str(folder), name)  # pyright: ignore[reportUnknownMemberType]
    (folder / f"{CLIENT}.key").rename(folder / ADMITTED / f"{CLIENT}.key")
    for secret in folder.glob("*.key_secret"):
        secret.chmod(0o600)


def check(bind: str, keys: str | None) -> None:
    """Refuses an address that other hosts can reach without keys, and keys that are not there."""
    if keys is None and not bind.startswith(LOOPBACK):
        raise KeysError(
            f"{bind!r} can be reached from other hosts, and buffer.security.keys is not set. "
            "Make keys with `async-rl keys DIR` and set buffer.security.keys: DIR"
        )
    if keys is not None:
        for name in (f"{SERVER}.key", f"{SERVER}.key_secret", f"{CLIENT}.key_secret"):
            _load(Path(keys) / name)


def secure_server(socket: zmq.Socket[bytes], keys: Path) -> None:
    """Before the server's bind."""
    socket.curve_publickey, socket.curve_secretkey = _load(keys / f"{SERVER}.key_secret")
    socket.curve_server = True


def secure_client(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, keys: Path) -> None:
    """Before a client's connect."""
    socket.curve_publickey, socket.curve_secretkey = _load(keys / f"{CLIENT}.key_secret")
    socket.curve_serverkey, _ = _load(keys / f"{SERVER}.key")


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(str(path))  # pyright: ignore[reportUnknownMemberType]
    except (OSError, ValueError) as error:
        raise KeysError(f"the key {path} cannot be read: {error}. Make keys with `async-rl keys DIR`") from error
