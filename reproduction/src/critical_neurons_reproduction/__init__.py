"""Critical neurons reproduction: networks, data and runs built on the library, which does not know of them."""
