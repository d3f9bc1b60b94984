"""Core: frozen data that validates itself. It imports neither torch nor any other package of the library."""
