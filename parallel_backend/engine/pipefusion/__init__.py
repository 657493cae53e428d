"""PipeFusion: stages of blocks, patches that flow through them, and the messages between them."""
