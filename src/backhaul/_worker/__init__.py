"""One worker: its threads, its deadlines, and the object that everything else attaches to."""
