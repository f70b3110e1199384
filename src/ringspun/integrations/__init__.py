"""Other libraries on a ring. Each module imports one optional package, and does nothing until asked to."""
