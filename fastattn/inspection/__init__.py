"""What runs and what it costs: the backend of a call, and the attention calls of a model."""
