"""Units removed or masked, what is left refitted and measured."""
