"""One worker: its threads, the frames that it receives, its deadlines, and the object that all parts attach to."""
