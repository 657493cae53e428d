"""TLS 1.3 between a head and its machines: both present a certificate, and each accepts only the pinned one.

The openssl command creates the keys and self-signed certificates; every Linux has it or can install it.
"""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import tempfile
from pathlib import Path

from ..errors import PlatformError, TransportError
from .endpoint import HEAD, Endpoint

DAYS = 3650  # a certificate's life; only a new `cluster init` replaces the pinned one


def make_certificate(name: str) -> tuple[str, str]:
    """Creates a key on the curve P-256 and its certificate, both PEM. Raises PlatformError if openssl fails."""
    if shutil.which("openssl") is None:
        raise PlatformError(
            "The openssl command, which makes the certificates, is not installed (Debian: apt-get install openssl)."
        )
    with tempfile.TemporaryDirectory() as folder:  # mode 0700
        key, certificate = Path(folder, "key.pem"), Path(folder, "certificate.pem")
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        command += ["-nodes", "-sha256", "-days", str(DAYS), "-subj", f"/CN={name}"]
        command += ["-keyout", str(key), "-out", str(certificate)]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise PlatformError(f"openssl made no certificate: {done.stderr.strip()[-500:]}")
        return key.read_text(), certificate.read_text()


def make_context(endpoint: Endpoint) -> ssl.SSLContext:
    """Returns the TLS context of one end. No session is resumed: a full handshake cannot be answered by a replay.
    Raises PlatformError for a damaged key or certificate."""
    server = endpoint.role == HEAD
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is pinned, so the host name does not matter
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_TICKET
    if server:
        context.num_tickets = 0
    descriptor = os.memfd_create("parallel-backend-key", os.MFD_CLOEXEC)  # ssl reads keys from files only
    try:
        context.load_verify_locations(cadata=endpoint.peer)
        os.write(descriptor, (endpoint.key + endpoint.certificate).encode())
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    except (ssl.SSLError, ValueError) as error:
        raise PlatformError(
            f"The key or a certificate in the {endpoint.role}'s secret file of cluster {endpoint.cluster} is damaged "
            f"({error}). Copy the file again, or make the cluster anew with `python -m parallel_backend cluster init`."
        ) from None
    finally:
        os.close(descriptor)
    return context


def secure(sock: socket.socket, endpoint: Endpoint, context: ssl.SSLContext, seconds: float) -> ssl.SSLSocket:
    """Does the TLS handshake on `sock`, in `seconds` at most, and returns the connection, which owns `sock`. Raises
    OSError (ssl.SSLError is one), and TransportError if the other end's certificate is not the pinned one."""
    sock.settimeout(seconds)  # limits the whole handshake, not each read
    try:
        wrapped = context.wrap_socket(sock, server_side=endpoint.role == HEAD)
    except BaseException:
        sock.close()
        raise
    if wrapped.getpeercert(binary_form=True) != ssl.PEM_cert_to_DER_cert(endpoint.peer):
        wrapped.close()
        raise TransportError("the other end showed another certificate than the pinned one")
    return wrapped
