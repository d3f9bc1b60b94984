"""The modules behind removed units refitted, so that what was removed is missed least."""
