"""The streaming engine: frozen weights lie in a store on disk and pass through the device one block at a time."""
