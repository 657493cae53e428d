"""Keys and self-signed certificates by the openssl command, which every Linux has or can install."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from ..errors import PlatformError

DAYS = 3650  # a certificate is pinned and made anew by `cluster init`; nothing renews it


def make_certificate(name: str) -> tuple[str, str]:
    """(key, certificate) in PEM, on the curve P-256. Raises PlatformError where there is no openssl."""
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
