"""What is measured besides the sweep: one module for each command."""
