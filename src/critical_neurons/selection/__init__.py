"""Which units stay: by scores, by search, by gates."""
