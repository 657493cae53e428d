"""A rank that sends bytes that no protocol allows."""

import socket
import sys
import time

if __name__ == "__main__":
    descriptor = int(sys.argv[sys.argv.index("--fd") + 1])
    socket.socket(fileno=descriptor).send(b"\x80\x04garbage")
    time.sleep(300)  # it must be ended: it does not end by itself
