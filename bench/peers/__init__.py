"""The peers that fastattn is measured beside, and the libraries that some of them need."""
