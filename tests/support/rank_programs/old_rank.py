"""A rank of another version of the pack: its greeting has a protocol version that this pack does not support."""

import functools

from parallel_backend.rank.__main__ import main
from parallel_backend.wire import protocol

if __name__ == "__main__":
    greeting = protocol.Hello
    protocol.Hello = functools.wraps(greeting)(lambda version, *rest: greeting(version + 1, *rest))
    main()
