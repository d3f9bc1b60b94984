"""The built-in readers, by the kind of call."""
