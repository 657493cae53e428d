"""A rank of another version of the pack, as after an update of the files below a running ComfyUI."""

from parallel_backend.rank.__main__ import main
from parallel_backend.wire import protocol

if __name__ == "__main__":
    protocol.VERSION += 1
    main()
